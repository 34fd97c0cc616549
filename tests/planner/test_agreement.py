"""One planner: mesh=auto, plan.py, benchmark.py meshes=auto and tune= name the same mesh for the same request."""

import dataclasses
import io
import math

import jax.numpy as jnp
import pytest
from rich.console import Console

from mstrain.benchmarks.check import best_mesh as check_mesh
from mstrain.benchmarks.config import load as load_benchmark
from mstrain.benchmarks.predicted import choose_meshes
from mstrain.benchmarks.refined import make_task
from mstrain.benchmarks.tuned import tune_model
from mstrain.commands.plans.modes import load as load_plan
from mstrain.commands.train import load_config
from mstrain.hardware import parse_target
from mstrain.hardware.clusters import find_pod
from mstrain.mesh import parse_mesh
from mstrain.planner.search import search_pod
from mstrain.planner.trainer import train_keys
from mstrain.training.tuned import best_mesh, with_plan
from mstrain.tuning.compiled import meshes_to_try

# (model, target, batch, accumulate, remat, shard), sequences of 2048 tokens
CASES = [
    ("gpt3_13b", "v5p-64", 64, 1, "none", "none"),
    ("gpt3_175b", "v5p-512", 256, 1, "none", "none"),
    ("megatron_nlg_530b", "v5p-1024", 512, 2, "full", "none"),
    ("llama3_8b", "v6e-256", 256, 1, "none", "none"),
    ("llama2_70b", "v6e-256", 256, 1, "full", "none"),
    ("gpt3_1_3b", "v4-64", 256, 4, "none", "none"),
    ("llama3_405b", "tpu7x-256", 128, 1, "full", "none"),
    ("gpt3_13b", "v5p-64", 32, 1, "none", "parameters"),
]


@pytest.mark.parametrize(("model", "target", "batch", "accumulate", "remat", "shard"), CASES)
def test_every_entry_point_names_the_same_mesh(model, target, batch, accumulate, remat, shard):
    shared = [f"batch={batch}", "seq=2048", f"accumulate={accumulate}", f"remat={remat}", f"shard={shard}"]
    train = load_config([f"model={model}", f"target={target}", "check=true", "mesh=auto", *shared])
    tpu_slice = parse_target(target)
    wanted = check_mesh(train, train.model, tpu_slice)
    assert wanted.devices == tpu_slice.devices

    _, plan = load_plan([f"model={model}", f"cluster={target}", "schedule=1f1b", "algorithm=meshslice", *shared])
    request = plan.request(find_pod(target))
    best = search_pod(request).trainable[0]
    assert best.shape == wanted and best.fits

    keys = [f"models={model}", f"target={target}", *shared]
    benchmark = load_benchmark(["algorithms=meshslice collective wang", *keys])
    assert choose_meshes(benchmark, tpu_slice) == [wanted]
    tuning = dataclasses.replace(benchmark, bench="tune", algorithms="all")
    _, ranked = tune_model(tuning.model_configs[0], tuning, tpu_slice)
    assert ranked[0].shape == wanted
    assert ranked[0].seconds == pytest.approx(best.seconds, rel=1e-12)  # not only the same winner: the same number
    task = make_task(dataclasses.replace(tuning, tune="compile"), tuning.model_configs[0])
    assert meshes_to_try(task)[0] == wanted


def test_what_is_left_open_is_searched_by_the_same_ranking():
    """The best plan over remat and microbatches is the best mesh at its own remat and microbatches."""
    _, plan = load_plan(["model=gpt3_13b", "cluster=v5p-64", "batch=64", "schedule=1f1b", "shard=none"])
    best = search_pod(plan.request(find_pod("v5p-64"))).trainable[0]
    given = [f"accumulate={best.plan.microbatches}", f"remat={best.plan.remat}", f"parallel={best.plan.algorithm}"]
    train = load_config(["model=gpt3_13b", "target=v5p-64", "check=true", "mesh=auto", "batch=64", "seq=2048", *given])
    assert check_mesh(train, train.model, parse_target("v5p-64")) == best.shape
    assert math.isfinite(best.seconds)


