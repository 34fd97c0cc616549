"""mstrain as a library: products and layers of ordinary arrays on a mesh, a training loop of one's own."""

import contextlib
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mstrain
from mstrain.compiler import missing_compiler
from mstrain.gemm import ALGORITHMS
from tests.models import hub_models

ROOT = Path(__file__).parent.parent
CASES = [
    ("meshslice", "os", "2x4", 2), ("meshslice", "ls", "4x2", 3), ("meshslice", "ls", "2x2x2", None),
    ("collective", "ls", "2x4", None), ("wang", "os", "4x2", None), ("cannon", "os", "2x2", None),
    ("summa", "os", "2x4", None), ("megatron", "ls", "1x8", None), ("fsdp", "os", "8x1", None),
    ("gspmd", "os", "2x4", None),
]  # fmt: skip


@pytest.mark.parametrize("algorithm, dataflow, mesh, slices", CASES)
def test_linear_is_the_product_of_ordinary_arrays_with_its_gradients(algorithm, dataflow, mesh, slices):
    x, w, dy = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(3, 5, 23), (23, 45), (3, 5, 45)]))
    y, pull = jax.vjp(lambda x, w: mstrain.linear(x, w, mesh, algorithm, dataflow=dataflow, slices=slices), x, w)
    dx, dw = pull(dy)
    np.testing.assert_allclose(y, x @ w, atol=2e-5)
    np.testing.assert_allclose(dx, dy @ w.T, atol=2e-5)
    np.testing.assert_allclose(dw, jnp.einsum("bti,bto->io", x, dy), atol=2e-5)
    assert {case[0] for case in CASES} == set(ALGORITHMS)


def test_linear_takes_a_mesh_of_the_caller_within_jit():
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("row", "col"))
    x, w = jnp.ones((4, 6), jnp.bfloat16), jnp.ones((6, 8))
    y = jax.jit(lambda x, w: mstrain.linear(x, w, mesh))(x, w)
    assert y.dtype == jnp.bfloat16 and (y == 6).all() and y.sharding.num_devices == 8


def test_a_cpu_is_split_before_the_first_use_of_jax():
    """As README.md says, and with only `import mstrain`; a call that comes too late is an error."""
    lines = [
        "import jax, mstrain",
        "mstrain.emulate_devices(4)",
        "print(mstrain.linear(jax.numpy.ones((2, 4)), jax.numpy.ones((4, 2)), mesh='2x2').sharding.num_devices)",
        "mstrain.emulate_devices(8)",
    ]
    clean = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES")}
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, cwd=ROOT, env=clean)
    assert ran.stdout.split() == ["4"] and "Call emulate_devices(8) before the first use of JAX" in ran.stderr


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"w": jnp.ones((5, 8))}, r"x \(4, 6\) times w \(5, 8\)"),
        ({"algorithm": "megatro"}, "megatron"),
        ({"x": jnp.ones((4, 6), jnp.int32)}, r"x is int32 .* Type x.astype\('float32'\)"),
        ({"dataflow": "rs"}, "os or ls"),
        ({"algorithm": "gspmd", "dataflow": "ls"}, "gspmd leaves it to the compiler"),
        ({"slices": 5}, r"slice count 5 is illegal .* Type slices=1\b"),
        ({"algorithm": "collective", "slices": 2}, "does not slice"),
        ({"algorithm": "cannon"}, "square mesh .* or algorithm=collective"),
        ({"mesh": "8x4"}, r"needs 32 devices, .* Call mstrain.emulate_devices\(32\)"),
        ({"mesh": (2, 4)}, r"mesh=\(2, 4\) is neither a jax.sharding.Mesh nor text"),
        ({"mesh": Mesh(np.array(jax.devices()[:2]).reshape(1, 2), ("x", "y"))}, "axes"),
    ],
)
def test_linear_says_what_is_not_legal(changes, message):
    arguments = {"x": jnp.ones((4, 6)), "w": jnp.ones((6, 8)), "mesh": "2x4", **changes}
    with pytest.raises(ValueError, match=message):
        mstrain.linear(**arguments)


