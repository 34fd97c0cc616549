"""Lists need no escaping; a mistake is one message with its fix."""

import pytest

from mstrain.benchmarks.config import load
from mstrain.cli.compose import config_dir
from mstrain.gemm import ALGORITHMS
from mstrain.mesh import MeshShape

MISTAKES = {
    "unknown key": (["benhc=step"], "Did you mean bench"),
    "bench": (["bench=gem"], "Did you mean bench=gemm"),
    "algorithm": (["algorithms=meshslice wagn"], "Did you mean wang"),
    "model": (["models=tinny"], "tiny"),
    "mesh": (["meshes=2x4 4by2"], "4by2"),
    "no such slice": (["target=v5p-63"], "nearest is v5p-64"),
    "no such generation": (["target=v9-8"], "v5p"),
    "slice counts": (["slices=8 8"], "nor 4 (of attention in"),
    "dump of nothing": (["dump=x"], "target="),
    "emulated target": (["target=v5p-64", "emulate=16x16"], "emulate= has no effect"),
    "timed prediction": (["target=v5p-64", "repeats=9"], "repeats= has no effect"),
    "remat of nothing": (["remat=mlp-on"], "Did you mean remat=mlp-in"),
    "remat by search": (["remat=auto"], "train.py"),
    "remat of a product": (["bench=gemm", "remat=full"], "no effect with bench=gemm"),
    "model of a link": (["bench=collectives", "models=gpt2"], "no effect with bench=collectives"),
    "slices without meshslice": (["algorithms=wang fsdp", "slices=4"], "parallel=meshslice"),
    "dataflow without choice": (["algorithms=fsdp", "dataflow=ls"], "no effect on fsdp"),
    "all meshes of nothing": (["meshes=all"], "target="),
    "preset": (["preset=v4"], "preset=v2 or preset=v3"),
    "constants": (["constants=x"], "bench=tune"),
    "twice under two names": (["mesh=2x4", "meshes=4x2"], "given twice"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_says_what_to_type(mistake):
    arguments, words = MISTAKES[mistake]
    with pytest.raises(ValueError) as error:
        config = load(arguments)
        config.model_configs
    assert words in str(error.value)


@pytest.mark.parametrize("text", ["meshes=2x4 2x2x2", "meshes=[2x4,2x2x2]", "mesh=2x4 2x2x2"])
def test_meshes_as_words_or_as_a_list(text):
    assert load([text]).mesh_shapes == [MeshShape(1, 2, 4), MeshShape(2, 2, 2)]


def test_algorithms_as_words_and_all_by_default():
    assert load(["algorithms=meshslice wang"]).algorithm_names == ["meshslice", "wang"]
    assert load([]).algorithm_names == list(ALGORITHMS)


def test_slice_counts_per_product():
    assert load(["slices=8 4 2 1"]).slice_counts == (8, 4, 2, 1)
    assert load(["slices=4"]).slice_counts == (4, 4, 4, 4)
    assert load([]).slice_counts is None


def test_a_preset_is_a_default_that_the_command_line_beats():
    config = load(["preset=v2", "meshes=4x1x8"])
    assert (config.models, config.target, config.meshes) == ("seed_2_8b", "v2-32", "4x1x8")
    assert load(["preset=v3"]).target == "v3-32"


def test_models_of_ones_own_come_from_config_dir(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\nlayers: 7\n")
    with config_dir(tmp_path):
        mine, tiny = load(["models=mine tiny"]).model_configs
    assert (mine.layers, tiny.name) == (7, "tiny")