@pytest.mark.parametrize("given", [[], ["shard=optimizer", "parallel=collective"]])
def test_plan_auto_is_the_best_plan_that_train_runs(given):
    shared = ["model=tiny", "model.vocab_size=256", "batch=8", "seq=128", "optimizer.name=lion"]
    train = load_config([*shared, *given, "target=v4-8", "check=true", "plan=auto"])
    pod, keys = find_pod("v4-8"), [key.replace("parallel=", "algorithm=") for key in given]
    _, plan = load_plan(["cluster=v4-8", "optimizer=lion", *shared[:-1], *keys])
    best = search_pod(plan.request(pod)).trainable[0]
    found = with_plan(train, train.model, pod, jnp.bfloat16, Console(quiet=True))
    chosen = {"mesh": found.mesh, "parallel": found.parallel.algorithm, "accumulate": found.accumulate}
    chosen |= {"remat": found.remat, "shard": found.shard}
    assert chosen == {key: value for key, value in train_keys(best.plan).items() if key in chosen}
    assert found.plan is None and (not given or (found.shard, found.parallel.algorithm) == ("optimizer", "collective"))


@pytest.mark.parametrize(("given", "said"), [([], False), (["travel=int8"], True), (["precision=int8"], True)])
def test_what_the_cost_model_does_not_know_is_said(given, said):
    train = load_config(["model=tiny", "model.vocab_size=256", "batch=8", "seq=128", "target=v4-8", "check=true",
                         "plan=auto", "mesh=2x2", *given])  # fmt: skip
    console = Console(record=True, file=io.StringIO())
    with_plan(train, train.model, find_pod("v4-8"), jnp.bfloat16, console)
    out = " ".join(console.export_text().split())
    assert "by the planner's cost model" in out and ("priced in bf16" in out) == said


def test_keys_of_a_pipeline_choose_a_mesh_with_stages():
    train = load_config(["model=gpt3_1_3b", "target=v4-16", "check=true", "batch=64", "accumulate=8", "seq=1024",
                         "pipeline.schedule=gpipe", "remat=full"])  # fmt: skip
    shape = check_mesh(train, train.model, parse_target("v4-16"))
    assert shape.stage > 1 and shape.devices == parse_target("v4-16").devices


@pytest.mark.parametrize(
    ("key", "stages"),
    [("pipeline.schedule=gpipe", 2), ("pipeline.layers=1 1 1 1", 4), ("pipeline.layers=2 2", 2)],
)
def test_plan_auto_with_keys_of_a_pipeline_chooses_a_plan_with_stages(key, stages):
    given = ["model=tiny", "model.layers=4", "model.vocab_size=256", "batch=8", "seq=128", key]
    train = load_config([*given, "target=v4-8", "check=true", "plan=auto"])
    found = with_plan(train, train.model, find_pod("v4-8"), jnp.bfloat16, Console(quiet=True))
    assert parse_mesh(found.mesh).stage == stages and found.pipeline.layers == train.pipeline.layers
    assert found.pipeline.schedule == (train.pipeline.schedule or "1f1b")


def test_errors_of_plan_auto_name_keys_of_train():
    large = load_config(["model=gpt3_175b", "batch=8", "seq=128", "target=v4-8", "check=true", "plan=auto"])
    with pytest.raises(ValueError, match="a larger target=.*or type another batch= or model=.$"):
        with_plan(large, large.model, find_pod("v4-8"), jnp.bfloat16, Console(quiet=True))
    staged = load_config(["model=gpt3_1_3b", "batch=8", "target=v4-8", "check=true", "pipeline.layers=8 8 8"])
    with pytest.raises(ValueError, match="no plan has pipeline=3 .* Type another mesh= or batch=, or remove keys"):
        best_mesh(staged, staged.model, find_pod("v4-8"), jnp.bfloat16)


@pytest.mark.parametrize(
    ("key", "typed"),
    [("remat=none", "remat=none"), ("parallel=meshslice", "algorithm=meshslice"),
     ("parallel.algorithm=meshslice", "algorithm=meshslice")],
)  # fmt: skip
def test_plan_auto_names_a_default_that_it_would_replace(key, typed):
    with pytest.raises(ValueError, match=f"such as {key}. Remove it, or type {typed} to plan.py"):
        load_config(["model=tiny", "plan=auto", key])


@pytest.mark.parametrize(("model", "target"), [("llama3_8b", "v4-128")])
def test_where_nothing_fits_the_mesh_is_the_one_that_fits_with_another_remat(model, target):
    _, plan = load_plan(
        [f"model={model}", f"cluster={target}", "batch=256", "schedule=1f1b", "shard=none", "algorithm=meshslice"]
    )
    best = search_pod(plan.request(find_pod(target))).trainable[0]
    train = load_config([f"model={model}", f"target={target}", "check=true", "mesh=auto", "batch=256", "seq=2048"])
    assert (best.plan.microbatches, best.plan.remat) != (1, "none")
    assert check_mesh(train, train.model, parse_target(target)) == best.shape
