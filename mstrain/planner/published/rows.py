"""Reads a JSON file of published runs.

The file is an object with a list `rows`. A row has `name`, `source`, `model`, `cluster`, `plan`, `batch`, `seq`,
`dtype` and `measured`, and may have a `note`. Model fields have the names that papers use, which this module maps to
those of `ModelConfig`.
"""

import contextlib
import math
from dataclasses import dataclass

from mstrain.checks import one_of
from mstrain.fields import Fields, kind
from mstrain.hardware import Chip, all_chips, parse_target
from mstrain.hardware.clusters import gpu_named, gpu_pod
from mstrain.hardware.pod import Pod, pod_of
from mstrain.json_files import read_json
from mstrain.models.config import ModelConfig
from mstrain.models.parallel import ParallelConfig
from mstrain.planner.execution import infer_style, style_named
from mstrain.planner.plan import PodPlan
from mstrain.planner.remat import parse_remat
from mstrain.planner.request import SCHEDULES, SHARDS, PlanRequest

ALGORITHMS = (
    "megatron", "megatron-1d-allreduce", "megatron-1d", "fsdp", "gspmd", "ddp", "zero", "tensor", "meshslice",
    "collective",
)  # fmt: skip
RING = ParallelConfig("megatron")  # tensor parallelism of other systems runs on one ring
ZERO = {"zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
DTYPES = ("bf16", "f32")
ALIKE = {"fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "fp32": "f32", "float32": "f32"}  # equal peaks
MOST_SLICES = 64
MEASURED = ("tokens_per_second_per_device", "step_seconds", "mfu")
LARGEST = 10**8  # upper limit of every size of a model
KEYS = {
    "": "name source note model cluster plan batch seq dtype measured",
    "model": "layers width heads kv_heads head_width mlp_width gated vocabulary tied position parallel_block",
    "cluster": "device devices devices_per_node node_gbytes_per_s slices topology",
    "plan": "data tensor pipeline context algorithm sequence_parallel shard schedule remat microbatch interleave "
    "execution",
    "measured": " ".join(MEASURED),
}
RESERVED = 0.08  # fraction of a device's memory for contexts, communication buffers and fragmentation


@dataclass(frozen=True)
class PublishedRow:
    """One published run.

    Attributes:
      request, plan: the stated step and plan.
      search: choices that the row leaves to the model: `microbatch` and `interleave`, which are 1 in `plan`.
      inferred: whether the execution style is inferred from the row's texts, because plan.execution is missing.
      tokens_per_second: measured tokens/s per device.
      mfu: measured MFU, a fraction, if nothing else was published.
      notes: what the prediction ignores or assumes, one sentence each.
    """

    name: str
    source: str
    request: PlanRequest
    plan: PodPlan
    search: frozenset[str]
    inferred: bool
    tokens_per_second: float | None
    mfu: float | None
    notes: tuple[str, ...]


def read_rows(path: str) -> list[PublishedRow]:
    """The rows of the file. Raises ValueError for an invalid file, with the row and the key."""
    document = read_json(path, "published file")
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"published file {path} has no rows: write an object with a list of them under 'rows'.")
    names = [values.get("name") if isinstance(values, dict) else None for values in rows]
    parts = [f" ({name})" if isinstance(name, str) else "" for name in names]
    return [_row(Fields(f"{path}: row {n}{part}", "", values)) for n, (part, values) in enumerate(zip(parts, rows), 1)]


def _row(fields: Fields) -> PublishedRow:
    name, source = fields.text("name"), fields.text("source", "")
    with _located(fields.where, "model: "):
        model = _model(fields.object("model"), name)
    with _located(fields.where, "cluster: "):
        pod = _pod(fields.object("cluster"))
    stated, texts = fields.object("plan"), " ".join((name, source, fields.text("note", "")))
    batch, seq, dtype = fields.whole("batch"), fields.whole("seq"), fields.text("dtype", "bf16")
    dtype = ALIKE.get(dtype, dtype)
    with _located(fields.where):
        one_of("dtype", dtype, DTYPES)
        plan, search = _plan(stated, batch)
        execution = stated.text("execution", "")
        inferred = infer_style(pod.chip.platform, stated.text("algorithm"), texts, stated.text("remat"))
        style = style_named(execution) if execution else inferred
        request = PlanRequest(model, pod, (RING,), batch, seq, dtype, memory_margin=RESERVED, stated_style=style)
        _check(request, plan)
    if pod.chip.peak(dtype) is None:
        raise fields.error("dtype", f"is {dtype}, of which the table of chips has no peak for {pod.chip.name}.")
    tokens, mfu = _measured(fields.object("measured"), batch * seq / pod.devices)
    style_inferred = "execution" not in stated.values
    return PublishedRow(name, source, request, plan, search, style_inferred, tokens, mfu, _notes(fields, pod))


def _notes(fields: Fields, pod: Pod) -> tuple[str, ...]:
    unread = [
        f"{part}.{key}" if part else key
        for part, known in KEYS.items()
        for key in (fields.object(part).values if part else fields.values)
        if key not in known.split()
    ]
    notes = [f"Unknown keys are ignored: {', '.join(unread)}."] if unread else []
    cluster, stated = fields.object("cluster").values, fields.object("plan").values
    of_others = ("devices_per_node", "node_gbytes_per_s") if pod.tpu_slice else ("slices", "topology")
    unused = [f"cluster.{key}" for key in of_others if key in cluster]
    if "interleave" in stated and (stated.get("schedule") != "interleaved" or stated.get("pipeline", 1) == 1):
        unused.append("plan.interleave")
    if unused:
        notes.append(f"Keys without effect on {pod.name} and this plan: {', '.join(unused)}.")
    if pod.slices > 1 and "slices" not in fields.object("cluster").values:
        notes.append(f"No TPU slice has {pod.devices} devices: predicted for {pod.name}.")
    return tuple(notes)


@contextlib.contextmanager
def _located(where: str, part: str = ""):
    """Prefixes error messages with the row and its part, unless they already have this prefix."""
    try:
        yield
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(where) else f"{where}: {part}{text}") from None


