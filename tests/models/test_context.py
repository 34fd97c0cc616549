"""Which axes split sequences, how keys are exchanged, and what the planner makes of it."""

import pytest

from mstrain.hardware import chip_named
from mstrain.mesh import abstract_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan

SEQ = 8192


def split_of(mesh: str, sequences: int, chip=None, seq: int = SEQ, keys: int = 32, **parallel):
    model = ModelConfig(layers=1, width=4096, heads=32, num_kv_heads=keys, mlp_dim=8192, vocab_size=64, position="none")
    devices = abstract_mesh(parse_mesh(mesh))
    plan = make_plan(ParallelConfig(**parallel), model, devices, sequences, seq, chip)
    return plan.groups[0][0].split, plan


@pytest.mark.parametrize(
    "mesh, sequences, algorithm, axes",
    [
        ("4x4", 4, "meshslice", ()),
        ("4x4", 1, "meshslice", ("context", "row")),
        ("context2-row4-col4", 4, "meshslice", ("context",)),
        ("4x4", 1, "fsdp", ("context", "row", "col")),
        ("data2-context2-row1-col4", 2, "megatron", ("context",)),
    ],
)
def test_rows_split_sequences_where_there_are_too_few(mesh, sequences, algorithm, axes):
    split, plan = split_of(mesh, sequences, algorithm=algorithm)
    assert split.axes == axes and plan.padded_sequences(sequences) == sequences


def test_rows_that_may_not_split_sequences_are_refused_as_before():
    with pytest.raises(ValueError, match="would be padding"):
        split_of("4x4", 1, rows="sequences")
    with pytest.raises(ValueError, match="would be padding"):
        split_of("4x4", 1, seq=36)  # not 8 chunks


def test_few_key_heads_are_gathered_and_many_go_round_a_ring():
    chip = chip_named("v5p")
    found = {keys: split_of("context8-row1-col1", 1, chip, 131072, keys)[0].exchange for keys in (1, 32)}
    short = split_of("context8-row1-col1", 1, chip, 512, 1)[0].exchange
    assert found[32] == "ring" and short == "gather"
    assert split_of("context8-row1-col1", 1, chip, 512, 1, context="ring")[0].exchange == "ring"


def test_layers_that_need_different_orders_are_refused():
    model = ModelConfig(layers=2, width=64, heads=8, vocab_size=64)
    mixed = ParallelConfig(rows="context", layers="0:fsdp")
    with pytest.raises(ValueError, match="layers whose attention has other rows"):
        make_plan(mixed, model, abstract_mesh(parse_mesh("4x4")), 1, 64)
