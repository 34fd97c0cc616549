"""mstrain.predict: any function of JAX on a TPU slice that is not present."""

import jax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mstrain


def arrays(mesh, spec, *shapes):
    return [jax.ShapeDtypeStruct(shape, "bfloat16", sharding=NamedSharding(mesh, spec)) for shape in shapes]


def test_any_function_is_compiled_and_its_schedule_read(tpu_compiler):
    mesh = mstrain.target_mesh("v5p-8", "2x2")
    line = Mesh(mesh.devices.reshape(4), ("x",))
    alone = mstrain.predict(lambda x, w: x @ w, *arrays(line, P(), (2048, 2048), (2048, 2048)), target="v5p-8")
    assert not alone.transfers and alone.exposed == 0 and alone.hidden is None
    assert 2 * 2048**3 / 459e12 < alone.seconds < 2 * 2 * 2048**3 / 459e12
    assert alone.memory.peak >= 3 * 2048 * 2048 * 2
    gathered = mstrain.predict(
        jax.jit(lambda x, w: x @ w, out_shardings=NamedSharding(line, P())),
        *arrays(line, P("x"), (2048, 2048), (2048, 2048)), target="v5p-8",
    )  # fmt: skip
    assert gathered.transfers and gathered.bounds[0] <= gathered.seconds <= gathered.bounds[1]


def test_arguments_elsewhere_are_refused(tpu_compiler):
    with pytest.raises(ValueError, match="ShapeDtypeStruct"):
        mstrain.predict(lambda x: x, jax.numpy.ones(3), target="v5p-8")
    here = Mesh(jax.devices()[:4], ("x",))
    with pytest.raises(ValueError, match="not of v5p-8"):
        mstrain.predict(lambda x: x, *arrays(here, P(), (8, 8)), target="v5p-8")
