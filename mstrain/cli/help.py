"""The output of --help: every key with its type, default and documentation."""

import dataclasses
import textwrap
import typing

from omegaconf import OmegaConf

from mstrain.cli.compose import EXPERIMENT, choices, compose, compose_values, groups_of
from mstrain.cli.fields import default_of, field_docs, is_config, is_required, types_of
from mstrain.conf_folder import CONF

WIDTH = 110
TYPES = {int: "int", float: "float", bool: "true|false", str: "text", type(None): "null"}
OPTIONS = """Options:
  -h, --help         print this page
  --cfg job          print the composed configuration and exit
  --config-dir DIR   also find groups in DIR: DIR/model/mine.yaml is model=mine
  -m, --multirun     run every combination of comma-separated values, each in its own folder
  --version          print the version"""


def describe_keys(kind: type, name: str, experiments: bool = True) -> list[str]:
    """The keys of the config `kind`, composed from NAME.yaml: files to choose from, then every key by section.

    `experiments`: whether the command takes the files of conf/experiment/.
    """
    hints, defaults = typing.get_type_hints(kind), defaults_of(kind, name)
    groups = groups_of(kind)
    lines = ["Files to choose from (conf/):"] if groups else []
    for group in groups:
        lines += _wrapped(f"{group}=NAME", " ".join(choices(group)))
    if groups and experiments and choices(EXPERIMENT):
        lines += _wrapped(f"{EXPERIMENT}=NAME", " ".join(choices(EXPERIMENT)))
    nested = {name: hint for name, hint in hints.items() if is_config(hint)}
    lines += ["", "Keys, each with its default:", *_section(kind, "", defaults, skip=nested)]
    for group, hint in nested.items():
        lines += _group(group, hint, defaults[group])
    return lines


def _group(path: str, kind: type, defaults: dict) -> list[str]:
    hints = typing.get_type_hints(kind)
    inner = {name: hint for name, hint in hints.items() if is_config(hint)}
    lines = ["", f"{path}: {_first_line(kind)}", *_section(kind, path + ".", defaults, skip=inner)]
    for name, hint in inner.items():
        lines += _group(f"{path}.{name}", hint, defaults[name])
    return lines


def defaults_of(kind: type, name: str) -> dict:
    """The defaults of a command, those of its file in conf/ included; None for a required key."""
    try:
        return dataclasses.asdict(compose(kind, name, []))
    except ValueError:  # a key is required, or the command has no file
        if (CONF / f"{name}.yaml").is_file():
            return compose_values(kind, name, [])
        return {field.name: default_of(field) for field in dataclasses.fields(kind)}


def _section(kind: type, prefix: str, defaults: dict, skip=()) -> list[str]:
    docs, hints, lines = field_docs(kind), typing.get_type_hints(kind), []
    for field in (field for field in dataclasses.fields(kind) if field.name not in skip):
        name = field.name
        allowed = " or ".join(TYPES.get(kind, "list") for kind in types_of(hints[name]))
        head = f"{name}=VALUE (required)" if is_required(field) else f"{name}={shown(defaults[name])}"
        lines += _wrapped(prefix + head, f"({allowed}) {docs.get(name, '')}".rstrip())
    return lines


def shown(value) -> str:
    """A value as it is typed."""
    return OmegaConf.to_yaml(OmegaConf.create([value])).removeprefix("- ").strip()


def _wrapped(head: str, text: str) -> list[str]:
    body = textwrap.wrap(text, WIDTH - 6, break_on_hyphens=False)
    return [f"  {head}", *("      " + line for line in body)]


def _first_line(kind: type) -> str:
    return (kind.__doc__ or "").strip().split("\n\n")[0].replace("\n", " ").strip()
