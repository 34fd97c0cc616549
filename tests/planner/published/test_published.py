"""Terms and uncertainty of predicted runs (test_golden.py holds the ratios), and files that are not such files."""

import copy
import csv
import json
import math
import statistics
from pathlib import Path

import pytest

from mstrain.commands.plans.modes import run
from mstrain.hardware import all_chips
from mstrain.hardware.efficiency import efficiency_of
from mstrain.planner.execution import infer_style
from mstrain.planner.layer import exposed_beside
from mstrain.planner.published.predict import predict
from mstrain.planner.published.rows import read_rows

GOLDEN = Path(__file__).parents[2] / "golden" / "published.json"
PAGE = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
MORE = Path(__file__).parents[3] / "docs" / "data" / "published.json"


@pytest.fixture(scope="module")
def predictions():
    return [predict(row) for row in read_rows(str(GOLDEN))]


def test_most_errors_are_within_two_of_the_stated_standard_errors(predictions):
    inside = [abs(prediction.ratio - 1) < 2 * prediction.costed.uncertainty for prediction in predictions]
    assert sum(inside) >= 0.9 * len(inside)


def test_the_page_has_these_predictions(predictions):
    for prediction in predictions:
        (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {prediction.row.name} |")]
        assert f" | {prediction.ratio:.3f} | {100 * prediction.costed.uncertainty:.0f} % | " in line


def test_the_page_counts_what_is_within_15_percent():
    ratios = [predict(row).ratio for row in read_rows(str(MORE))]
    errors = [abs(ratio - 1) for ratio in ratios]
    inside = sum(error < 0.15 for error in errors)
    text = f"Median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %"
    assert f"{text}; {inside} of {len(errors)} are" in PAGE


def test_terms_add_up_and_rows_do_not_know_their_names(predictions, tmp_path):
    document = json.loads(GOLDEN.read_text())
    row = document["rows"][1]
    other = {**copy.deepcopy(row), "name": "any, 2021", "measured": {"mfu": 0.3}}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [row, other]}))
    one, two = (predict(each) for each in read_rows(str(path)))
    assert one.costed == two.costed
    assert one.costed.seconds == pytest.approx(row["batch"] * row["seq"] / 128 / one.tokens_per_second)


def test_notes_name_the_keys_that_do_not_affect_the_prediction(tmp_path):
    rows = {row["name"]: row for row in json.loads(GOLDEN.read_text())["rows"]}
    gpu, tpu = copy.deepcopy(rows["megatron-2021 1.7B"]), copy.deepcopy(rows["maxtext llama2-70b v5p"])
    gpu["cluster"] |= {"slices": 2, "topology": "4x4x4"}
    gpu["plan"]["interleave"] = 4
    tpu["cluster"] |= {"node_gbytes_per_s": 1.0}
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [gpu, tpu]}))
    found = [read.notes for read in read_rows(str(path))]
    assert found == [
        ("Keys without effect on a100-80gb:32 and this plan: cluster.slices, cluster.topology, plan.interleave.",),
        ("Keys without effect on v5p-128 and this plan: cluster.node_gbytes_per_s.",),
    ]


def bad(change) -> str:
    """The first row of the golden file, changed, as a document."""
    row = copy.deepcopy(json.loads(GOLDEN.read_text())["rows"][0])
    change(row)
    return json.dumps({"rows": [row]})


