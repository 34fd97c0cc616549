"""The peers of bench=peers train the model that they are compared on."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest

from mstrain.benchmarks.config import load
from mstrain.benchmarks.peers import compare, flax_model, own, task
from mstrain.benchmarks.presets import PEER_MODELS
from mstrain.models.config import ModelConfig
from mstrain.models.size import count_parameters

GPT = ModelConfig(layers=2, width=32, heads=4, vocab_size=64, context=16)
LLAMA = ModelConfig(
    layers=2, width=32, heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=64, context=16, norm="rmsnorm",
    norm_bias=False, position="rotary", activation="silu", gated=True, bias="none", tied=False,
)  # fmt: skip


@pytest.mark.parametrize("model", [GPT, LLAMA], ids=["gpt", "llama"])
def test_peers_have_as_many_parameters_and_predict_nothing_at_first(model):
    torch = pytest.importorskip("torch")
    from mstrain.benchmarks.peers.torch_model import Model

    own = count_parameters(model)
    shapes = jax.eval_shape(
        flax_model.Model(model, jnp.dtype("float32"), "xla").init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32)
    )
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == own
    peer = Model(model, 16)
    assert sum(parameter.numel() for parameter in peer.parameters()) == own
    ids = torch.arange(17)[None]
    assert abs(peer(ids[:, :-1], ids[:, 1:]).item() - math.log(64)) < 0.2


@pytest.mark.parametrize("peer", ["mstrain", "flax"])
def test_our_step_and_flax_learn_the_batch(peer):
    asked = task.Task(peer, dataclasses.replace(GPT, layers=1), 2, 8, warmup=0, repeats=4)
    outcome = task.run({"mstrain": own, "flax": flax_model}[peer].make(asked), asked)
    assert len(outcome.seconds) == 4 and outcome.losses[-1] < outcome.losses[0] < 1.5 * math.log(64)


def test_other_architectures_are_refused():
    with pytest.raises(ValueError, match="neither a GPT nor a Llama"):
        flax_model.check(dataclasses.replace(GPT, position="alibi"))


def test_a_task_and_its_outcome_survive_json():
    asked = task.Task("flax", LLAMA, 2, 8)
    assert task.Task.from_json(asked.to_json()) == asked
    peer = task.Peer("cpu", "by hand", lambda: 1.5, lambda loss: None, lambda: None)
    outcome = task.run(peer, dataclasses.replace(asked, warmup=1, repeats=3))
    assert (len(outcome.seconds), len(outcome.losses)) == (3, 5)
    assert task.Outcome.from_json(outcome.to_json()) == outcome


def test_a_peer_that_ends_without_a_result_says_why():
    with pytest.raises(RuntimeError, match="flax: ValueError: .*neither a GPT"):
        compare.measure(task.Task("flax", dataclasses.replace(GPT, qk_norm=True), 2, 8))


def test_what_the_time_of_the_command_does_not_reach_is_named(monkeypatch):
    monkeypatch.setattr(compare, "BUDGET", 0)
    monkeypatch.setattr(compare, "device", lambda: ("cpu", "cpu"))
    comparison = compare.compare_peers(load(["bench=peers", "models=tiny gpt2", "peers=mstrain torch"]))
    rows = [row for _, row in comparison.rows()]
    assert [(row.algorithm, row.model) for row in rows] == [
        ("mstrain", "tiny"), ("mstrain", "gpt2"), ("torch", "tiny"), ("torch", "gpt2"),
    ]  # fmt: skip
    assert all("not started" in row.problem and "Type peers=" in row.problem for row in rows)


def test_shapes_and_steps_are_those_that_others_timed():
    config = load(["bench=peers"])
    assert (config.models.split(), config.repeats) == (PEER_MODELS.split(), 20)
    sizes = [(m.name, compare.TOKENS // m.context, m.context) for m in config.model_configs]
    assert sizes == [("gpt3_1_3b", 16, 2048), ("gpt2", 32, 1024), ("llama_1_1b", 16, 2048)]
    with pytest.raises(ValueError, match="Did you mean peers=torch"):
        load(["bench=peers", "peers=torhc"])
