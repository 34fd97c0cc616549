"""The planner for pods: its terms add up, its memory is the trainer's, its winner the best of everything it
may choose.
"""

import dataclasses
import itertools
import math
from collections import Counter

import jax
import pytest

from mstrain.hardware import chip_named, parse_target
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.constants import constants_for
from mstrain.hardware.overlap import KINDS
from mstrain.hardware.torus_parts import torus_axes
from mstrain.mesh import MeshShape, make_mesh, parse_mesh
from mstrain.models.flops import training_flops_per_token
from mstrain.models.parallel import ParallelConfig
from mstrain.models.parameters import STACK, parameter_shapes
from mstrain.models.plan import make_plan
from mstrain.models.size import count_parameters
from mstrain.models.stages import PipelineConfig
from mstrain.models.transformer import Transformer
from mstrain.models.zoo import load_preset
from mstrain.planner.clock import divisors
from mstrain.planner.cost import cost_plan
from mstrain.planner.layer import Pass
from mstrain.planner.memory import deferred_bytes, stage_parameters
from mstrain.planner.plan import PodPlan, plan_products
from mstrain.planner.request import SHARDS, PlanRequest
from mstrain.planner.search import REMATS, search_pod
from mstrain.planner.simulated import plan_cluster, simulate_plan
from mstrain.planner.stages import Stage, cycle_seconds, split_layers
from mstrain.planner.step import transformer_step
from mstrain.planner.trainer import train_keys, why_not_trainable
from mstrain.program.optimizer import OptimizerConfig, make_optimizer
from mstrain.program.pipeline import table_of
from mstrain.program.step import abstract_state
from mstrain.simulator.costs import PRODUCTS, operation_work
from mstrain.simulator.simulate import simulate_step
from mstrain.timeline import device_use
from tests.planner.plans import ask, cost, pod_plan
from tests.simulator.everything import simulate_everything
from tests.simulator.measures import num_events, op_counts

MODEL = dataclasses.replace(load_preset("gpt3_1_3b"), layers=8)


def config_for(model=MODEL, **keys) -> PlanRequest:
    return ask(model, **{"cluster": "v4-64", "batch": 64, "seq": 1024, **keys})


def costed(plan, **keys):
    request = config_for(**keys)
    return request, cost(request, plan)


def without_lockstep(plan, **keys):
    """The plan as the simulator runs it: each stage has only the memory that its position in the schedule needs."""
    request = config_for(**keys)
    request = dataclasses.replace(request, stated_style=dataclasses.replace(request.style, lockstep=False))
    return request, cost(request, plan)


