"""Bytes of a stated plan on the fullest device, to choose the microbatch of a row that says `best`."""

from mstrain.planner.stated.cost import weights_per_device
from mstrain.planner.stated.plan import StatedStep

STATE = ("weights", "gradients", "optimizer")
RESERVED = 0.08  # of a device's memory: contexts, communication buffers, fragmentation


def step_bytes(step: StatedStep) -> float:
    """Weights, gradients, optimizer state, activations of the microbatches in flight, and logits."""
    plan, degrees = step.plan, step.plan.degrees
    weights, shards = weights_per_device(step), step.group("replica").size
    parts = {name: size * weights for name, size in zip(STATE, plan.style.state_bytes)}
    sharded = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[plan.shard]
    for name in STATE[::-1][:sharded]:
        parts[name] /= shards
    chunks = plan.interleave if plan.schedule == "interleaved" else 1
    if plan.schedule == "gpipe" or degrees.pipeline == 1:
        flight = float(step.microbatches if plan.schedule == "gpipe" else 1)
    else:
        flight = min(step.microbatches, degrees.pipeline * (1 + (degrees.pipeline - 1) / (degrees.pipeline * chunks)))
    one = layer_bytes(step, plan.remat.saved - plan.remat.offloaded) * step.layers
    working = layer_bytes(step, None)
    logits = 10.0 * step.tokens * step.vocab_size / degrees.tensor
    return sum(parts.values()) + one * flight + working + logits


def layer_bytes(step: StatedStep, saved) -> float:
    """Activations of a layer: the parts `saved`, or all for None."""
    model, plan = step.model, step.plan
    tensor, size = plan.degrees.tensor, step.activation_bytes
    wide = tensor if plan.sequence_parallel else 1
    heads, kv = model.heads * model.head_dim, 2 * model.num_kv_heads * model.head_dim
    up = model.mlp_dim * (2 if model.gated else 1)
    sizes = {
        "input": model.width / wide, "qkv": (heads + kv) / tensor, "context": heads / tensor, "out": model.width / wide,
        "mlp_in": up / tensor, "mlp_out": model.width / wide,
        "elementwise": (3 * model.width / wide + model.mlp_dim / tensor),
        "scores": 0.0 if plan.style.fused_attention else 2.5 * model.heads * step.seq / tensor,
    }  # fmt: skip
    kept = set(sizes) if saved is None or plan.remat.name == "none" else set(saved)
    return size * step.tokens * sum(sizes[name] for name in kept if name in sizes)


def fits(step: StatedStep) -> bool:
    """Whether a device holds the step."""
    return step_bytes(step) <= (step.fabric.chip.hbm_bytes or 0) * (1 - RESERVED)
