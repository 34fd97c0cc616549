"""train.py check=true: what a step costs by layer kind, which change is the smallest that fits, exit codes.

Cheap ones first; the last need the TPU compiler and are skipped where it is missing.
"""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from mstrain.benchmarks import check as room
from mstrain.benchmarks.layer_kinds import kind_of, seconds_by_kind
from mstrain.commands.train import load_config, main
from mstrain.compiler import DoesNotFit
from mstrain.timeline import Lane, Timeline, exposed_communication

ARGUMENTS = [
    "model=tiny", "model.position=alibi", "mesh=2x2", "target=v5p:2x2x1", "check=true", "batch=16", "seq=16",
]  # fmt: skip

SCOPE = "jit(step)/transpose(jvp(Transformer.loss))/Transformer/"
OP_NAMES = {
    f"{SCOPE}while/body/closed_call/blocks_0/blocks_0._half/attention/qkv/dot_general": "attention",
    f"{SCOPE}while/body/closed_call/blocks_0/blocks_0._half/attention_norm/div": "attention",
    f"{SCOPE}while/body/closed_call/blocks_1/blocks_1._half/mlp/up/shard_map/dot_general": "mlp",
    f"{SCOPE}while/body/closed_call/blocks_0/add": "rest of the blocks",
    f"{SCOPE}embedding/shard_map/embedding._lookup/select_n": "embedding",
    "jit(step)/jvp(Transformer.loss)/shard_map/pmax": "head and loss",
    f"{SCOPE}final_norm/div": "head and loss",
    "jit(step)/add": "optimizer",
    "": "unnamed (copies, loops)",
}


@pytest.mark.parametrize("op_name", OP_NAMES)
def test_operations_belong_to_kinds_of_layers(op_name):
    assert kind_of(op_name) == OP_NAMES[op_name]


def schedule(events):
    """(name, lane, begin, duration) as a schedule, lane 0 the TensorCore."""
    names = tuple(dict.fromkeys(event[0] for event in events))
    lanes = np.array([event[1] for event in events])
    timeline = Timeline(
        lanes=(Lane(0, "device", "TensorCore"), Lane(0, "device", "row"), Lane(0, "device", "col")),
        names=names,
        lane=lanes,
        name=np.array([names.index(event[0]) for event in events]),
        start=np.array([event[2] for event in events], float),
        duration=np.array([event[3] for event in events], float),
        communication=lanes > 0,
    )
    text = "HloModule m, is_scheduled=true\n\nENTRY %main (p: f32[]) -> f32[] {\n"
    for name in names:
        scope = {"a": "blocks_0/attention/", "m": "blocks_0/mlp/"}.get(name[0], "")
        text += f'  %{name} = f32[] add(%p, %p), metadata={{op_name="jit(step)/Transformer/{scope}add"}}\n'
    return SimpleNamespace(text=text + "}\n"), SimpleNamespace(timeline=timeline, seconds=timeline.seconds)


def test_a_pause_is_charged_to_the_transfers_that_end_in_it():
    # Core: attention until 2, waits until 5, mlp until 6. Links: one half hidden, 1 s of mlp, 1 s of loss.
    events = [("a1", 0, 0, 2), ("a2", 1, 1, 2), ("m2", 2, 3, 1), ("head", 1, 4, 1), ("m1", 0, 5, 1)]
    program, plan = schedule(events)
    kinds = seconds_by_kind(program, plan)
    assert kinds["attention"] == (2, 1)
    assert kinds["mlp"] == (1, 1)
    assert kinds["head and loss"] == (0, 1)
    assert sum(exposed for _, exposed in kinds.values()) == exposed_communication(plan.timeline)[0]
    assert sum(map(sum, kinds.values())) == plan.seconds
    assert list(kinds) == ["attention", "mlp", "head and loss"]  # not what the model lacks


def test_transfers_at_either_end_are_exposed():
    program, plan = schedule([("a1", 1, 0, 1), ("a2", 0, 1, 1), ("m1", 1, 1, 3)])
    kinds = seconds_by_kind(program, plan)
    assert kinds["attention"] == (1, 1) and kinds["mlp"] == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check=true"], "Type target=v5p-64 check=true"),
        (["target=v5p-64"], "no effect by itself"),
        (["check=true", "target=v5p-63"], "nearest is v5p-64"),
    ],
)
def test_target_and_check_belong_together(arguments, words):
    with pytest.raises(ValueError, match=words):
        load_config(arguments)


def test_an_unread_tokenizer_leaves_the_vocabulary_open():
    config = load_config(["model=tiny", "tokenizer=bpe", "target=v5p-8", "check=true"])
    with pytest.raises(ValueError, match="Type model.vocab_size="):
        room.plan_step(config)


@pytest.mark.usefixtures("no_compiler")
def test_without_the_compiler_it_says_how_to_get_it():
    with pytest.raises(ValueError, match="pip install"):
        main(ARGUMENTS)


@pytest.mark.usefixtures("tpu_compiler")
def test_a_step_that_fits_is_described_and_exits_0(capsys):
    assert main(ARGUMENTS) == 0
    out = " ".join(capsys.readouterr().out.split())
    wanted = ("Fits", "optimizer moments", "not measured", "MFU", "exposed communication", "attention", "mlp")
    assert all(words in out for words in wanted), out


@pytest.mark.usefixtures("tpu_compiler")
def test_a_step_that_does_not_fit_names_the_change_and_exits_1(monkeypatch, capsys):
    compile = room.Step.compile

    def little_memory(step):
        if step.config.remat == "none":
            raise DoesNotFit("too large for this test", 200 * 2**30)
        return compile(step)

    monkeypatch.setattr(room.Step, "compile", little_memory)
    assert main(ARGUMENTS) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "It fits with: remat=dots (predicted" in out and "remat=dots: fits" in out


@pytest.mark.usefixtures("tpu_compiler")
def test_state_alone_can_be_too_large():
    config = load_config(["model=gpt3_175b", "mesh=2x2", "target=v6e:2x2", "check=true"])
    step = room.plan_step(dataclasses.replace(config, batch=16, seq=128))
    assert sum(step.state_bytes.values()) == pytest.approx(12 * 175e9 / 4, rel=0.02)
    with pytest.raises(DoesNotFit, match="weights and moments alone"):
        step.compile()