PLANS = {
    "meshslice": pod_plan(1, "meshslice", 8, 4, 1, 2, "none"),
    "meshslice replicated": pod_plan(4, "meshslice", 4, 2, 1, 2, "dots"),
    "meshslice one dim": pod_plan(4, "meshslice", 8, 1, 1, 1, "full"),
    "megatron pipelined": pod_plan(2, "megatron", 2, 2, 4, 8, "full"),
    "fsdp": pod_plan(4, "fsdp", 2, 4, 1, 2, "none"),
    "meshslice pipelined": pod_plan(2, "meshslice", 2, 2, 4, 8, "dots"),
    "sharded": pod_plan(4, "meshslice", 2, 2, 2, 4, "dots", shard="optimizer"),
}
PASSES = PLANS | {
    "weights gathered": pod_plan(8, "meshslice", 2, 2, 1, 2, "dots", shard="parameters"),
    "gradients scattered": pod_plan(4, "meshslice", 2, 2, 2, 4, "save: qkv, mlp_in", shard="gradients"),
    "sequences split": pod_plan(4, "meshslice", 2, 2, 1, 2, "dots", context=2),
    "values in host memory": pod_plan(2, "meshslice", 2, 2, 4, 8, "minimal_offloaded", schedule="gpipe"),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_simulator_agrees_with_the_cost_model(name):
    """Time within 22 % below and 5 above; the simulator may also hide the gradient sums, which the model
    never does.
    """
    request, plan = without_lockstep(PLANS[name])
    simulated = simulate_plan(request, plan)
    assert simulated.microbatches == plan.plan.microbatches
    seconds = plan.scheduled_seconds
    assert 0.78 * (seconds - plan.terms.gradient_sum) < simulated.result.seconds < 1.05 * seconds
    peaks = {name: max(use.peak_bytes.values()) for name, use in simulated.result.memory_by_category.items()}
    for category in ("parameters", "gradients", "optimizer"):
        wanted = max(getattr(memory, category) for memory in plan.memory)
        assert peaks[category] == pytest.approx(wanted, rel=0.02), category
    assert simulated.result.peak_bytes == pytest.approx(plan.fullest.total, rel=0.25)
    # It gathers both operands of the output projection whole, where the loss cuts one of them.
    assert simulated.result.peak_bytes < 1.08 * plan.fullest.total


@pytest.mark.parametrize("name", PASSES)
def test_simulated_devices_compute_what_the_cost_model_says(name):
    """In every stage, up to the part of the element-wise work that is computed again; copies with what is gathered.

    The simulator has one rate for all products, the mean of the first stage, which is not that of the projection.
    """
    request, plan = costed(PASSES[name])
    simulated, count = simulate_plan(request, plan), plan.plan.microbatches
    use = device_use(simulated.result.timeline()).values()
    for (seconds, *_), stage, terms in zip(use, plan.stages, plan.stage_terms):
        passes = stage.useful_forward + stage.useful_backward + stage.repeated
        layers = stage_parameters(request.model, stage.holds, False, False).over(plan.plan.tensor)
        copies = plan.step.copies(plan.plan, layers)  # of gathered weights
        wanted = count * (passes.seconds - passes.exposed + stage.host + copies) + terms.update
        assert 0.97 * wanted < seconds < 1.02 * wanted


@pytest.mark.parametrize(
    ("name", "gathers", "sums"),
    [
        ("meshslice replicated", 0, 9 * 2 * 8),  # layers and table, microbatches, tensor devices
        ("sharded", 10 * 4, 10 * 4),  # once a step, of both copies of the table
        ("gradients scattered", 10 * 4, 10 * 4 * 4),
        ("weights gathered", 8 * 2 * 2 * 4, 9 * 2 * 4),  # in both passes
    ],
)
def test_replicas_gather_weights_and_sum_gradients_as_often_as_they_shard_them(name, gathers, sums):
    program = simulate_plan(*costed(PASSES[name])).result.program
    found = Counter()
    for spec, label, copies in zip(program.spec, program.label, program.copies.tolist()):
        found[program.labels[label][0], program.specs[spec].kind] += copies
    kind = "AllReduce" if name == "meshslice replicated" else "ReduceScatter"
    assert (found["weights", "AllGather"], found["gradients", kind]) == (gathers, sums)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zero-bubble"])
def test_activations_in_flight_follow_the_schedule(schedule):
    stated = pod_plan(2, "meshslice", 2, 2, 4, 8, "dots", schedule=schedule)
    request, plan = without_lockstep(stated)
    wanted = {"1f1b": [4, 3, 2, 1], "gpipe": [8] * 4, "zero-bubble": [4] * 4}[schedule]
    assert [stage.in_flight for stage in plan.stages] == wanted
    held = [stage.in_flight for stage in costed(stated)[1].stages]
    assert held == [table_of(schedule, 4, 8, 4).slots] * 4
    if schedule == "zero-bubble":  # what waits for its weight gradients counts as workspace there
        return
    use = simulate_plan(request, plan).result.memory_by_category["activations"].peak_bytes
    boundary = 2 * 4 * 1024 * MODEL.width / 4  # one activation that enters or leaves a stage
    for memory, peak in zip(plan.memory, (use[device] for device in sorted(use))):
        assert -boundary <= peak - memory.activations <= 3 * boundary


@pytest.mark.parametrize("name", ["meshslice", "meshslice pipelined", "megatron pipelined", "fsdp"])
def test_simulated_products_are_those_of_the_model(name):
    """Matrix FLOPs of the whole job are 6 per parameter and token, whatever the plan, and 2 more for the logits,
    which the loss computes again; recomputation comes on top.
    """
    plan = dataclasses.replace(PLANS[name], remat="none")
    request, plan = costed(plan)
    program = simulate_plan(request, plan).result.program
    work = sum(
        operation_work(program.specs[spec]) * copies
        for spec, copies in zip(program.spec.tolist(), program.copies.tolist())
        if program.specs[spec].kind in PRODUCTS
    )
    tokens = request.tokens
    scores = 12 * MODEL.layers * MODEL.width * request.seq
    columns = plan.products.head.layout.projection.out_dim
    padding = 6 * MODEL.width * (columns - MODEL.vocab_size)
    wanted = tokens * (training_flops_per_token(MODEL, request.seq) - scores + padding + 2 * MODEL.width * columns)
    assert work == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_terms_of_every_stage_add_up_to_the_step(name):
    """The time of a step is also that of the formula, which the test computes independently."""
    request, plan = costed(PLANS[name])
    assert all(terms.seconds == pytest.approx(plan.seconds, rel=1e-12) for terms in plan.stage_terms)
    assert all(min(dataclasses.astuple(terms)) >= 0 for terms in plan.stage_terms)
    waits = [terms.bubble + terms.messages for terms in plan.stage_terms]
    assert (max(waits) > 1e-9) == (plan.plan.pipeline > 1)
    compute = sum(dataclasses.astuple(plan.terms)[:7])  # products to offload, of the slowest stage
    slowest = max(stage.seconds for stage in plan.stages)
    assert compute == pytest.approx(plan.plan.microbatches * slowest, rel=1e-12)
    end = max(terms.gradient_sum + terms.update for terms in plan.stage_terms)
    cycle = cycle_seconds(list(plan.stages), plan.terms.messages / 2 / max(1, len(plan.stages) - 1), "1f1b")
    pipeline = (plan.plan.microbatches - 1) * cycle + sum(stage.seconds for stage in plan.stages)
    assert plan.scheduled_seconds == pytest.approx(pipeline + plan.terms.messages + end, rel=1e-12)


def test_interleaving_shrinks_the_bubble_and_keeps_more_in_flight():
    plan, model = pod_plan(2, "meshslice", 2, 2, 4, 8, "dots"), load_preset("gpt3_1_3b")
    plain = costed(plan, model=model)
    request, whole = without_lockstep(dataclasses.replace(plan, schedule="interleaved"), model=model)
    assert whole.stages[0].chunks[1][0] == whole.stages[3].chunks[0][1]  # after every stage's first chunk
    assert sum(stage.layers for stage in whole.stages) == model.layers
    assert whole.terms.bubble < 0.75 * plain[1].terms.bubble
    assert [stage.in_flight for stage in whole.stages] == [5.5, 4.5, 3.5, 2.5]
    simulated = simulate_plan(request, whole)
    assert simulated.result.seconds < simulate_plan(*plain).result.seconds
    seconds = whole.scheduled_seconds
    assert 0.79 * (seconds - whole.terms.gradient_sum) < simulated.result.seconds < 1.1 * seconds
    use = simulated.result.memory_by_category["activations"].peak_bytes
    for memory, peak in zip(whole.memory, (use[device] for device in sorted(use))):
        assert 0.8 < peak / memory.activations < 1.02  # chunks differ; all are taken for the largest


def test_sums_of_gradients_in_bf16_take_half_of_float32_ones():
    request, plan = costed(PLANS["meshslice"])
    request = dataclasses.replace(request, optimizer=OptimizerConfig(gradients="bf16"))
    assert cost(request, plan.plan).fullest.gradients == plan.fullest.gradients * (4 + 2) / (4 + 4)


@pytest.mark.parametrize("lockstep", [True, False])
def test_zero_bubble_makes_weight_gradients_where_stages_wait(lockstep):
    stated = pod_plan(2, "meshslice", 2, 2, 4, 8, "dots", schedule="zero-bubble")
    request, plan = costed(stated) if lockstep else without_lockstep(stated)
    bubbles = [
        cost(request, dataclasses.replace(stated, schedule=name)).terms.bubble for name in ("1f1b", stated.schedule)
    ]
    filled = sum(stage.weights for stage in plan.stages) - max(plan.stages, key=lambda s: s.seconds).weights
    assert bubbles[0] - bubbles[1] == pytest.approx(filled if lockstep else 2 * filled, rel=0.01)
    simulated = simulate_plan(request, plan).result
    assert 0.78 < simulated.seconds / plan.scheduled_seconds < 1.05
    assert lockstep or simulated.peak_bytes == pytest.approx(plan.fullest.total, rel=0.1)


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_what_waits_for_its_weight_gradients_is_what_the_program_stores(remat):
    model = dataclasses.replace(load_preset("tiny"), vocab_size=256, layers=2)
    mesh = make_mesh(parse_mesh("stage2-row2-col2"))
    keys = {"pipeline": PipelineConfig("zero-bubble")}
    module = Transformer(model, make_plan(ParallelConfig(), model, mesh, 4, 64, **keys), 64, remat=remat)
    layers, x_PxTxD = module.stage_layers(), jax.ShapeDtypeStruct((2, 4 * 64, model.width), jax.numpy.float32)
    rows = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, 1, 1, *x.shape[1:]), x.dtype), parameter_shapes(module)[STACK]
    )
    chunk = jax.ShapeDtypeStruct((2,), jax.numpy.int32)
    _, saved = jax.eval_shape(layers.forward, rows, x_PxTxD, None, chunk)
    _, _, rest = jax.eval_shape(layers.backward_of_inputs, rows, saved, x_PxTxD, None, chunk)
    request, plan = config_for(model, cluster="v4-16", batch=8, seq=64), pod_plan(1, "meshslice", 2, 2, 2, 2, remat)
    priced = deferred_bytes(request, plan, 4 * 64) / request.element_bytes
    assert sum(x.size for x in rest) / 2 == 4 * priced  # of one layer, on four devices


