"""What runs is compiled as what is measured and predicted: with the chip's options and lowering, on the same inputs."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from mstrain.commands.train import load_config
from mstrain.compiler import make_target
from mstrain.gemm import LoweringOptions
from mstrain.hardware import chip_named, compiler_options
from mstrain.mesh import AXES
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.program.memory import memory_of
from mstrain.program.parts import layer_program
from mstrain.training.prepare import prepare
from tests.training.runs import ARGUMENTS

MODEL = ModelConfig(layers=2, width=1024, heads=8, vocab_size=512)


@pytest.mark.parametrize("stats, limit", [({"bytes_limit": 5}, 5), ({"bytes_limit": 6}, 6), ({}, None), (None, None)])
def test_the_limit_of_an_accelerator_is_what_it_reports(stats, limit):
    device = SimpleNamespace(platform="gpu", process_index=0, memory_stats=lambda: stats)
    analysis = SimpleNamespace(
        argument_size_in_bytes=3, output_size_in_bytes=4, alias_size_in_bytes=2, temp_size_in_bytes=1,
        generated_code_size_in_bytes=0,
    )  # fmt: skip
    compiled = SimpleNamespace(memory_analysis=lambda: analysis)
    memory = memory_of(compiled, SimpleNamespace(devices=np.array([[device]])))
    assert (memory.limit, memory.peak, memory.fits) == (limit, 6, limit != 5)


def test_a_run_compiles_its_step_with_the_options_of_its_chip(tmp_path, monkeypatch):
    monkeypatch.setattr("mstrain.program.program.compiler_options", lambda *of: {"xla_no_such_option": True})
    monkeypatch.setattr("mstrain.mesh.fit_to_devices", lambda shape, devices: shape)
    places = [f"run_dir={tmp_path}", f"data.cache_dir={tmp_path}", "compile_cache=null", "mesh=1x1"]
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        assert prepare(load_config([*ARGUMENTS, *places])).compiled_step


@pytest.mark.parametrize("chip", ["v5p", "v6e", "tpu7x"])
def test_every_product_of_a_plan_is_lowered_as_its_chip_wants(chip):
    chip = chip_named(chip)
    plan = make_plan(ParallelConfig(), MODEL, AbstractMesh((1, 1, 2, 4), AXES), 16, 512, chip)
    wanted = LoweringOptions(**chip.lowering)
    assert wanted != LoweringOptions()
    assert all(product.lowering == wanted for block, _ in plan.groups for product in block.products)


@pytest.mark.parametrize("name", ["v5p-8", "v6e-4"])
def test_a_program_for_absent_devices_takes_the_options_of_their_chip(name, tpu_compiler):
    target = make_target(name, "2x2")
    plan = make_plan(ParallelConfig("collective"), MODEL, target.mesh, 8, 512)
    program = layer_program(MODEL, plan.groups[0][0], 8 * 512, 512, jnp.bfloat16)
    assert program.mesh == target.mesh
    assert program.compiler_options == compiler_options(target.tpu_slice.chip) != {}
