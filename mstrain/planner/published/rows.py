"""Reads a file of published runs into stated steps.

The file is an object with `rows`. A row has `name`, `source`, `model`, `cluster`, `plan`, `batch`, `seq`, `dtype`
and `measured`, and may have a `note`. Its names of model fields are those of papers; they are mapped here.
"""

from dataclasses import dataclass, replace

from mstrain.checks import one_of
from mstrain.hardware import Chip, all_chips
from mstrain.json_files import read_json
from mstrain.models.config import ModelConfig
from mstrain.planner.clusters import gpu_fabric, gpu_named, tpu_fabric
from mstrain.planner.published.fields import Fields, kind
from mstrain.planner.stated.execution import infer_style, style_named
from mstrain.planner.stated.fabric import Fabric
from mstrain.planner.stated.plan import SCHEDULES, SHARDS, Degrees, StatedPlan, StatedStep, check_step
from mstrain.planner.stated.remat import parse_remat

ALGORITHMS = (
    "megatron", "megatron-1d-allreduce", "megatron-1d", "fsdp", "gspmd", "ddp", "zero", "tensor", "meshslice",
    "collective",
)  # fmt: skip
ZERO = {"zero1": "optimizer", "zero2": "gradients", "zero3": "parameters"}
DTYPES = ("bf16", "f32")
ALIKE = {"fp16": "bf16", "float16": "bf16", "bfloat16": "bf16", "fp32": "f32", "float32": "f32"}  # of one peak
MOST_SLICES = 64
MEASURED = ("tokens_per_second_per_device", "step_seconds", "mfu")


@dataclass(frozen=True)
class PublishedRow:
    """One run.

    Attributes:
      step: as stated; its microbatch and interleaving are 1 where `search` names them.
      inferred: whether the execution style follows from the row's texts instead of plan.execution.
      tokens_per_second: measured, a device; `mfu`: measured, where nothing else was published.
    """

    name: str
    source: str
    step: StatedStep
    search: frozenset[str]
    inferred: bool
    tokens_per_second: float | None
    mfu: float | None


def read_rows(path: str) -> list[PublishedRow]:
    """The rows of the file; raises ValueError that names row and key for whatever is wrong."""
    document = read_json(path, "published file")
    rows = document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"published file {path} has no rows: write an object with a list of them under 'rows'.")
    found = []
    for number, values in enumerate(rows, 1):
        name = values.get("name") if isinstance(values, dict) else None
        where = f"{path}: row {number}" + (f" ({name})" if isinstance(name, str) else "")
        found.append(_row(Fields(where, "", values)))
    return found


def _row(fields: Fields) -> PublishedRow:
    name, source = fields.text("name"), fields.text("source", "")
    model = _model(fields.object("model"), name)
    fabric = _fabric(fields.object("cluster"))
    stated = fields.object("plan")
    texts = " ".join((name, source, fields.text("note", "")))
    batch, seq, dtype = fields.whole("batch"), fields.whole("seq"), fields.text("dtype", "bf16")
    dtype = ALIKE.get(dtype, dtype)
    try:
        one_of("dtype", dtype, DTYPES)
        plan, search = _plan(stated, fabric, texts, batch)
        step = StatedStep(model, fabric, plan, batch, seq, dtype)
        check_step(step)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(fields.where) else f"{fields.where}: {text}") from None
    if fabric.chip.peak(dtype) is None:
        raise fields.error("dtype", f"is {dtype}, of which the table of chips has no peak for {fabric.chip.name}.")
    tokens, mfu = _measured(fields.object("measured"), batch * seq / fabric.devices)
    return PublishedRow(name, source, step, search, "execution" not in stated.values, tokens, mfu)


def _measured(fields: Fields, tokens: float) -> tuple[float | None, float | None]:
    rate, seconds, mfu = (fields.number(key, None) for key in MEASURED)
    if rate is None and seconds is not None:
        rate = tokens / seconds
    if rate is None and mfu is None:
        raise fields.error(MEASURED[0], f"is missing; write one of {', '.join(MEASURED)}.")
    return rate, mfu if rate is None else None