def test_one_rank_represents_all():
    """Keeping the time of every device of a 2-D mesh gives the same step, operations and memory."""
    model = dataclasses.replace(load_preset("tiny"), vocab_size=256)
    request = config_for(model, cluster="v4-32", batch=32, seq=64)
    whole = cost(request, pod_plan(2, "meshslice", 2, 2, 2, 4, "dots"))
    step, cluster = transformer_step(request, whole), plan_cluster(request, whole)
    one, every = simulate_step(step, cluster), simulate_everything(step, cluster)
    assert len(every.program.devices) == 16 and len(one.program.devices) == 2
    assert one.seconds == pytest.approx(every.seconds, rel=1e-12)
    assert op_counts(one.program) == op_counts(every.program)
    assert one.peak_bytes == every.peak_bytes and num_events(one) == num_events(every)
    groups = {tuple(every.program.groups[g]) for g, s in zip(every.program.group, every.program.spec)
              if every.program.specs[s].kind == "AllGather"}  # fmt: skip
    assert {(0, 1), (2, 3), (0, 2), (1, 3)} <= groups  # columns, and rows, of the first 2 x 2 mesh


STATES = [  # optimizer, mesh, shard
    (OptimizerConfig(), MeshShape(2, 2, 4), "none"),
    (OptimizerConfig("lion"), MeshShape(2, 2, 4), "optimizer"),
    (OptimizerConfig("muon"), MeshShape(2, 2, 4), "none"),
    (OptimizerConfig("muon", moments="bf16"), MeshShape(2, 2, 2, stage=2), "gradients"),
    (OptimizerConfig("adafactor"), MeshShape(2, 2, 4), "none"),
    (OptimizerConfig(moments="bf16", rounding="stochastic"), MeshShape(2, 2, 2, stage=2), "none"),
]


