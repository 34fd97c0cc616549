"""plan.py as a person meets it: its modes end in files and a printed answer, its mistakes in one message and
exit code 2.
"""

import csv
import dataclasses
import functools
import gzip
import json
import shlex

import pytest

from mstrain.commands import plan
from mstrain.commands.plans.modes import ABOUT, MODES, choose
from mstrain.commands.plans.output import make_folder
from mstrain.commands.plans.pod import PodConfig
from mstrain.commands.train import load_config
from mstrain.hardware.layer_profiles import read_profiles
from mstrain.models.size import count_parameters
from mstrain.models.zoo import load_preset
from tests.typed import exit_code

command = functools.partial(exit_code, plan.COMMAND)


def test_distir_experiment_writes_tables_plots_and_a_trace(tmp_path, capsys):
    assert command("experiment=distir_mlp", "rules=notebook", "trials=1", f"run_dir={tmp_path}") == 0
    printed = capsys.readouterr().out
    assert "rules notebook" in printed and "55313.0 samples/s" in printed
    assert json.loads((tmp_path / "summary.json").read_text())["plans"] == 52
    for name in ("grid_search.csv", "grid_search.json", "grid_search.pdf", "best_pipeline.json.gz"):
        assert (tmp_path / name).stat().st_size > 0


def test_modes_are_chosen_by_key_by_host_file_or_by_default():
    assert choose(["batch=8"]) == ("planner", "pod", ["batch=8"])
    assert choose(["hostfile=x"])[1] == "optimal"
    assert choose(["planner=metis", "hostfile=x"]) == ("planner", "metis", ["hostfile=x"])
    assert choose(["profile=tiny", "seq=8"]) == ("profile", "model", ["model=tiny", "seq=8"])


def test_help_lists_the_keys_of_the_mode(capsys):
    """With their defaults, also those of the mode's file in conf/, and which keys are required."""
    assert command("planner=metis", "--help") == 0
    printed = capsys.readouterr().out
    assert "max_permute_len=128" in printed and "JSON file that maps each ADDRESS" in printed
    assert "hostfile=VALUE (required)" in printed and "run_dir=runs/plan_metis" in printed
    modes = {f"{key}={value}" for key, values in MODES.items() for value in values}
    assert modes | {"profile=MODEL", "published=FILE"} == set(ABOUT) and all(mode in printed for mode in ABOUT)


POD = ["model=tiny", "model.vocab_size=256", "cluster=h200:8", "batch=16", "seq=64", "simulate=false"]