@pytest.mark.parametrize("kind, inside", [(AxisType.Auto, True), (AxisType.Explicit, True), (AxisType.Explicit, False)])
def test_linear_takes_arrays_of_a_mesh_of_jax(kind, inside):
    """With automatic or explicit axes, as `jax.make_mesh` makes them, in `jax.set_mesh` or not."""
    mesh = jax.make_mesh((2, 4), ("row", "col"), axis_types=(kind,) * 2, devices=jax.devices()[:8])
    x, w = (jax.random.normal(jax.random.key(i), s) for i, s in enumerate([(2, 4, 8), (8, 12)]))
    x_placed, w_placed = (jax.device_put(a, NamedSharding(mesh, P("row"))) for a in (x, w))
    with jax.set_mesh(mesh) if inside else contextlib.nullcontext():
        y, pull = jax.vjp(lambda x, w: mstrain.linear(x, w, mesh, slices=2), x_placed, w_placed)
        dx, dw = pull(y)
    np.testing.assert_allclose(y, x @ w, atol=1e-5)
    np.testing.assert_allclose(dx, (x @ w) @ w.T, atol=1e-4)
    np.testing.assert_allclose(dw, jnp.einsum("bti,bto->io", x, x @ w), atol=1e-4)


def losses(dense, x):
    """A function of parameters: a loss of two layers of `dense(features)`."""
    model = nn.Sequential([dense(24), nn.gelu, dense(10)])
    return model, lambda params: jnp.sum(jnp.sin(model.apply(params, x)))


@pytest.mark.parametrize(
    "shape, options",
    [
        ((3, 5, 16), {"slices": 2}),  # the order in which a weight is stored differs from the canonical one
        ((2, 3, 5, 7), {"dataflow": "ls"}),
        ((16,), {"algorithm": "megatron", "use_bias": False}),
    ],
)
def test_mesh_dense_takes_the_weights_of_dense(shape, options):
    """Same initial weights, same loss and gradients as `flax.linen.Dense`, whatever the leading dims."""
    x = jax.random.normal(jax.random.key(1), shape)
    plain, reference = losses(lambda n: nn.Dense(n, use_bias=options.get("use_bias", True)), x)
    model, loss = losses(lambda n: mstrain.MeshDense(n, "2x4", **options), x)
    params = plain.init(jax.random.key(0), x)
    jax.tree.map(np.testing.assert_array_equal, nn.unbox(model.init(jax.random.key(0), x)), params)
    (value, gradients), (wanted, true) = (jax.jit(jax.value_and_grad(f))(params) for f in (loss, reference))
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), gradients, true)


def test_mesh_dense_states_how_its_parameters_are_sharded():
    def specs(features, **options):
        layer = mstrain.MeshDense(features, "2x4", **options)
        return nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), jnp.ones((3, 16))))["params"]

    assert specs(24) == {"kernel": P("row", "col"), "bias": P("col")}
    assert specs(24, dataflow="ls") == {"kernel": P("col", "row"), "bias": P("col")}
    assert specs(24, algorithm="fsdp") == {"kernel": P(("row", "col"), None), "bias": P(None)}
    assert specs(10, use_bias=False) == {"kernel": P("row", None)}  # ten do not divide over four


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_parameters_are_made_on_the_mesh_of_the_context(kind):
    mesh = jax.make_mesh((2, 4), ("row", "col"), axis_types=(kind,) * 2, devices=jax.devices()[:8])
    layer, x = mstrain.MeshDense(24, mesh, slices=2), jax.random.normal(jax.random.key(1), (3, 16))
    with jax.set_mesh(mesh):
        specs = nn.get_partition_spec(jax.eval_shape(layer.init, jax.random.key(0), x))
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        params = jax.jit(lambda key: nn.unbox(layer.init(key, x)), out_shardings=shardings)(jax.random.key(0))
        assert params["params"]["kernel"].sharding.spec == P("row", "col")
        np.testing.assert_allclose(layer.apply(params, x), x @ params["params"]["kernel"], atol=1e-5)