@pytest.mark.parametrize(("optimizer", "shape", "shard"), STATES, ids=lambda part: getattr(part, "name", str(part)))
def test_state_is_what_the_trainer_keeps(optimizer, shape, shard):
    """Bytes of one device: shards of the stored state, but for norms, whose vectors are whole; six layers on two stages
    of which each has the table.
    """
    model = dataclasses.replace(
        load_preset("tiny"), layers=6, vocab_size=256, bias="none", norm="rmsnorm", position="rotary"
    )
    plan = make_plan(ParallelConfig("meshslice"), model, make_mesh(shape), 8, 64, shard=shard)
    state = abstract_state(Transformer(model, plan, 64), make_optimizer(optimizer))
    weights, moments = (
        sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(state[name]))
        for name in ("params", "optimizer")
    )
    request = config_for(model, cluster="v4-32", batch=16, seq=64)
    request = dataclasses.replace(request, optimizer=optimizer)
    memory = cost(request, PodPlan.on(shape, ParallelConfig("meshslice"), 2, "none", shard, plan.stages)).fullest
    norms = 4 * model.width * (2 * model.layers + 1)
    entries = count_parameters(model) / shape.stage / shape.row / shape.col
    gathered = 0.0 if shard == "none" else 2 * entries  # in bf16
    assert memory.parameters == pytest.approx(weights + gathered, rel=0.06, abs=norms)
    assert memory.optimizer == pytest.approx(moments, rel=0.06, abs=2 * norms)
    assert memory.gradients == pytest.approx(8 * entries / (2 if shard == "gradients" else 1), rel=0.06)


