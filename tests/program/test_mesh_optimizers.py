"""Optimizers that are not elementwise, and rounding by random numbers, compute the same on every mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models import parameters
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.stages import PipelineConfig
from mstrain.models.transformer import Transformer
from mstrain.program.canonical_update import init_moments, update
from mstrain.program.muon import _orthogonal
from mstrain.program.optimizer import OptimizerConfig, make_optimizer, schedule_of
from mstrain.program.rounding import GradientSums, _rounded, round_stochastically
from tests.quick import QUICK

MODEL = ModelConfig(
    layers=3, width=32, heads=4, mlp_dim=96, vocab_size=61, norm="rmsnorm", position="rotary", bias="none"
)
PLANS = {
    "one": ("1x1", {"algorithm": "gspmd"}),
    "two groups": ("2x4", {"slices": "2", "dataflow": "os", "layers": "2:fsdp"}),
    "line": ("1x4", {"algorithm": "megatron"}),
    "stages and padding": ("stage2-row3-col2", {"algorithm": "collective", "dataflow": "ls"}),
}


@functools.cache
def module_of(name: str) -> Transformer:
    mesh, parallel = PLANS[name]
    plan = make_plan(ParallelConfig(**parallel), MODEL, make_mesh(parse_mesh(mesh)), 12, 8, pipeline=PipelineConfig())
    return Transformer(MODEL, plan, 8)


@functools.cache
def random_parameters(seed: int):
    draw = np.random.default_rng(seed)
    shapes = parameters.canonical_shapes(module_of("one"))
    return jax.tree.map(lambda x: draw.normal(size=x.shape).astype(np.float32), shapes)


@functools.cache
def updated(plan: str, optimizer: str):
    """Canonical updates of the second step."""
    module = module_of(plan)
    config = OptimizerConfig(optimizer, learning_rate=0.01, warmup=0)
    transformation, schedule = make_optimizer(config), schedule_of(config, 10)

    def run(params, *gradients):
        params = parameters.from_canonical(module, params)
        updates, moments = params, init_moments(module, transformation, params)
        for step, gradient in enumerate(gradients):
            state = {"params": params, "optimizer": moments, "step": step}
            updates, moments = update(
                module, transformation, parameters.from_canonical(module, gradient), state, schedule
            )
        return parameters.to_canonical(module, updates)

    arguments = [*map(random_parameters, range(3))]
    program = jax.jit(run, out_shardings=jax.NamedSharding(module.plan.mesh, jax.P())).lower(*arguments)
    return jax.device_get(program.compile(QUICK)(*arguments))


@pytest.mark.parametrize("plan, optimizer", [
    ("two groups", "adafactor"), ("stages and padding", "adafactor"), ("two groups", "muon"), ("line", "muon"),
    ("stages and padding", "muon"),
])  # fmt: skip
def test_updates_do_not_depend_on_the_mesh(plan, optimizer):
    found, expected = updated(plan, optimizer), updated("one", optimizer)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7), found, expected)


def test_muon_makes_singular_values_equal():
    module = module_of("one")
    kernel = random_parameters(1)[parameters.STACK]["mlp"]["down"]["kernel"]
    boxes = parameters.abstract_parameters(module)[parameters.STACK]["mlp"]["down"]["kernel"]
    found = jax.jit(lambda x: _orthogonal(x, boxes, module.plan.mesh, jnp.float32))(kernel)
    for x, y in zip(kernel, found, strict=True):
        left, values, right = np.linalg.svd(x, full_matrices=False)
        values = values / np.linalg.norm(values)
        for _ in range(5):  # the polynomial of Jordan et al.
            values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
        assert 0.6 < values.min() < values.max() < 1.3
        np.testing.assert_allclose(y, 0.2 * 96**0.5 * (left * values) @ right, atol=1e-5)


def test_stochastic_rounding_is_that_of_the_canonical_place():
    found = []
    for plan in ("one", "two groups", "stages and padding"):
        module = module_of(plan)

        def run(canonical, module=module):
            stored = parameters.from_canonical(module, canonical)
            return parameters.to_canonical(module, _rounded(stored, module, jax.random.key(3)))

        program = jax.jit(run).lower(random_parameters(0)).compile(QUICK)
        found.append(jax.device_get(program(random_parameters(0))))
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, other, found[0])
    up = jax.tree.map(lambda a, b: np.mean(a.astype(np.float32) > b), found[0], random_parameters(0))
    assert 0.45 < up["embedding"]["table"] < 0.55


def test_stochastic_rounding_keeps_the_mean_and_what_bf16_has():
    x = jnp.full(4096, 1 + 2**-10, jnp.float32)  # a quarter of the way to the next number
    rounded = round_stochastically(x, jax.random.bits(jax.random.key(0), x.shape)).astype(jnp.float32)
    assert set(np.unique(rounded)) == {1, 1 + 2**-7}
    assert float(rounded.mean()) == pytest.approx(1 + 2**-10, abs=3 * 2**-7 * (0.109 / 4096) ** 0.5)
    exact = jnp.array([0, -2.5, jnp.inf, 1.5], jnp.float32)
    np.testing.assert_array_equal(round_stochastically(exact, jnp.full(4, 2**32 - 1, jnp.uint32)), exact)


def test_stochastic_sums_of_gradients_keep_what_nearest_loses():
    module = module_of("one")
    like = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), parameters.parameter_shapes(module))

    @jax.jit
    def run():
        found = []
        for rounding in ("nearest", "stochastic"):
            sums = GradientSums(rounding)
            first, half = (jax.tree.map(lambda x, value=value: x + value, like) for value in (256, 0.5))
            begin = sums.add(module, sums.zeros(like), first, 3, 0)
            found.append(jax.lax.fori_loop(1, 17, lambda i, x, s=sums, h=half: s.add(module, x, h, 3, i), begin))
        return found

    nearest, stochastic = run()
    for tree in (nearest, stochastic):
        assert tree["embedding"]["table"].dtype == jnp.bfloat16  # of which 256 and 258 are neighbors
        assert set(np.unique(tree["final_norm"]["scale"])) == {264} and tree["final_norm"]["scale"].dtype == jnp.float32
    assert set(np.unique(nearest["embedding"]["table"].astype(np.float32))) == {256}
    assert float(jnp.mean(stochastic["embedding"]["table"].astype(jnp.float32))) == pytest.approx(264, abs=0.5)