def test_mesh_dense_in_nnx():
    x = jax.random.normal(jax.random.key(1), (2, 3, 16))
    layer = nnx.bridge.ToNNX(mstrain.MeshDense(24, "2x4", slices=2), rngs=nnx.Rngs(0))
    layer = nnx.bridge.lazy_init(layer, x)
    value, gradient = nnx.value_and_grad(lambda layer: jnp.sum(layer(x) ** 2))(layer)
    kernel = layer.kernel[...]
    assert kernel.sharding.spec == P("row", "col")
    np.testing.assert_allclose(value, np.sum((x @ kernel) ** 2), rtol=1e-5)
    true = 2 * jnp.einsum("bti,bto->io", x, np.asarray(x @ kernel))
    np.testing.assert_allclose(gradient.kernel[...], true, atol=1e-4)


@pytest.mark.parametrize("key", ["target=v5p-64", "wandb=project", "coordinator=localhost:1234"])
def test_the_trainer_refuses_keys_of_the_command_only(key):
    with pytest.raises(ValueError, match=f"{key} has no effect on mstrain.trainer"):
        mstrain.trainer("model=tiny", "data=synthetic", key, "check=false")


SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "howto" / "library.md").read_text(), re.DOTALL)


def test_the_lines_of_the_readme_are_those_of_the_page():
    section = (ROOT / "README.md").read_text().split("## In your own code\n")[1]
    typed = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1].splitlines()
    page = {line for snippet in SNIPPETS for line in bare(snippet.splitlines())}
    assert len(typed) > 10 and set(bare(typed)) <= page


def bare(lines):
    """Lines without comments and the empty ones."""
    return [code for line in lines if (code := line.split("  #")[0].rstrip())]


def test_every_example_of_the_page_runs(tmp_path, monkeypatch):
    """In five lines each, one after the other; a folder of transformers' is the run, and the loop makes three steps."""
    product, linen, in_nnx, model, loop, prediction = SNIPPETS
    for snippet in SNIPPETS:
        assert len([line for line in snippet.splitlines() if line.strip()]) <= 5, snippet
    monkeypatch.chdir(tmp_path)
    hub_models.save("llama2", tmp_path / "runs" / "default")
    names = {}
    exec(product, names)
    assert names["y"].shape == (4, 128, 384) and (names["y"] == 96).all()
    exec(linen, names)
    assert names["axes"]["params"]["layers_0"]["kernel"] == P("row", "col")
    assert names["model"].apply(names["params"], names["x"]).shape == (4, 128, 96)
    exec(in_nnx, names)
    kernel = nnx.state(names["layer"], nnx.Param)["kernel"][...]
    np.testing.assert_allclose(names["y"], names["x"] @ kernel, atol=1e-4)
    exec(model, names)
    logits = names["model"].apply({"params": names["params"]}, jnp.zeros(names["model"].seq, jnp.int32))
    assert logits.shape == (names["model"].seq, 61)
    for shape in ((3, names["model"].seq), (names["model"].seq + 1,), (0,)):
        with pytest.raises(ValueError, match=r"one after the other.* Type tokens.reshape\(-1\)"):
            names["model"].apply({"params": names["params"]}, jnp.zeros(shape, jnp.int32))
    short = f'"data.cache_dir={tmp_path}", "data.num_tokens=4096", "seq=8", "batch=16", "model.layers=1", "steps=20"'
    exec(loop.replace('"steps=20"', short).replace("range(20)", "range(3)"), names)
    assert int(names["state"]["step"]) == 3 and 5 < float(names["metrics"]["loss"]) < 6
    if missing_compiler():
        return
    for large, small in (("v5p-64", "v5p-8"), ("4x8", "2x2"), ("32768", "512"), ("12288", "256"), ("49152", "256")):
        prediction = prediction.replace(large, small)
    exec(prediction, names)
    assert 0 < names["schedule"].exposed < names["schedule"].seconds < 1e-3
