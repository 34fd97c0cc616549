"""Execution styles (execution.toml): how a training system runs the step that a plan states."""

import functools
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from mstrain.checks import one_of

LATEST_UNFUSED = 2022  # FlashAttention is of that year; the large GPU systems adopted it after
FRAMEWORKS = {"gspmd": "jax", "fsdp": "torch"}  # of runs on GPUs, by the stated algorithm
WORDS = {  # of a published run's texts -> its style, the first that occurs
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
    """How a system runs a step; execution.toml explains the fields and gives reasons."""

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
    table = tomllib.loads(Path(__file__).with_name("execution.toml").read_text())
    entries: dict[str, dict] = {}
    for name, entry in table.items():
        base = entries[entry.pop("base")] if "base" in entry else {}
        own = {key: tuple(value) if isinstance(value, list) else value for key, (value, _) in entry.items()}
        entries[name] = {**base, **own}
    return {name: ExecutionStyle(name, **entry) for name, entry in entries.items()}


def style_named(name: str) -> ExecutionStyle:
    """The style called `name`; raises ValueError with the names."""
    one_of("execution", name, list(execution_styles()))
    return execution_styles()[name]


def infer_style(platform: str, algorithm: str, text: str, remat: str) -> ExecutionStyle:
    """The style of a run that names none.

    Args:
      platform: of the chip: tpu or gpu.
      algorithm: as stated; gspmd is JAX, and fsdp on a GPU is PyTorch.
      text: what is written about the run; names a framework or a year.
      remat: as stated. `selective` recomputes attention scores, so they are in memory.
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
