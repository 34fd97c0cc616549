"""Models of the commands that read one: the newest checkpoint of a run, or a Hugging Face folder."""

import dataclasses
from pathlib import Path
from typing import Any

from mstrain.cli import check_keys, compose, describe_keys, own_config
from mstrain.commands import train
from mstrain.data.tokenizers import tokenizer_file
from mstrain.job.job import ALONE, Job
from mstrain.models.hub.folder import Folder
from mstrain.models.transformer import Transformer
from mstrain.training.config import RunConfig
from mstrain.training.record import RUN, argument_of, read, recorded_overrides

_OF_PATH = [f"data.{key}" for key in ("path", "mixture", "validation", "name", "split", "revision")]


def help_of(kind: type, command: str) -> list[str]:
    """The keys of a command that reads a model, and where those of train are listed."""
    return [*describe_keys(kind, command), "", "Keys of train choose mesh, algorithms and data: mstrain train --help."]


@dataclasses.dataclass(frozen=True)
class Source:
    """What a command reads: exactly one of `run_dir` and `init`. Raises ValueError otherwise."""

    run_dir: str | None = None
    """Folder of the run whose newest checkpoint is read."""
    init: str | None = None
    """Folder of a model in Hugging Face's format, instead of run_dir."""
    step: int | None = None
    """Step of the checkpoint; null takes the newest."""

    def __post_init__(self):
        if self.step is not None and self.run_dir is None:
            raise ValueError("step= names a checkpoint of a run. Type run_dir=RUN_DIR, or remove it.")
        if (self.run_dir is None) == (self.init is None):
            given = "run_dir= is missing" if self.run_dir is None else "run_dir= and init= are both given"
            raise ValueError(f"{given}. Type run_dir=RUN_DIR, or init=FOLDER for a model in Hugging Face's format.")

    def __str__(self) -> str:
        return f"run_dir={self.run_dir}" if self.init is None else f"init={self.init}"

    def config(self, given: list[str]) -> RunConfig:
        """The configuration of the run, or the defaults for the folder, with the keys of train that are `given`.

        Raises ValueError without a record or a model, and for a key that is not one of train.
        """
        if self.run_dir is not None:
            return run_config(self.run_dir, given)
        folder = argument_of("init", self.init, Path())
        return train.load_config([f"init={folder}", f"run_dir={folder}", *given])  # nothing is written there

    def parameters(self, job: Job, module: Transformer):
        """(name for people, parameters in the layout of `module`)."""
        if self.init is not None:
            return str(self), Folder(self.init, module.model.mtp_layers).parameters(module)
        from mstrain.training.resume import newest_parameters

        assert self.run_dir is not None
        step, params = newest_parameters(job, module, str(self), Path(self.run_dir), self.step)
        return f"{self.run_dir}, step {step}", params


def source_config(kind: type, arguments: list[str]) -> tuple[Any, list[str]]:
    """The config of a command from those of `arguments` that are its keys, and the others, which are keys of train.

    Raises ValueError for a key of neither before any other mistake.
    """
    check_keys((kind, RunConfig), arguments)
    return own_config(kind, arguments)


def check_new_file(key: str, name: str | None) -> None:
    """Raises ValueError when the file that `key` names exists, or its folder does not."""
    if name is None:
        return
    if Path(name).exists():
        raise ValueError(f"{key}={name} exists. Remove it, or type another {key}=.")
    if not Path(name).absolute().parent.is_dir():
        raise ValueError(f"{key}={name}: the folder does not exist. Make it, or type another {key}=.")


def run_config(run_dir: str, given: list[str]) -> RunConfig:
    """The recorded configuration of `run_dir` with the keys of train that are `given` instead.

    `data=` replaces all recorded keys of data; `data.path=` and `data.mixture=` replace those of the recorded path.
    Other data are read with the tokenizer of the run, not with one that is trained on them.

    Raises ValueError without a record, and for a key that is not one of train.
    """
    if read(Path(run_dir)) is None:
        raise ValueError(f"run_dir={run_dir} has no {RUN}: no run has saved there. Type the run_dir of a run.")
    keys = {argument.partition("=")[0] for argument in given}
    replaced = {*keys, *(_OF_PATH if keys & {"data.path", "data.mixture"} else ())}
    replaced |= {"vocab_size"} if "tokenizer" in keys else set()
    recorded = [(r.partition("=")[0], r) for r in recorded_overrides([f"run_dir={run_dir}"])]
    kept = [r for key, r in recorded if key not in replaced and not ("data" in keys and _is_data(key))]
    config = compose(RunConfig, "config", [f"run_dir='{run_dir}'", *given, *kept])
    config = dataclasses.replace(config, optimizer=config.optimizer.for_width(config.model.width))
    other_data = any(key == "data" or _is_data(key) and key != "data.cache_dir" for key in keys)
    copy = tokenizer_file(Path(run_dir))
    if config.tokenizer == "bpe" and other_data and copy and "tokenizer" not in keys:
        config = dataclasses.replace(config, tokenizer=str(copy), vocab_size=None)
    names = {key.partition(".")[0] for key in keys} & {"data", "seq", "batch"}  # may differ when reading
    return dataclasses.replace(config, allow=" ".join([config.allow or "", *sorted(names)]).strip() or None)


def load_model(path: str | Path, keys: list[str]):
    """(model, params) of `mstrain.load`."""
    from mstrain.training.prepare import build_module

    is_run = read(Path(path)) is not None
    source = Source(run_dir=str(path)) if is_run else Source(init=str(path))
    config = source.config(on_one_device(keys) if is_run else on_one_device(["data=synthetic", *keys]))
    module = build_module(config, ALONE)[0]
    return module, source.parameters(ALONE, module)[1]


def on_one_device(keys: list[str]) -> list[str]:
    """The keys of train with mesh=1x1 where they name no mesh."""
    return keys if any(key.startswith("mesh=") for key in keys) else ["mesh=1x1", *keys]


def _is_data(key: str) -> bool:
    return key.startswith("data.")
