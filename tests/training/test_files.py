"""What a finished run leaves in its directory, read back as a person's tools would."""

import collections
import dataclasses
import json
import math
import re
import struct
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
from jax.profiler import ProfileData
from omegaconf import OmegaConf
from tensorboard.compat.proto import event_pb2
from xprof.convert import raw_to_tool_data

from mstrain.cli import build
from mstrain.data import unigram_nats_per_token
from mstrain.program.optimizer import rate_of, schedule_of
from mstrain.training import record
from mstrain.training.announce import _repetition
from mstrain.training.config import RunConfig
from mstrain.training.json_lines import drop_after
from tests.training.runs import lines, losses

FIELDS = {
    "step", "loss", "grad_norm", "learning_rate", "step_seconds", "predicted_step_seconds", "tokens_per_second", "mfu",
    "tokens_seen", "memory_bytes",
}  # fmt: skip


@pytest.fixture
def directory(finished):
    return Path(finished.config.run_dir)


def scalars(directory) -> dict:
    """{(tag, step): value} of all TensorBoard events: records of length, checksum, event, checksum."""
    found = {}
    for path in (directory / "tensorboard").glob("events.*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            found |= {(value.tag, event.step): value.simple_value for value in event.summary.value}
            data = data[16 + length :]
    return found


def test_every_step_is_logged_with_its_fields(finished, directory):
    rows = lines(directory)
    assert len(losses(directory)) == 6
    options = finished.config.optimizer.for_width(64)
    for row in rows:
        assert row.keys() == FIELDS
        assert row["predicted_step_seconds"] == pytest.approx(finished.prediction.seconds)
        assert row["mfu"] is None  # the peak of an emulated device is unknown
        assert row["memory_bytes"] is None  # and so is what it has in use
        assert row["tokens_seen"] == 16 * 16 * row["step"]
        assert row["tokens_per_second"] == pytest.approx(16 * 16 / row["step_seconds"])
        assert row["learning_rate"] == pytest.approx(float(rate_of("cosine", schedule_of(options, 6), row["step"] - 1)))
        assert math.isfinite(row["grad_norm"]) and row["grad_norm"] > 0
    assert losses(directory)[0] == pytest.approx(np.log(61), rel=0.05)  # it knows nothing yet


def test_evaluations_are_logged(directory):
    rows = lines(directory, "eval.jsonl")
    assert [row["step"] for row in rows] == [4, 6]
    assert all(2 < row["validation_loss"] < 6 for row in rows)


def test_the_configuration_reads_back_equal(finished, directory):
    values = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
    resolved = values.pop("resolved")
    assert build(RunConfig, values) == record.resolved_config(finished)
    assert (values["mesh"], values["dtype"], values["model"]["vocab_size"]) == ("row2-col4", "f32", 61)
    assert values["parallel"]["slices"] == "2" and values["model"]["num_kv_heads"] == 8
    assert resolved["plan"] == ["layers 0-1: attention meshslice os,ls S=2,2; mlp meshslice os,ls S=2,2"]
    assert resolved["digests"] == {"data": finished.corpus.digest, "tokenizer": None}


def test_tensorboard_holds_the_same_numbers(finished, directory):
    found = scalars(directory)
    for row in lines(directory):
        for name in FIELDS - {"step", "mfu", "memory_bytes"}:
            assert found["train/" + name, row["step"]] == pytest.approx(row[name], rel=1e-6)
    assert found["memory/compiled_bytes", 0] == pytest.approx(finished.memory.peak, rel=1e-6)
    assert ("configuration", 0) in found
    for row in lines(directory, "eval.jsonl"):
        assert found["eval/validation_loss", row["step"]] == pytest.approx(row["validation_loss"], rel=1e-6)
    spent = json.loads((directory / "summary.json").read_text())["seconds"]
    kinds = {"steps", "compile", "initialize", "save", "restore", "input", "evaluate", "lost", "other"}
    assert spent.keys() == kinds
    for kind, seconds in spent.items():
        assert found["goodput/" + kind, 6] == pytest.approx(seconds, rel=1e-6)
    assert min(spent[kind] for kind in ("steps", "compile", "initialize", "save", "input", "evaluate")) > 0
    assert spent["restore"] == 0  # nothing to resume from


def test_a_corpus_that_is_read_several_times_is_announced(finished):
    times = 1000 * 16 * 16 / finished.corpus.train.num_tokens
    for steps, shown in ((6, ""), (1000, f"; 1000 steps read the training tokens {times:.1f} times")):
        config = dataclasses.replace(finished.config, steps=steps, batch=16, seq=16)
        assert _repetition(SimpleNamespace(config=config, corpus=finished.corpus)) == shown


def test_the_trace_opens_in_the_profile_plugin_and_holds_the_steps(directory):
    paths = [str(path) for path in directory.glob("tensorboard/plugins/profile/*/*.xplane.pb")]
    assert len(paths) == 1
    assert "trace_viewer@" in raw_to_tool_data.xspace_to_tool_names(paths)
    events = (
        event for plane in ProfileData.from_file(paths[0]).planes for line in plane.lines for event in line.events
    )
    names = collections.Counter(event.name.partition(".")[0] for event in events)
    slices, products, layers, devices, steps = 2, 4, 2, 8, 2
    assert names["all_gather"] >= slices * products * layers * devices * steps
    assert not {"$evaluate", "$saver"} & names.keys()  # writing what was saved before may go on beside the steps


def test_the_profile_s_overview_has_the_steps(directory):
    paths = [str(path) for path in directory.glob("tensorboard/plugins/profile/*/*.xplane.pb")]
    tables = json.loads(raw_to_tool_data.xspace_to_tool_data(paths, "overview_page", {})[0])
    (steps,) = [table for table in tables if any(column["id"] == "stepnum" for column in table.get("cols", ()))]
    assert [row["c"][0]["v"] for row in steps["rows"]] == ["train 3", "train 4"]


def test_the_summary_repeats_what_was_logged(finished, directory):
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["steps"] == 6 and summary["mfu"] is None and summary["sample"] is None
    assert summary["validation_loss"] == lines(directory, "eval.jsonl")[-1]["validation_loss"]
    assert summary["bits_per_byte"] is None  # synthetic tokens stand for no text
    assert 0 < unigram_nats_per_token(finished.corpus.validation) < np.log(61)
    assert summary["predicted_step_seconds"] == pytest.approx(finished.prediction.seconds)
    assert summary["step_seconds"] == pytest.approx(16 * 16 / summary["tokens_per_second"])
    assert summary["tokens_per_second"] > 0 and summary["training_seconds"] > 0


def test_the_loss_curve_is_a_picture(directory):
    picture = matplotlib.image.imread(directory / "loss.png")
    assert picture.shape[0] > 300 and picture.std() > 0.01


def test_memory_plan_and_results_were_printed(finished):
    shown = finished.console.export_text(clear=False)
    assert "validation loss" in shown and "step 6/6" in shown
    assert f"Step   predicted {finished.prediction}" in shown
    assert "(predicted " in shown and "ms a step, measured" in shown
    assert f"Memory {finished.memory}" in shown and "8 emulated CPU devices" in shown
    assert re.match(r"[\d.]+ MiB of [\d.]+ GiB per device \(state and batch [\d.]+ MiB, temp", str(finished.memory))


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4, "lo')
    drop_after(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    drop_after(tmp_path / "absent.jsonl", 2)
    assert [*tmp_path.iterdir()] == [path]
