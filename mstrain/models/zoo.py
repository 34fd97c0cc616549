"""The model zoo: loads the presets under conf/model by name."""

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from mstrain.conf_folder import CONF
from mstrain.display.tables import make_table
from mstrain.models.config import ModelConfig
from mstrain.models.size import count_parameters

PRESETS = CONF / "model"
BYTES = 256  # tokens of the default tokenizer
FAMILIES = {
    "gpt2": "GPT-2",
    "gpt3": "GPT-3",
    "gpt": "gpt-oss",
    "megatron": "Megatron-NLG",
    "seed": "transformer_shmap",
    "llama2": "Llama 2",
    "llama3": "Llama 3",
    "qwen3": "Qwen 3",
    "gemma2": "Gemma 2",
    "mixtral": "Mixtral",
    "olmoe": "OLMoE",
    "deepseek": "DeepSeek",
}


def preset_names() -> tuple[str, ...]:
    """Names of all presets in alphabetical order."""
    return tuple(sorted(_preset_files(())))


def _preset_files(folders: Iterable[Path]) -> dict[str, Path]:
    return {path.stem: path for folder in (*folders, PRESETS) for path in folder.glob("*.yaml")}


def load_preset(name: str, folders: Iterable[Path] = ()) -> ModelConfig:
    """The preset `name`, of the zoo or of further `folders`.

    Raises:
      ValueError: the preset does not exist (the message has the nearest name), or its file is invalid.
    """
    names = sorted(files := _preset_files(folders))
    if name not in files:
        near = difflib.get_close_matches(re.sub(r"[^a-z0-9]", "_", name.lower()), names, 1, cutoff=0.4)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ValueError(f"Unknown model {name!r}. {hint}Choose one of {', '.join(names)}.")
    path = files[name]
    try:
        fields = OmegaConf.structured(ModelConfig)
        OmegaConf.set_readonly(fields.latent, False)  # OmegaConf merges into frozen dataclasses at the top only
        merged = OmegaConf.merge(fields, OmegaConf.load(path))
        model = OmegaConf.to_object(merged)
        assert isinstance(model, ModelConfig)
    except OmegaConfBaseException as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: {reason}. Its fields must be those of ModelConfig.") from None
    if model.name != name:
        raise ValueError(f"{path} has name: {model.name}. Write name: {name}, the name of the file.")
    return model


def family(model: ModelConfig) -> str:
    """The model family of a preset, from the first word of its name; `mstrain` for other names."""
    return FAMILIES.get(model.name.split("_")[0], "mstrain")


def zoo_table() -> Table:
    """A row per preset, sorted by family and size, with the exact parameter count."""
    models = sorted(
        map(load_preset, preset_names()), key=lambda m: (family(m), count_parameters(_with_vocab_size(m, 1)))
    )
    rows = []
    for m in models:
        sizes = (str(m.layers), str(m.width), f"{m.heads}/{m.num_kv_heads}", str(m.mlp_dim))
        vocab_size = str(m.vocab_size or f"{BYTES}*")
        count = count_parameters(_with_vocab_size(m, BYTES))
        rows.append((m.name, *sizes, vocab_size, str(m.context), f"{count:,}"))
    columns = ("name", "layers", "width", "heads/kv", "mlp", "vocab", "context", "parameters")
    caption = "* set by the tokenizer; parameters are counted for bytes"
    return make_table("Models: type model=NAME", columns, rows, ("name",), caption)


def _with_vocab_size(model: ModelConfig, vocab_size: int) -> ModelConfig:
    return dataclasses.replace(model, vocab_size=model.vocab_size or vocab_size)
