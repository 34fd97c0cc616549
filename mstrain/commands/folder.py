"""The keys of train that follow from `init=FOLDER`: architecture and tokenizer of a Hugging Face folder."""

import dataclasses
from pathlib import Path
from typing import Any

from mstrain.cli import compose
from mstrain.data.tokenizers import tokenizer_file
from mstrain.models.config import ModelConfig
from mstrain.models.hub.config import differing_fields
from mstrain.models.hub.folder import Folder
from mstrain.training.config import RunConfig
from mstrain.training.identity import flat
from mstrain.training.record import argument_of, read, recorded_overrides

MODEL = "model."


def init_overrides(arguments: list[str]) -> list[str]:
    """Arguments for the model and the tokenizer of `init=FOLDER` among `arguments`, without those that are given.

    A run that has started from this folder has them in its record, so that the folder is not needed again. Raises
    ValueError for a folder that cannot be used, and for keys of the model that differ from it.
    """
    given = {key: value.strip("'\"") for key, _, value in (argument.partition("=") for argument in arguments)}
    if given.get("init") in (None, "", "null"):
        return []
    run_dir = given.get("run_dir", "")
    record = read(Path(run_dir)) if run_dir else None
    if record and record.config.get("init") == given["init"]:
        taken = recorded_overrides([f"run_dir={run_dir}"])
        wanted = [one for one in taken if one.startswith((MODEL, "tokenizer="))]
        return [one for one in wanted if one.partition("=")[0] not in given and "model" not in given]
    folder = Folder(given["init"])
    _check_model(arguments, given, folder)
    fields = flat(folder.model)
    found: dict[str, Any] = {MODEL + name: value for name, value in fields.items() if MODEL + name not in given}
    if "tokenizer" not in given and given.get("data") != "synthetic":
        file = tokenizer_file(folder.path)
        if file is None:
            raise ValueError(
                f"init={given['init']} has no tokenizer.json or tokenizer.model. Type tokenizer= of the model."
            )
        found["tokenizer"] = str(file)
    return [f"{key}={argument_of(key, value, folder.path)}" for key, value in found.items()]


def _check_model(arguments: list[str], given: dict[str, str], folder: Folder) -> None:
    """Raises ValueError, with all differences, when the given keys of the model are not those of `folder`."""
    names = {key.removeprefix(MODEL) for key in given if key.startswith(MODEL)}
    if not names and "model" not in given:
        return
    words = [word for word in arguments if word.partition("=")[0].partition(".")[0] == "model"]
    if "model" in given:
        typed = compose(RunConfig, "config", words).model
    else:
        typed = compose(RunConfig, "config", [*_fields(folder.model, names, folder.path), *words]).model
    typed = dataclasses.replace(typed, vocab_size=typed.vocab_size or folder.model.vocab_size)
    if different := differing_fields(typed, folder.model):
        lines = [f"  {MODEL}{name}: {one} typed, {other} in the folder" for name, (one, other) in different.items()]
        raise ValueError(
            "\n".join([f"init={given['init']} is another model:", *lines])
            + "\nRemove these keys; the architecture comes from config.json."
        )


def _fields(model: ModelConfig, but: set[str], place: Path) -> list[str]:
    values = flat(model)
    return [f"{MODEL}{key}={argument_of(key, value, place)}" for key, value in values.items() if key not in but]