@pytest.mark.parametrize("name", ["gpt3_1_3b", "llama3_8b", "gemma2_2b", "mixtral_8x7b", "deepseek_v3"])
def test_parameter_counts_add_up(name):
    model = load_preset(name)
    every = stage_parameters(model, tuple(count for _, count in model.layer_groups), True, True)
    assert sum(every) == count_parameters(model)


def test_search_finds_the_best_of_all_plans():
    """Against every combination written down here, costed one by one."""
    model = dataclasses.replace(load_preset("tiny"), vocab_size=256)
    request = config_for(model, cluster="v4-16", batch=8, seq=128)
    found = search_pod(request)
    best = math.inf
    for pipeline in (1, 2):
        for data in divisors(request.pod.devices // pipeline):
            tensor = request.pod.devices // pipeline // data
            carried = request.pod.meshes(data) if pipeline == 1 else [(r, tensor // r) for r in divisors(tensor)]
            shapes = [(a, *shape) for shape in carried for a in ("meshslice", "collective")]
            shapes += [(a, 1, tensor) for a in ("megatron", "fsdp") if carried and tensor > 1]
            schedules = ["1f1b"] if pipeline == 1 else ["1f1b", "gpipe", "zero-bubble"]  # too few layers to interleave
            for shape, count, shard in itertools.product(shapes, divisors(request.batch // data), SHARDS):
                for remat, schedule in itertools.product(REMATS, schedules):
                    plan = pod_plan(data, *shape, pipeline, count, remat, shard=shard, schedule=schedule)
                    products = plan_products(request, plan)
                    if not isinstance(products, str):
                        best = min(best, cost_plan(request, plan, products).seconds)
    assert found.finished and found.best.seconds == pytest.approx(best)
    assert [c.seconds for c in found.ranked] == sorted(c.seconds for c in found.ranked)
    names = [c.plan.name for c in found.ranked]
    assert len(names) == len(set(names))


def test_what_is_ranked_fits_and_the_trainer_gets_what_it_can_run():
    request = config_for(load_preset("gpt3_6_7b"), cluster="v4-16", batch=32, shard="none", remat="dots")
    found = search_pod(request)
    assert all(c.fullest.total <= request.usable_bytes for c in found.ranked) and found.rejected
    assert found.trainable and not any(why_not_trainable(c.plan) for c in found.trainable)
    piped = next(c for c in found.ranked if c.plan.pipeline > 1)
    keys = train_keys(dataclasses.replace(piped.plan, schedule="interleaved", interleave=2))
    assert keys["pipeline.interleave"] == 2 and f"stage{piped.plan.pipeline}-" in str(keys["mesh"])
    assert not why_not_trainable(dataclasses.replace(piped.plan, schedule="zero-bubble"))
    split_stages = pod_plan(1, "meshslice", 2, 2, 2, 4)
    assert "stages across them" in why_not_trainable(split_stages, 2)
    assert train_keys(dataclasses.replace(split_stages, data=4), 2)["mesh"] == "replica2-stage2-data2-row2-col2"
    assert not why_not_trainable(dataclasses.replace(piped.plan, schedule="1f1b", shard="parameters"))
    split = pod_plan(2, "meshslice", 2, 2, context=2)
    assert not why_not_trainable(split) and train_keys(split)["mesh"] == "data2-context2-row2-col2"


def stage(seconds: float) -> Stage:
    passes = Pass(seconds / 3), Pass(2 * seconds / 3), Pass()
    return Stage(((0, 1),), (1,), (1,), *passes, 0.0, 0.0, 1, 0, (True, True))


def test_cycle_is_the_slowest_stage_or_the_round_trip():
    assert cycle_seconds([stage(1), stage(3), stage(2)], 0.0, "1f1b") == 3
    assert cycle_seconds([stage(2), stage(2)], 1.0, "1f1b") == 3  # two in flight share a round trip of 6
    assert cycle_seconds([stage(3), stage(6)], 0.0, "gpipe") == pytest.approx(6)


def test_last_stage_gives_layers_up_for_the_output_projection():
    assert split_layers(8, 4, 0.0) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert split_layers(10, 2, 4.0) == [(0, 7), (7, 10)]
    assert split_layers(96, 1, 2.0) == [(0, 96)]


def test_rings_use_all_links_of_the_torus_axes_they_are_made_of():
    physical = parse_target("v5p-512").physical_axes
    assert physical == (4, 8, 8)
    assert torus_axes(physical, (1, 1, 32, 8)) == ((), (), (0, 2), (1,))  # as JAX lays a mesh: the last axis first
    assert torus_axes(physical, (1, 4, 8, 8)) == ((), (0,), (2,), (1,)) and torus_axes(physical, (16, 16)) is None
    pod, one = find_pod("v5p-512"), constants_for(chip_named("v5p")).row.all_gather
    whole, split = (pod.constants((1, 1, 1, *mesh), "bf16") for mesh in ((32, 8), (16, 16)))
    assert split.row.all_gather == one  # some rings are lines
    links = [axis.all_gather.bandwidth / one.bandwidth for axis in (whole.row, whole.col, whole.ring)]
    assert links == [4, 2, 6]  # both directions of two, one and three closed axes
    assert whole.row.all_gather.sync == pytest.approx(one.sync * (3 + 7) / 31)
    open_lines = find_pod("v5p-64").constants((1, 1, 1, 4, 8), "bf16")  # of 2 x 4 x 4 chips
    assert [axis.all_gather.bandwidth / one.bandwidth for axis in (open_lines.row, open_lines.col)] == [1, 2]
    shared = find_pod("tpu7x-32").constants((1, 1, 1, 4, 8), "bf16")  # 2 x 2 x 4 chips, whose cores share their links
    axes = (shared.row, shared.col, shared.ring)  # a line of 4 chips; one ring of 2 x 2 and of all, with both cores
    assert [axis.all_gather.bandwidth / chip_named("tpu7x").ici_bandwidth for axis in axes] == [1, 4, 4]
    closed = find_pod("tpu7x-256").constants((1, 1, 1, 32, 8), "bf16")  # of 4 x 4 x 8 chips
    links = [[getattr(axis, kind).bandwidth / 45e9 for kind in KINDS] for axis in (closed.row, closed.col, closed.ring)]
    assert links == [[4, 4], [4, 4], [12, 4]]  # scatters over several torus axes and both cores take one ring
    assert closed.ring.reduce_scatter.sync > 15 * closed.ring.all_gather.sync