BAD = {
    "plan.remat is missing": bad(lambda row: row["plan"].pop("remat")),
    "model.layers is 'many'": bad(lambda row: row["model"].update(layers="many")),
    "model.gated is 1": bad(lambda row: row["model"].update(gated=1)),
    "batch is -4": bad(lambda row: row.update(batch=-4)),
    "plan is a list": bad(lambda row: row.update(plan=[])),
    "device 'a900' is unknown": bad(lambda row: row["cluster"].update(device="a900")),
    "and the cluster has 32": bad(lambda row: row["plan"].update(data=16)),
    "more parts than the model has layers": bad(
        lambda row: row["plan"].update(data=4, pipeline=8, schedule="interleaved", interleave=4)
    ),
    "remat 'some' is unknown": bad(lambda row: row["plan"].update(remat="some")),
    "measured.mfu is 45; write a fraction": bad(lambda row: row.update(measured={"mfu": 45})),
    "model.vocabulary is 1000000000000": bad(lambda row: row["model"].update(vocabulary=10**12)),
    "measured.step_seconds is NaN": bad(lambda row: row.update(measured={"step_seconds": float("nan")})),
    "nested too deeply": "[" * 200_000,
    "a whole number of 5000 digits": '{"rows": [{"batch": ' + "9" * 5000 + "}]}",
    "has no rows": "[]",
    "not JSON": "{",
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_file_is_one_message_that_names_row_and_key(tmp_path, message):
    path = tmp_path / "bad.json"
    path.write_text(BAD[message])
    with pytest.raises(ValueError) as raised:
        read_rows(str(path))
    text = str(raised.value)
    assert message.lower() in text.lower().replace("nan", "nan")
    assert "\n" not in text and len(text) < 1000
    if BAD[message].startswith('{"rows": [{"name"'):
        assert "row 1 (megatron-2021 1.7B)" in text


def test_plan_writes_table_and_plot(tmp_path, capsys):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": json.loads(GOLDEN.read_text())["rows"][:5:4]}))
    assert run([f"published={path}", f"run_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "megatron-2021 530B" in printed and "median error" in printed
    assert (tmp_path / "published.png").stat().st_size > 10_000
    rows = (tmp_path / "published.csv").read_text().splitlines()
    assert len(rows) == 3
    first = json.loads((tmp_path / "published.json").read_text())["rows"][0]
    terms = sum(value for name, value in first.items() if name.endswith("_seconds") and name != "step_seconds")
    assert terms == pytest.approx(first["step_seconds"])
    errors = {error["name"]: error for error in first["errors"]}
    assert math.hypot(*(error["of_step"] for error in errors.values())) == pytest.approx(first["uncertainty"])
    assert sum(error["share"] for error in errors.values()) == pytest.approx(1)
    assert all(error["unknown"] and error["source"] for error in errors.values())
    assert errors["attention"]["of_step"] == pytest.approx(errors["attention"]["share"] * 0.3)
    line = next(csv.DictReader(rows))
    assert line["largest_error"] == max(errors, key=lambda name: errors[name]["of_step"])
    assert float(line["products_error_of_step"]) == pytest.approx(errors["products"]["of_step"])
    text = " ".join(printed.split())
    assert f"attention {100 * errors['attention']['share']:.0f} x 30 = " in text and "FlashAttention papers" in text


def test_what_the_prediction_leaves_out_or_assumes_is_printed(tmp_path, capsys):
    row = copy.deepcopy(json.loads(GOLDEN.read_text())["rows"][6])
    row["model"]["experts"], row["comment"] = 8, "any"
    row["cluster"]["devices"] = row["plan"]["data"] = row["batch"] = 96
    row["plan"]["microbatch"] = 1
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [row]}))
    assert run([f"published={path}", f"run_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "ignored: comment, model.experts" in printed and "predicted for 3xv5p-64" in printed


@pytest.mark.parametrize("name", [
    "megatron-2021 1008B", "megatron-2022 22B full", "bloom 176B", "mpt a100-80gb 1b 2048 8", "torchtitan 70B full",
    "llama3 405B 16384 131072", "mpt h100 3b 8192 8", "maxtext 64B 1xv5p-64", "maxtext 16B 2xv5e-256",
    "maxtext llama3.1-405b 2xv6e-256",
])  # fmt: skip
def test_runs_that_chose_nothing_of_the_model_are_within_15_percent(name, tmp_path):
    assert abs(ratio_of(name, tmp_path) - 1) < 0.15


@pytest.mark.parametrize(
    "name", ["h200 gpt2-124m torch.compile, batch 32", "h200 llama-1.1b Hugging Face torch.compile"]
)
def test_runs_that_chose_the_styles_of_inductor_are_within_15_percent(name, tmp_path):
    assert abs(ratio_of(name, tmp_path) - 1) < 0.15


def ratio_of(name: str, folder: Path) -> float:
    """Predicted over measured, of a row of docs/data/published.json in a file of its own."""
    path = folder / "rows.json"
    path.write_text(json.dumps({"rows": [row for row in json.loads(MORE.read_text())["rows"] if row["name"] == name]}))
    return predict(read_rows(str(path))[0]).ratio


@pytest.mark.parametrize(("style", "platform", "algorithm", "text"), [
    ("megatron-2022", "gpu", "megatron", "BLOOM, 2022; Megatron-DeepSpeed"), ("torch", "gpu", "ddp", "DeepSpeed, 2023"),
    ("llm-foundry", "gpu", "fsdp", "MosaicML, PyTorch"), ("maxtext", "tpu", "fsdp", "any"),
    ("transformers", "gpu", "gspmd", "Llama in Hugging Face with torch.compile"),
])  # fmt: skip
def test_the_execution_style_follows_from_the_texts(style, platform, algorithm, text):
    assert infer_style(platform, algorithm, text, "full").name == style


def test_a_hidden_collective_slows_what_a_gpu_computes():
    assert exposed_beside(1.0, 10.0, "tpu") == 0 < exposed_beside(1.0, 10.0, "gpu") < 0.2
    assert exposed_beside(10.0, 1.0, "gpu") == 9


def test_rates_of_attention_on_hopper_are_the_published_ones():
    """Shah et al., 2024, figures 5 and 6, 16,384 tokens without a mask: TFLOP/s forward and backward."""
    chip = all_chips()["h100"]
    for published, head_dim, flash2 in (((413, 433), 64, False), ((595, 516), 128, False), ((370, 322), 128, True)):
        both = 3.5 / (1 / published[0] + 2.5 / published[1])
        rate = 1e-12 * efficiency_of(chip).attention_rate(chip, head_dim, flash2=flash2)
        assert 0.8 * both < rate < both  # less with a mask, and at the power limit