@pytest.fixture(scope="module")
def pod(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pod")
    assert command(*POD, f"run_dir={folder}") == 0
    return folder


def test_pod_writes_plans_with_terms_and_reasons(pod):
    with open(pod / "plans.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(
        {tuple(row[key] for key in ("data", "algorithm", "rows", "cols", "context", "pipeline")) for row in rows}
    ) == len(rows)
    seconds = [float(row["step_seconds"]) for row in rows if row["step_seconds"]]
    assert seconds == sorted(seconds) and rows[0]["why"] == "best" and all(row["why"] for row in rows)
    terms = [name for name in rows[0] if name.endswith("_seconds") and name != "step_seconds"]
    assert sum(float(rows[0][name]) for name in terms) == pytest.approx(seconds[0])
    document = json.loads((pod / "plans.json").read_text())
    assert document["searched_whole_space"] and len(document["plans"]) == 5 and document["plans"][0]["stages"]
    assert (pod / "throughput_against_memory.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("model, seq", [("tiny", 256), ("gpt3_175b", 2048), ("llama2_7b", 2048), ("llama3_8b", 2048)])
def test_a_sequence_has_no_more_tokens_than_a_model_has_positions(model, seq):
    model = dataclasses.replace(load_preset(model), vocab_size=256)
    assert PodConfig(model).seq == seq
    with pytest.raises(ValueError, match="seq=0"):
        PodConfig(model, seq=0)


def test_a_folder_that_holds_files_is_named_before_they_are_replaced(tmp_path, capsys):
    folder = make_folder(str(tmp_path / "plan"))
    assert not capsys.readouterr().err
    (folder / "plan.json").touch()
    make_folder(str(folder))
    assert f"{folder} holds files" in capsys.readouterr().err


def test_pod_ends_with_a_line_that_train_composes(tmp_path, capsys):
    assert command(*POD, f"run_dir={tmp_path}") == 0
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line[:2] == ["python", "train.py"]
    config = load_config([*line[2:], "data=synthetic"])
    keys = json.loads((tmp_path / "plan.json").read_text())["train"]
    assert config.model.vocab_size == 256  # which the preset leaves open
    assert (config.mesh, config.accumulate, config.remat) == (keys["mesh"], keys["accumulate"], keys["remat"])


def test_train_takes_the_file_and_the_command_line_wins(pod):
    path = pod / "plan.json"
    keys = json.loads(path.read_text())["train"]
    config = load_config(["model=tiny", "batch=16", "seq=64", f"plan={path}"])
    assert (config.mesh, config.parallel.algorithm, config.remat) == (
        keys["mesh"],
        keys["parallel"],
        keys["remat"],
    )
    config = load_config(["model=tiny", "batch=16", "seq=64", f"plan={path}", "mesh=2x2", "remat=full"])
    assert (config.mesh, config.remat, config.accumulate) == ("2x2", "full", keys["accumulate"])


# What the file says, and words of the message.
PLAN_FILES = {
    "absent": (None, ["No such file", "plan.json"]),
    "not JSON": ("{", ["not JSON", "run plan.py again"]),
    "not a plan": ("[1]", ["is a list", "run plan.py again"]),
    "pipeline": (
        '{"model": "tiny", "train": null, "why_not_trainable": "no pipeline"}',
        ["no pipeline", "Type pipeline=1"],
    ),
    "another model": ('{"model": "gpt2", "train": {}}', ["model gpt2", "Type model=gpt2"]),
    "other keys": ('{"model": "tiny", "train": {"run_dir": "x"}}', ["'run_dir'", "run plan.py again"]),
}


@pytest.mark.parametrize("case", PLAN_FILES)
def test_train_refuses_a_bad_plan_file(case, tmp_path):
    text, words = PLAN_FILES[case]
    path = tmp_path / "plan.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as error:
        load_config(["model=tiny", f"plan={path}"])
    assert all(word in str(error.value) for word in [str(path), *words]), error.value


# Arguments, and words of the message: what is wrong and what to type.
MISTAKES = {
    "unknown mode": (["planner=meits"], ["Did you mean planner=metis?"]),
    "two modes": (["planner=metis", "profile=tiny"], ["different modes", "Type one"]),
    "key of another mode": (["planner=metis", "cluster=v4-8"], ["'cluster'"]),
    "missing key": (["planner=metis", "hostfile=x"], ["clusterfile= is missing", "Type clusterfile="]),
    "no such slice": (["cluster=v4-65"], ["v4-65", "the nearest is v4-64"]),
    "no such chip": (["cluster=h300:8"], ["h300:8", "h200"]),
    "part of a server": (["cluster=h200:12"], ["nodes of 8", "h200:16"]),
    "chip without bf16": (["cluster=t4:4"], ["peak", "t4"]),
    "degree": (["pipeline=two"], ["pipeline=two", "pipeline=4"]),
    "degrees that do not multiply": (["pipeline=3"], ["pipeline=3", "multiply to 32", "pipeline=auto"]),
    "batch on copies": (["replicas=32", "batch=31"], ["replicas=32", "batch=31"]),
    "nothing fits": (
        ["model=megatron_nlg_530b", "cluster=v4-64"],
        ["no plan of megatron_nlg_530b", "GB", "larger cluster=, or another batch=."],
    ),
    "nothing fits beside the margin": (["memory_margin=0.99"], ["no plan of", "or a smaller memory_margin=."]),
    "degrees that are not all devices": (
        ["cluster=v5p-1024", "replicas=128", "tensor=8"],
        ["no plan has replicas=128 and tensor=8", "whole axes of 8x8x8 chips or each a part of one"],
    ),
    "too little time": (["max_seconds=1e-6"], ["no plan was found", "of search. Type max_seconds="]),
    "no file": (["published=null"], ["published=null names no file", "published=FILE"]),
    "vocabulary": (["model=tiny", "seq=64"], ["model.vocab_size=256"]),
    "interleave": (["interleave=2"], ["no effect", "schedule=interleaved"]),
    "interleaved batch": (
        ["schedule=interleaved", "pipeline=4", "batch=6"],
        ["no plan of", "batch=6"],
    ),
    "sequence": (["seq=4096"], ["seq=4096", "Type seq=2048"]),
    "margin": (["memory_margin=1"], ["memory_margin=0.1"]),
    "no time": (["max_seconds=0"], ["max_seconds=60"]),
    "no folder": (["run_dir=/proc/x"], ["run_dir=/proc/x"]),
    "misspelt model": (["model=gpt3_175"], ["Did you mean model=gpt3_175b?"]),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_message_with_its_fix(case, tmp_path, monkeypatch, capsys):
    arguments, words = MISTAKES[case]
    monkeypatch.setattr("mstrain.planner.search.PROGRESS_SECONDS", float("inf"))  # also on a busy machine
    if not any(argument.startswith("run_dir=") for argument in arguments):
        arguments = [*arguments, f"run_dir={tmp_path}"]
    assert command(*arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("plan: ") and message.count("\n") == 1 and "Traceback" not in message
    assert all(word in message for word in words), message


def test_a_search_out_of_time_keeps_what_it_found(tmp_path, monkeypatch, capsys):
    clock = iter(0.02 * tick for tick in range(1000000))
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    assert command(*POD, "max_seconds=5", f"run_dir={tmp_path}") == 0
    assert "plans evaluated, not exhaustive." in capsys.readouterr().out
    assert not json.loads((tmp_path / "plans.json").read_text())["searched_whole_space"]


def test_profiles_measured_here_are_what_the_planners_read(tmp_path, capsys):
    keys = ["tensor=[2]", "batches=[2]", "seq=16", "repeats=1", "dtype=f32", "device_type=here"]
    assert command("profile=tiny", *keys, f"run_dir={tmp_path}") == 0
    assert "1 profiles of tiny" in capsys.readouterr().out
    profiles = read_profiles(tmp_path, ["here"])
    assert list(profiles) == [("here", 2, 2)]
    layers = load_preset("tiny").layers + 2
    assert all(len(p.layer_ms) == len(p.layer_mb) == len(p.parameter_bytes) == layers for p in profiles.values())
    model = dataclasses.replace(load_preset("tiny"), vocab_size=256)
    assert sum(profiles["here", 2, 2].parameter_bytes) == 4 * (
        count_parameters(model) + 64 * 256
    )  # a tied table is in both
    (tmp_path / "hostfile").write_text("a slots=4\n")
    entry = {"instance_type": "here", "inter_bandwidth": 10, "intra_bandwidth": 40, "memory": 4}
    (tmp_path / "cluster.json").write_text(json.dumps({"a": entry}))
    folder = tmp_path / "only"
    folder.mkdir()
    for path in tmp_path.glob("DeviceType.*"):
        path.rename(folder / path.name)
    given = [
        f"hostfile={tmp_path / 'hostfile'}",
        f"clusterfile={tmp_path / 'cluster.json'}",
        f"profiles={folder}",
    ]
    assert command(*given, f"num_layers={layers}", "batch=8", "hidden_size=64", f"run_dir={tmp_path}") == 0


@pytest.mark.parametrize(
    "arguments,words",
    [
        (["tensor=[64]"], ["tensor=64", "are present", "Type tensor=[1]"]),
        (["tensor=2"], ["tensor=2 is not a list"]),
        (["batches=[0]"], ["Type batches='[1,2]'"]),
        (["algorithm=wang"], ["megatron, meshslice"]),
        (["max_seconds=1e-9", "seq=16", "dtype=f32"], ["missing in", "_bs1.json", "larger max_seconds"]),
    ],
)
def test_a_profile_that_cannot_be_is_one_message(arguments, words, tmp_path, capsys):
    assert command("profile=tiny", *arguments, f"run_dir={tmp_path}") == 2
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_printed_commands_can_be_pasted(tmp_path, capsys):
    """Whatever the name of the folder and of the model: the words of the command are those of a shell."""
    folder = tmp_path / "a b;c=d&e"
    model = ["model=deepseek_v2_lite", "model.name=mine", "model.layers=4", "model.latent.key_rank=256"]
    keys = ["batch=8", "seq=64", "dtype=f32", "simulate=false", "remat=none", "accumulate=1", "algorithm=meshslice"]
    keys += ["tensor=8", "max_seconds=300"]
    assert command(*model, "cluster=h200:8", *keys, f"run_dir={folder}") == 0
    lines = capsys.readouterr().out.splitlines()
    typed = [shlex.split(line.partition("train.py ")[2]) for line in lines if "train.py model=" in line]
    assert f"plan={folder}/plan.json" in typed[0]
    configs = [load_config(words) for words in typed]
    assert len(configs) == 2 and configs[0].mesh == configs[1].mesh
    for config in configs:
        sizes = config.model.name, config.model.layers, config.model.latent.key_rank
        assert (*sizes, config.dtype) == ("mine", 4, 256, "f32")
    assert command("experiment=metis_inputs", f"run_dir={folder}") == 0
    written = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert f"hostfile={folder}/hostfile" in written and written[-1] == "gbs=128"


def test_the_winner_is_simulated_into_a_trace_and_pictures(tmp_path, capsys):
    keys = [key for key in POD if not key.startswith("simulate")]
    simulated = ("pipeline=2", "schedule=1f1b", "shard=none", "context=1", "remat=none")
    assert command(*keys, *simulated, f"run_dir={tmp_path}") == 0
    printed = capsys.readouterr().out
    assert "Simulated" in printed and "pipeline.schedule=1f1b" in printed
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] in ("process_name", "thread_name")}
    assert {"compute", "link pipeline out"} <= names and any(name.startswith("h200 ") for name in names)
    work = [event for event in trace if event["ph"] == "X"]
    assert {"MatMul", "Send", "Adam", "AttentionGrad"} <= {event["name"] for event in work}
    assert all({"shape", "bytes", "flops"} <= set(event["args"]) for event in work)
    assert {"parameters", "gradients", "optimizer", "activations"} <= {e["name"] for e in trace if e["ph"] == "C"}
    for name in ("gantt.png", "memory.png", "memory_by_category.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "simulation.json").read_text())
    assert numbers["peak_bytes"] <= sum(numbers["peak_bytes_by_category"].values())
    assert 0 < numbers["step_seconds"] and 0 <= numbers["exposed_fraction"] < 1
    document = json.loads((tmp_path / "plan.json").read_text())
    assert "stage2" in document["train"]["mesh"] and not document["why_not_trainable"]
