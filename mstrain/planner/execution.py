"""Execution styles (execution.toml): how a training system executes the step of a plan."""

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mstrain.checks import one_of

LATEST_UNFUSED = 2022  # FlashAttention appeared in this year; the large GPU systems adopted it later
FRAMEWORKS = {"gspmd": "jax", "fsdp": "torch"}  # stated algorithm of a run on GPUs -> style
WORDS = {  # word in the text about a published run -> style; the first match counts
    "transformer_shmap": "shmap",
    "maxtext": "maxtext",
    "hugging face": "transformers",
    "huggingface": "transformers",
    "torch.compile": "torch-compile",
    "plain jax": "jax",
    "llm-foundry": "llm-foundry",
    "mosaicml": "llm-foundry",
    "pytorch": "torch",
    "deepspeed": "torch",
}


@dataclass(frozen=True)
class ExecutionStyle:
    """How a system executes a step. execution.toml documents the fields and the sources of their values."""

    name: str
    fused_attention: bool
    width_passes: float
    head_passes: float
    mlp_passes: float
    kernels: float
    logit_bytes: float
    gradient_bytes: float
    accumulate_bytes: float
    update_bytes: float
    gathered_bytes: float = 0.0
    hides: tuple[str, ...] = ()
    attention: float = 1.0
    flash2: bool = False
    native: bool = False
    lockstep: bool = False
    backward_passes: float = 1.5
    score_passes: tuple[float, float] = (6.0, 9.0)
    state_bytes: tuple[float, float, float] = (2, 4, 12)  # 16-bit weights, float32 gradients and master copies
    activation_bytes: int = 0
    dead_code: bool = False
    one_hot: bool = False
    expert_tile: tuple[int, int, int] | None = None
    expert_bytes: float = 0.0
    stacked_passes: float = 0.0
    kernel_passes: float = 0.0
    sorted_passes: float = 1.0
    sent_passes: float = 0.0
    column_passes: float = 0.0


@functools.cache
def execution_styles() -> dict[str, ExecutionStyle]:
    """All styles of execution.toml by name."""
    table = tomllib.loads(Path(__file__).with_name("execution.toml").read_text())
    entries: dict[str, dict] = {}
    for name, entry in table.items():
        base = entries[entry.pop("base")] if "base" in entry else {}
        own = {key: tuple(value) if isinstance(value, list) else value for key, (value, _) in entry.items()}
        entries[name] = {**base, **own}
    return {name: ExecutionStyle(name, **entry) for name, entry in entries.items()}


def style_named(name: str) -> ExecutionStyle:
    """The style called `name`. Raises ValueError, which lists the known names, for any other name."""
    one_of("execution", name, list(execution_styles()))
    return execution_styles()[name]


def infer_style(platform: str, algorithm: str, text: str, remat: str) -> ExecutionStyle:
    """Infers the style of a run that does not state one.

    Args:
      platform: platform of the chip: tpu or gpu.
      algorithm: the stated algorithm. On GPUs, gspmd implies JAX and fsdp implies PyTorch.
      text: name, source and notes of the run, which may name a framework or a year.
      remat: the stated remat. `selective` recomputes attention scores, which implies attention that is not fused.
    """
    text = text.lower()
    for word, style in WORDS.items():
        if word in text and (style != "torch" or "megatron" not in text):  # Megatron-DeepSpeed has Megatron's kernels
            return style_named(style)
    if platform == "tpu":
        return style_named("maxtext")
    if algorithm in FRAMEWORKS:
        return style_named(FRAMEWORKS[algorithm])
    years = [int(year) for year in re.findall(r"(?<!\d)(20[12]\d)(?!\d)", text)]
    if "flash" in text or (min(years, default=LATEST_UNFUSED + 1) > LATEST_UNFUSED and remat != "selective"):
        return style_named("megatron")
    return style_named("megatron-2021" if min(years, default=LATEST_UNFUSED) < LATEST_UNFUSED else "megatron-2022")
