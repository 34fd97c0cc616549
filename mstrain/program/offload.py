"""Moments of the optimizer in host memory (`offload=moments`), and the check that the devices can address it."""

import jax

from mstrain.models.remat import MOMENTS, offloaded_names
from mstrain.models.transformer import Transformer

HOST = "pinned_host"  # JAX's name of host memory that a device can address


def check_offload(offload: str | None, device) -> None:
    """Raises ValueError if something is offloaded and `device` cannot address host memory."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    if offload and HOST not in kinds:
        raise ValueError(
            f"offload={offload}: {device.device_kind} has no {HOST} memory, only {', '.join(sorted(kinds))}. "
            "Drop offload=, or type remat=full."
        )


def offloads_moments(module: Transformer) -> bool:
    return MOMENTS in offloaded_names(module.offload)


def on_host(shardings):
    """Shardings of the same arrays in host memory; replicated ones, such as counters, stay on the device."""
    return jax.tree.map(lambda s: s.with_memory_kind(HOST) if any(s.spec) else s, shardings)


def on_device(module: Transformer, state: dict) -> dict:
    """`state` with moments in device memory, in a compiled program."""
    if not offloads_moments(module):
        return state
    return {**state, "optimizer": jax.device_put(state["optimizer"], jax.memory.Space.Device)}
