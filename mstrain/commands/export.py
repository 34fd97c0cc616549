"""Writes a run's newest checkpoint as a Hugging Face folder, which transformers loads without options."""

import dataclasses
import math
from pathlib import Path

from mstrain.checks import one_of
from mstrain.cli import Command
from mstrain.commands.recorded import Source, help_of, on_one_device, source_config

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportConfig(Source):
    """One export. Keys of train choose another mesh than one device: mesh=2x4."""

    out: str
    """New folder for config.json, safetensors and tokenizer."""
    dtype: str = "auto"
    """Dtype of the weights: `f32`, `bf16`, `f16`, or `auto` (float32 for a run, that of every tensor for init=)."""
    shard_gb: float = 5.0
    """Largest size of one file of weights in gigabytes; more weights are written as several files with an index."""

    def __post_init__(self):
        super().__post_init__()
        one_of("dtype", self.dtype, ("auto", *DTYPES))
        if not (self.shard_gb > 0 and math.isfinite(self.shard_gb)):
            raise ValueError(f"shard_gb={self.shard_gb} is not a size. Type shard_gb=5.")
        if not self.out.strip():
            raise ValueError("out= is empty. Type the name of a new folder.")


def load_config(arguments: list[str]) -> ExportConfig:
    return source_config(ExportConfig, arguments)[0]


def main(arguments: list[str]) -> int:
    from mstrain.job.job import joined
    from mstrain.job.process_info import find_process
    from mstrain.models.hub.tokenizer import write_tokenizer
    from mstrain.models.hub.write import check_writable, new_folder, size_of, write_model
    from mstrain.training.prepare import build_module

    own, given = source_config(ExportConfig, arguments)
    out = Path(own.out).expanduser()
    check_writable(out)
    config = own.config(on_one_device([*given, *(["data=synthetic"] if own.init else [])]))
    process, devices = find_process(config.coordinator, config.processes, config.process)
    with joined(process, config.hosts, config.run_dir, devices) as job:
        module, tokenizer, console = build_module(config, job)
        target, origin = _target(own, module.model, tokenizer)
        check_writable(out, size_of(module.model, target))
        name, params = own.parameters(job, module)
        with new_folder(out, job.leads) as folder:
            if job.leads and origin:
                origin.keep_small_files(folder)
            elif job.leads and tokenizer:
                special = write_tokenizer(folder, tokenizer, module.model.context)
                target = dataclasses.replace(target, config=target.config | special)
            if job.leads and tokenizer:
                _write_template(folder, config.data, tokenizer, console)
            size = write_model(folder, module, params, target, job.leads)
        console.print(f"{out}: {target.family.architecture} of {name}, {size:,} bytes of weights")
        if origin and origin.left_out:
            console.print(origin.left_out)
        if module.model.mtp_layers and not target.family.mtp:
            console.print(
                f"The multi-token prediction layers are left out: {target.family.model_type} has no tensors for them."
            )
        if not tokenizer and not origin:
            console.print("The run has no tokenizer, so the folder has none.")
    return 0


def _write_template(folder: Path, data, tokenizer, console) -> None:
    from mstrain.models.hub.tokenizer import write_template

    try:
        write_template(folder, data, tokenizer)
    except ValueError as error:
        console.print(f"The folder has no chat template of the run: {error}.")


def _target(own: ExportConfig, model, tokenizer):
    """(what to write, the folder that the model comes from; None if its configuration or tokenizer is not this one)."""
    from mstrain.data.tokenizers import load_tokenizer
    from mstrain.models.hub.config import differing_fields, family_for
    from mstrain.models.hub.folder import CONFIG, TOKENIZER, Folder
    from mstrain.models.hub.write import Target
    from mstrain.training.resume import HUB

    place = Path(own.init) if own.init else Path(own.run_dir or "") / HUB
    origin = Folder(place, model.mtp_layers) if (place.expanduser() / CONFIG).is_file() else None
    if origin and differing_fields(origin.model, model):
        origin = None
    limit, dtype = int(own.shard_gb * 1e9), DTYPES.get(own.dtype, "float32")
    family, config = (origin.family, origin.config) if origin else family_for(model)
    config = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    if own.init and origin and own.dtype == "auto":
        origin.check()
        return Target(family, config, origin.dtype_of, limit), origin
    if origin and tokenizer:
        file = origin.path / TOKENIZER
        origin = origin if file.is_file() and load_tokenizer(str(file)).digest == tokenizer.digest else None
    return Target(family, config, lambda _: dtype, limit), origin


def help_lines(_: list[str]) -> list[str]:
    return help_of(ExportConfig, "export")


COMMAND = Command("export", main, (__doc__ or "").strip(), load_config, help_lines)
