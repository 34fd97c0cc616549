"""Profiles of a model on the devices present, one file per tensor degree and batch."""

import dataclasses
import time
from dataclasses import dataclass

import jax

from mstrain.benchmarks.layer_profiles import Sizes, profile_document
from mstrain.checks import at_least, one_of
from mstrain.commands.plans.output import make_folder
from mstrain.hardware.layer_profiles import profile_name
from mstrain.json_files import write_json
from mstrain.mesh import emulate_devices
from mstrain.models.config import ModelConfig

BYTES = 256  # tokens, where the model leaves the vocabulary to the tokenizer


@dataclass(frozen=True)
class ProfileConfig:
    """Profiles of one model, measured here."""

    model: ModelConfig
    """As in train.py; type profile=NAME."""
    seq: int = 128
    """Tokens per sequence."""
    tensor: tuple[int, ...] = (1,)
    """Tensor parallel degrees, as '[1,2]'."""
    batches: tuple[int, ...] = (1, 2, 4)
    """Sequences per microbatch, as '[1,2,4]'."""
    algorithm: str = "megatron"
    """Of the tensor products: megatron or meshslice (one row of devices)."""
    dtype: str = "bf16"
    """bf16 or f32."""
    repeats: int = 5
    """Runs of which the fastest counts."""
    device_type: str | None = None
    """Name in the files; null for what JAX calls the device."""
    max_seconds: float = 600.0
    """No further file is begun after so many seconds; those written stay."""
    run_dir: str = "runs/plan_profile"
    """Folder of the files."""

    def __post_init__(self):
        at_least("", self, seq=1, repeats=1)
        one_of("algorithm", self.algorithm, ("megatron", "meshslice"))
        one_of("dtype", self.dtype, ("bf16", "f32"))
        for name in ("tensor", "batches"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(
                    f"{name}={list(getattr(self, name))} must name numbers of 1 or more. Type {name}='[1,2]'."
                )
        if not self.max_seconds > 0:
            raise ValueError(f"max_seconds={self.max_seconds} leaves no time. Type max_seconds=600.")


def run_model(config: ProfileConfig) -> int:
    """Writes DeviceType.<TYPE>_tp<T>_bs<S>.json files; says which are missing when time runs out."""
    folder, model = make_folder(config.run_dir), config.model
    model = dataclasses.replace(model, vocab_size=model.vocab_size or BYTES)
    emulate_devices(max(config.tensor))
    present, kind = jax.device_count(), jax.devices()[0].device_kind
    if max(config.tensor) > present:
        fits = [degree for degree in config.tensor if degree <= present] or [1]
        raise ValueError(
            f"tensor={max(config.tensor)} needs as many devices and {present} are present. Type tensor={fits}."
        )
    name = (config.device_type or kind).replace(" ", "-").replace("_", "-")
    todo = [(tensor, batch) for tensor in config.tensor for batch in config.batches]
    began = time.monotonic()
    for number, (tensor, batch) in enumerate(todo):
        if time.monotonic() - began > config.max_seconds:
            missing = ", ".join(profile_name((name, *key)) for key in todo[number:])
            raise ValueError(
                f"max_seconds={config.max_seconds:g} ended the measurement; missing in {folder}: {missing}. "
                "Type a larger max_seconds."
            )
        sizes = Sizes(config.seq, batch, tensor, config.algorithm, config.dtype, config.repeats)
        document = profile_document(model, sizes)
        path = folder / profile_name((name, tensor, batch))
        write_json(document, path)
        times = document["execution_time"]
        print(
            f"{path.name}: {times['forward_backward_time_ms']:.2f} ms, a layer "
            f"{times['layer_compute_total_ms'][1]:.3f} ms, measured on {kind}"
        )
    print(f"{len(todo)} profiles of {model.name} ({model.layers + 2} layers with embedding and output) in {folder}")
    return 0