def _model(fields: Fields, name: str) -> ModelConfig:
    heads, width = fields.whole("heads"), fields.whole("width")
    gated = fields.truth("gated", False)
    try:
        return ModelConfig(
            name=name,
            layers=fields.whole("layers"),
            width=width,
            heads=heads,
            num_kv_heads=fields.whole("kv_heads", heads),
            head_dim=fields.whole("head_width", max(1, width // heads)),
            mlp_dim=fields.whole("mlp_width", 4 * width),
            vocab_size=fields.whole("vocabulary"),
            gated=gated,
            tied=fields.truth("tied", True),
            position=fields.text("position", "learned"),
            parallel_block=fields.truth("parallel_block", False),
            bias="none" if gated else "all",
            norm="rmsnorm" if gated else "layernorm",
        )
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(fields.where) else f"{fields.where}: model: {text}") from None


def _fabric(fields: Fields) -> Fabric:
    device, devices = fields.text("device"), fields.whole("devices")
    per_node = fields.whole("devices_per_node") if "devices_per_node" in fields.values else None
    network = fields.number("node_gbytes_per_s", None)
    try:
        if chip := gpu_named(device):
            return gpu_fabric(chip, devices, per_node, network * 1e9 if network else None)
        chip = all_chips().get(device.lower())
        if chip is None or chip.tpu_slices is None:
            names = [name for name, each in all_chips().items() if each.platform != "cpu"]
            raise ValueError(f"device {kind(device)} is unknown. Known: {', '.join(names)}.")
        slices = fields.whole("slices", 1) if "slices" in fields.values else None
        return _tpu(chip, devices, slices, fields.text("topology", ""))
    except ValueError as error:
        text = str(error)
        raise ValueError(text if text.startswith(fields.where) else f"{fields.where}: cluster: {text}") from None


def _tpu(chip: Chip, devices: int, slices: int | None, topology: str) -> Fabric:
    """`devices` of one slice or, where no slice has so many, of the fewest equal ones; raises ValueError."""
    rules, error = chip.tpu_slices, ValueError(f"{chip.name} has no slices of {devices} devices.")
    assert rules is not None
    first = None
    for count in [slices] if slices else [n for n in range(1, MOST_SLICES + 1) if devices % n == 0]:
        size = devices // count * rules.name_counts_per_chip // rules.devices_per_chip
        try:
            fabric = tpu_fabric(f"{rules.prefixes[0]}{':' + topology if topology else f'-{size}'}", count)
        except ValueError as problem:
            first = first or problem
            continue
        if fabric.devices == devices:
            return fabric
        first = first or ValueError(f"{count} of {fabric.name} have {fabric.devices} devices, not {devices}.")
    raise first or error


def _plan(fields: Fields, fabric: Fabric, texts: str, batch: int) -> tuple[StatedPlan, frozenset[str]]:
    """The plan, and what of it the row leaves to the model: `microbatch` and `interleave`."""
    names = ("data", "tensor", "pipeline", "context")
    degrees = Degrees(**{name: fields.whole(name, 1) for name in names})
    algorithm = fields.text("algorithm")
    one_of("plan.algorithm", algorithm, ALGORITHMS)
    shard, schedule = fields.text("shard", "none"), fields.text("schedule", "1f1b")
    shard = ZERO.get(shard.lower().replace("-", ""), shard)
    one_of("plan.shard", shard, SHARDS)
    one_of("plan.schedule", schedule, SCHEDULES)
    remat = parse_remat(fields.text("remat"))
    execution = fields.text("execution", "")
    if execution:
        style = style_named(execution)
    else:
        style = infer_style(fabric.chip.platform, algorithm, texts, remat.name)
    plan = StatedPlan(degrees, style, remat, 1, fields.truth("sequence_parallel", False), shard, schedule)
    search = set()
    if isinstance(fields.values.get("microbatch", "best"), str):
        search.add("microbatch")
    else:
        plan = replace(plan, microbatch=_microbatch(fields.whole("microbatch"), batch, degrees.data))
    if schedule == "interleaved":
        if "interleave" in fields.values:
            plan = replace(plan, interleave=fields.whole("interleave"))
        else:
            search.add("interleave")
    return plan, frozenset(search)


def _microbatch(stated: int, batch: int, data: int) -> int:
    """Of one replica. More than a replica's share of the batch counts the sequences of all replicas."""
    return stated // data if stated * data > batch and stated % data == 0 else stated