def _check(request: PlanRequest, plan: PodPlan) -> None:
    """Raises ValueError, with the numbers, for a plan that cannot run on the stated cluster and model."""
    model, degrees = request.model, math.prod(plan.sizes)
    if degrees != request.pod.devices:
        raise ValueError(
            f"data {plan.data} x tensor {plan.tensor} x pipeline {plan.pipeline} x context {plan.context} is {degrees} "
            f"devices, and the cluster has {request.pod.devices}."
        )
    if model.layers < plan.pipeline:
        raise ValueError(f"pipeline {plan.pipeline} has more stages than the model has layers ({model.layers}).")
    if model.layers < plan.pipeline * plan.interleave:
        raise ValueError(
            f"interleave {plan.interleave} on pipeline {plan.pipeline} has more parts than the model has layers "
            f"({model.layers})."
        )
    if request.seq % plan.context:
        raise ValueError(f"context {plan.context} does not divide seq {request.seq}.")
    if model.heads % plan.tensor:
        raise ValueError(f"tensor {plan.tensor} does not divide heads {model.heads}.")


def _measured(fields: Fields, tokens: float) -> tuple[float | None, float | None]:
    """Measured (tokens/s per device, MFU), of which one is None; `tokens` per step and device."""
    rate, seconds, mfu = map(fields.number_or_none, MEASURED)
    if rate is None and seconds is not None:
        rate = tokens / seconds
    if mfu is not None and mfu > 1:
        raise fields.error("mfu", f"is {mfu:g}; write a fraction of the peak, at most 1.")
    if rate is None and mfu is None:
        raise fields.error(MEASURED[0], f"is missing; write one of {', '.join(MEASURED)}.")
    return rate, mfu if rate is None else None


