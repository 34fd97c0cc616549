"""A checkpoint carries every number exactly from one mesh and plan to another."""

import dataclasses

import jax
import numpy as np
import pytest

from mstrain.checkpoints import buffer, manifest
from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models import parameters
from mstrain.models.config import ModelConfig
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.step import map_copies, state_shardings

MODEL = ModelConfig(layers=2, width=32, heads=4, mlp_dim=64, vocab_size=61, context=8)
OPTIMIZER = make_optimizer(OptimizerConfig(learning_rate=1e-3))
STEP = 7


def module_on(mesh: str, model: ModelConfig = MODEL, shard: str = "none", **parallel) -> Transformer:
    plan = make_plan(ParallelConfig(**parallel), model, make_mesh(parse_mesh(mesh)), 8, 8, shard=shard)
    return Transformer(model, plan, 8)


def random_state(module: Transformer, optimizer=OPTIMIZER):
    """Step, weights and moments, all different; the canonical trees and what `module` stores of them."""
    draw = np.random.default_rng(0)
    shapes = parameters.canonical_shapes(module)

    def random(x):
        return np.full(x.shape, STEP, np.int32) if x.dtype == np.int32 else draw.normal(size=x.shape).astype(x.dtype)

    abstract = {"step": np.int32(STEP), "params": shapes, "optimizer": jax.eval_shape(optimizer.init, shapes)}
    canonical = jax.tree.map(random, abstract)

    def store(state):
        return map_copies(lambda tree: parameters.from_canonical(module, tree), state, optimizer)

    return canonical, jax.jit(store, out_shardings=state_shardings(module, optimizer))(canonical)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(directory, canonical state) of a checkpoint that a 2x4 mesh wrote."""
    module, directory = module_on("2x4", slices="2"), tmp_path_factory.mktemp("checkpoints")
    canonical, state = random_state(module)
    checkpoints = Checkpoints(directory, 2)
    checkpoints.save(STEP, state, module, OPTIMIZER, {"mesh": "row2-col4"})
    checkpoints.wait()
    checkpoints.close()
    return directory, canonical


@pytest.mark.parametrize(
    "mesh, parallel",
    [
        ("2x4", {"slices": "2"}),
        ("4x2", {"dataflow": "rs"}),
        ("2x2x2", {"mlp": "fsdp"}),
        ("4x2x2", {"shard": "optimizer"}),
        ("1x1", {"algorithm": "gspmd"}),
        ("2x4", {"layers": "1:fsdp"}),
        ("stage2-context2-row1-col2", {"context": "ring"}),
        ("3x2", {"algorithm": "collective", "dataflow": "ls"}),  # padded in every dim, as 2x4 is not
    ],
)
def test_weights_moments_and_counters_arrive_bit_for_bit(mesh, parallel, saved):
    directory, canonical = saved
    module, checkpoints = module_on(mesh, **parallel), Checkpoints(directory, 2)
    assert checkpoints.latest == STEP and checkpoints.facts(STEP) == {"mesh": "row2-col4"}
    state = checkpoints.restore(STEP, module, OPTIMIZER)
    checkpoints.close()
    back = map_copies(lambda tree: parameters.to_canonical(module, tree), state, OPTIMIZER)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), canonical)


def test_every_file_of_a_saved_checkpoint_is_in_its_manifest(saved):
    folder = saved[0] / str(STEP)
    assert not manifest.problems(folder)
    assert {name.partition("/")[0] for name in manifest.read(folder)["files"]} >= {"state", "facts"}


def test_another_model_is_refused_with_what_differs(saved):
    checkpoints = Checkpoints(saved[0], 2)
    module = module_on("1x1", dataclasses.replace(MODEL, vocab_size=67))
    with pytest.raises(ValueError, match=r"embedding.table: checkpoint \(61, 32\), model \(67, 32\)"):
        checkpoints.restore(STEP, module, OPTIMIZER)
    checkpoints.close()


def test_milestones_are_kept_beside_the_newest(saved, tmp_path):
    module = module_on("2x4", slices="2")
    _, state = random_state(module)
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=3)
    for step in range(1, 9):
        checkpoints.save(step, state, module, OPTIMIZER, {})
    checkpoints.wait()
    assert checkpoints.steps == [8, 7, 6, 3]
    checkpoints.close()
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()) == [3, 6, 7, 8]


def test_only_the_run_itself_removes_what_is_half_saved(tmp_path):
    """A reader's folder is another run's, which may be saving at this moment."""
    half = tmp_path / "5.orbax-checkpoint-tmp"
    half.mkdir()
    for keep in (None, 2):
        checkpoints = Checkpoints(tmp_path, keep)
        checkpoints._manager._maybe_await_cleanup_tmp_directory()  # which runs in a thread
        checkpoints.close()
        assert half.exists() == (keep is None)


def test_a_shard_larger_than_any_buffer_is_read(saved, monkeypatch):
    """Orbax raises when a shard needs more than the buffer; a 175B model on 256 devices has shards of 0.9 GB."""
    monkeypatch.setattr(buffer, "MOST", 1)
    checkpoints, module = Checkpoints(saved[0], 2), module_on("1x1", algorithm="gspmd")
    restored = checkpoints.restore_parameters(STEP, module)
    checkpoints.close()
    back = parameters.to_canonical(module, restored)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(back), saved[1]["params"])
