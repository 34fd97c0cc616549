"""AdamW against a plain NumPy one; what decays, what clips, and the schedule's corners."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mstrain.program.optimizer import OptimizerConfig, decay_mask, make_optimizer, rate_of, schedule_of
from mstrain.program.step import map_copies
from tests.training.cases import REFERENCE
from tests.training.parity import initial, module_of

CONFIG = OptimizerConfig(learning_rate=0.01, warmup=4, final_fraction=0.2, weight_decay=0.3, clip=0.5)


def learning_rate(config, steps):
    return functools.partial(rate_of, config.schedule, schedule_of(config, steps))


def test_the_schedule_at_its_corners():
    rate = learning_rate(CONFIG, 20)
    assert float(rate(0)) == pytest.approx(0.002)  # the first update changes something
    assert float(rate(2)) == pytest.approx(0.006)
    assert float(rate(4)) == pytest.approx(0.01)
    assert float(rate(12)) == pytest.approx((0.01 + 0.002) / 2)  # half-way down the cosine
    assert float(rate(20)) == pytest.approx(0.002)


AFTER = {
    "cosine": optax.cosine_decay_schedule(0.01, 16, 0.2),
    "linear": optax.linear_schedule(0.01, 0.002, 16),
    "constant": optax.constant_schedule(0.01),
    "inverse_sqrt": lambda step: 0.01 * (4 / (4 + max(step, 0))) ** 0.5,
    "wsd": optax.linear_schedule(0.01, 0.002, 4, transition_begin=12),
}


@pytest.mark.parametrize("kind", AFTER)
def test_schedules_are_those_of_optax_after_the_same_warmup(kind):
    expected = optax.join_schedules([optax.linear_schedule(0.002, 0.01, 4), AFTER[kind]], [4])
    unread = {"final_fraction": 0.1} if kind in ("constant", "inverse_sqrt") else {}
    config = dataclasses.replace(CONFIG, schedule=kind, **({"decay_share": 0.2} if kind == "wsd" else unread))
    np.testing.assert_allclose(learning_rate(config, 20)(np.arange(25)), [expected(i) for i in range(25)], rtol=1e-6)
    program = jax.jit(functools.partial(rate_of, kind))
    rates = {steps: float(program(schedule_of(config, steps), jnp.int32(18))) for steps in (20, 40)}
    assert rates[20] == pytest.approx(float(expected(18)))
    assert (rates[40] > rates[20] or kind in ("constant", "inverse_sqrt")) and program._cache_size() == 1


@pytest.mark.parametrize("name", ["adamw", "lion"])
def test_moments_in_bf16_change_an_update_by_their_rounding_only(name):
    params = {"kernel": jnp.ones((4, 4))}
    gradient = {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)), jnp.float32)}
    updates = []
    for moments in ("f32", "bf16"):
        optimizer = make_optimizer(dataclasses.replace(CONFIG, name=name, moments=moments))
        state = optimizer.init(params)
        wanted = {"f32": jnp.float32, "bf16": jnp.bfloat16}[moments]
        assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype(wanted)}
        updates.append(optimizer.update(gradient, state, params, schedule=schedule_of(CONFIG, 20))[0]["kernel"])
    np.testing.assert_allclose(*updates, rtol=2**-7)


def test_schedules_of_short_runs_and_without_warmup():
    assert float(learning_rate(dataclasses.replace(CONFIG, warmup=0), 10)(0)) == pytest.approx(0.01)
    for steps in (1, 2, 3):
        rate = learning_rate(dataclasses.replace(CONFIG, warmup=50), steps)
        assert all(np.isfinite(float(rate(step))) for step in range(steps + 1))


def test_the_rate_follows_the_width_unless_it_is_given():
    assert OptimizerConfig().for_width(460).learning_rate == pytest.approx(1e-3)
    assert CONFIG.for_width(460) == CONFIG


def test_kernels_and_tables_decay_norms_and_biases_do_not():
    mask = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(decay_mask(initial()))
    }
    assert len(mask) == 16 and sum(mask.values()) == 6
    for path, decays in mask.items():
        assert decays == path.endswith(("['kernel']", "['table']")), path


def adamw(params, gradients, config, steps):
    """Loshchilov and Hutter, Decoupled Weight Decay Regularization (2019), algorithm 2, after clipping."""
    first = {name: np.zeros_like(value) for name, value in params.items()}
    second = {name: np.zeros_like(value) for name, value in params.items()}
    for t, gradient in enumerate(gradients, 1):
        norm = np.sqrt(sum(np.sum(g**2) for g in gradient.values()))
        rate = float(learning_rate(config, steps)(t - 1))
        for name, g in gradient.items():
            g = g * min(1, config.clip / norm)
            first[name] = config.b1 * first[name] + (1 - config.b1) * g
            second[name] = config.b2 * second[name] + (1 - config.b2) * g**2
            update = first[name] / (1 - config.b1**t) / (np.sqrt(second[name] / (1 - config.b2**t)) + config.epsilon)
            decay = config.weight_decay * params[name] if name in ("kernel", "table") else 0
            params = params | {name: params[name] - rate * (update + decay)}
    return params


@pytest.mark.parametrize("size", [1e-2, 10.0], ids=["not clipped", "clipped"])
def test_updates_are_those_of_adamw(size):
    draw = np.random.default_rng(1)
    params = {name: draw.normal(size=(3, 4)) for name in ("kernel", "table", "bias", "scale")}
    gradients = [{name: size * draw.normal(size=(3, 4)) for name in params} for _ in range(6)]
    optimizer = make_optimizer(CONFIG)
    found = jax.tree.map(jnp.float32, params)
    state = optimizer.init(found)
    for gradient in gradients:
        gradient = jax.tree.map(jnp.float32, gradient)
        updates, state = optimizer.update(gradient, state, found, schedule=schedule_of(CONFIG, 20))
        found = optax.apply_updates(found, updates)
    for name, expected in adamw(params, gradients, CONFIG, 20).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-6)


def test_both_moments_are_found_as_parameter_trees_and_counters_are_not():
    shapes = jax.tree.map(jnp.zeros_like, initial())
    optimizer, found = make_optimizer(CONFIG), []
    state = {"params": shapes, "optimizer": optimizer.init(shapes)}
    map_copies(lambda tree: found.append(tree), state, optimizer, lambda leaf: found.append(leaf.shape))
    assert [x for x in found if isinstance(x, tuple)] == [(), ()]
    assert [jax.tree.structure(x) == jax.tree.structure(shapes) for x in found if isinstance(x, dict)] == [True] * 3
    assert module_of(REFERENCE).model.layers == 2


@pytest.mark.parametrize(
    "values, words",
    [
        ({"learning_rate": 0}, "optimizer.learning_rate=0 must be above 0"),
        ({"warmup": -1}, "Type 0 for none"),
        ({"schedule": "cosin"}, "Did you mean optimizer.schedule=cosine"),
        ({"b2": 1.5}, "optimizer.b2=1.5 must lie between 0 and 1"),
        ({"name": "adafactor", "moments": "bf16"}, "type optimizer.name=adamw"),
        ({"name": "adafactor", "b1": 0.99}, "optimizer.b1=0.99 has no effect with optimizer.name=adafactor"),
        ({"name": "lion", "epsilon": 1e-6}, "optimizer.epsilon=1e-06 has no effect with optimizer.name=lion"),
        ({"decay_share": 0.5}, "optimizer.decay_share=0.5 has no effect with optimizer.schedule=cosine"),
        (
            {"schedule": "constant", "final_fraction": 0.5},
            "has no effect with optimizer.schedule=constant. Remove it, or type another optimizer.schedule=",
        ),
        (
            {"rounding": "stochastic"},
            "with optimizer.moments=f32 and optimizer.gradients=f32. Remove it, or type optimizer.moments=bf16",
        ),
    ],
)
def test_impossible_values_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**values)