def _model(fields: Fields, name: str) -> ModelConfig:
    for key in KEYS["model"].split():
        value = fields.values.get(key)
        if isinstance(value, int) and value > LARGEST:
            raise fields.error(key, f"is {kind(value)}; write at most {LARGEST}.")
    heads, width = fields.whole("heads"), fields.whole("width")
    gated = fields.truth("gated", False)
    return ModelConfig(
        name=name, layers=fields.whole("layers"), width=width, heads=heads,
        num_kv_heads=fields.whole("kv_heads", heads), head_dim=fields.whole("head_width", max(1, width // heads)),
        mlp_dim=fields.whole("mlp_width", 4 * width), vocab_size=fields.whole("vocabulary"), gated=gated,
        tied=fields.truth("tied", True), position=fields.text("position", "learned"),
        parallel_block=fields.truth("parallel_block", False),
        bias="none" if gated else "all", norm="rmsnorm" if gated else "layernorm",
    )  # fmt: skip


def _pod(fields: Fields) -> Pod:
    device, devices = fields.text("device"), fields.whole("devices")
    per_node = fields.whole("devices_per_node") if "devices_per_node" in fields.values else None
    network = fields.number_or_none("node_gbytes_per_s")
    if chip := gpu_named(device):
        return gpu_pod(chip, devices, per_node, network * 1e9 if network else None)
    chip = all_chips().get(device.lower())
    if chip is None or chip.tpu_slices is None:
        names = [name for name, each in all_chips().items() if each.platform != "cpu"]
        raise ValueError(f"device {kind(device)} is unknown. Known: {', '.join(names)}.")
    slices = fields.whole("slices", 1) if "slices" in fields.values else None
    return _tpu(chip, devices, slices, fields.text("topology", ""))


def _tpu(chip: Chip, devices: int, slices: int | None, topology: str) -> Pod:
    """The pod of one TPU slice with `devices` devices or, if there is none, of the fewest equal slices.

    Raises ValueError if no number of slices has as many devices.
    """
    rules, first = chip.slice_rules, None
    for count in [slices] if slices else [n for n in range(1, MOST_SLICES + 1) if devices % n == 0]:
        size = devices // count * rules.name_counts_per_chip // rules.devices_per_chip
        one = f"{rules.prefixes[0]}{':' + topology if topology else f'-{size}'}"
        try:
            pod = pod_of(parse_target(one if count == 1 else f"{count}x{one}"), devices)
        except ValueError as problem:
            first = first or problem
            continue
        if pod.devices == devices:
            return pod
        first = first or ValueError(f"{count} of {pod.name} have {pod.devices} devices, not {devices}.")
    raise first or ValueError(f"{chip.name} has no slices of {devices} devices.")


def _plan(fields: Fields, batch: int) -> tuple[PodPlan, frozenset[str]]:
    """The plan of a row, and the choices that the row leaves to the model: `microbatch` and `interleave`."""
    data, tensor, pipeline, context = (fields.whole(name, 1) for name in ("data", "tensor", "pipeline", "context"))
    one_of("plan.algorithm", fields.text("algorithm"), ALGORITHMS)
    shard, schedule = fields.text("shard", "none"), fields.text("schedule", "1f1b")
    shard = ZERO.get(shard.lower().replace("-", ""), shard)
    one_of("plan.shard", shard, SHARDS)
    one_of("plan.schedule", schedule, SCHEDULES)
    schedule = schedule if pipeline > 1 else SCHEDULES[0]  # of one stage, all are the same
    remat = fields.text("remat")
    parse_remat(remat)
    search, microbatch, interleave = set(), 1, 1
    if isinstance(fields.values.get("microbatch", "best"), str):
        search.add("microbatch")
    else:
        stated = fields.whole("microbatch")  # if more than the batch of one replica, it counts all replicas together
        microbatch = stated // data if stated * data > batch and stated % data == 0 else stated
    if schedule == "interleaved" and "interleave" not in fields.values:
        search.add("interleave")
    elif schedule == "interleaved":
        interleave = fields.whole("interleave")
    if batch % (data * microbatch):
        raise ValueError(f"batch {batch} does not divide into {data} replicas of microbatches of {microbatch}.")
    return PodPlan(
        data, RING, 1, tensor, pipeline, batch // data // microbatch, remat, shard, context, schedule, interleave,
        fields.truth("sequence_parallel", False),
    ), frozenset(search)  # fmt: skip
