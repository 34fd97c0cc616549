"""From a command line to a checked dataclass, and from an error to a message. Knows no field of any config.

Hydra composes the files under conf/ with the command line; frozen dataclasses decide. Each message ends with what to
type instead.
"""

import dataclasses
import difflib
import re
import sys
import types
import typing
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mstrain.checks import one_of

CONF = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("model", "data", "parallel")


def compose(kind: type, name: str, arguments: list[str]) -> Any:
    """The dataclass `kind` from conf/NAME.yaml and command-line overrides; raises ValueError with the fix."""
    _check_keys(kind, arguments)
    schema = {field.name: _defaults(field.type) if dataclasses.is_dataclass(field.type) else _default(field)
              for field in dataclasses.fields(kind)}  # fmt: skip
    ConfigStore.instance().store(name="schema", node=schema)
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra.compose(name, overrides=arguments)
        values = OmegaConf.to_container(composed, resolve=True)
    except (hydra.errors.HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"Cannot read the command line: {str(error).splitlines()[0]}") from None
    return build(kind, values)


def build(kind: type, values: dict, path: str = "") -> Any:
    """A dataclass from nested plain values, each checked against its annotation."""
    hints = typing.get_type_hints(kind)
    unknown = set(values) - set(hints)
    if unknown:
        raise ValueError(f"{path}{min(unknown)} is not a key. Known: {', '.join(path + name for name in hints)}.")
    for field in dataclasses.fields(kind):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and values.get(field.name) is None:
            raise ValueError(f"{path}{field.name}= is missing. Type {path}{field.name}=VALUE (--help lists the keys).")
    return kind(**{name: _typed(hints[name], value, path + name) for name, value in values.items()})


def known_keys(kind: type) -> list[str]:
    """Every key a command line may set."""
    keys = groups_of(kind)
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            keys += [f"{name}.{field.name}" for field in dataclasses.fields(hint)]
        else:
            keys.append(name)
    return keys


def groups_of(kind: type) -> list[str]:
    """The keys of `kind` that choose a file under conf/."""
    hints = typing.get_type_hints(kind)
    return [group for group in GROUPS if dataclasses.is_dataclass(hints.get(group))]


def choices(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


def _check_keys(kind: type, arguments: list[str]) -> None:
    """Unknown keys and group members, with suggestions that Hydra would not make."""
    keys, groups, given = known_keys(kind), groups_of(kind), set()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
            raise ValueError(f"Cannot read {argument!r}. Write key=value, such as mesh=2x4 (--help lists the keys).")
        if key not in keys:
            near = difflib.get_close_matches(key, keys, 1)
            hint = f"Did you mean {near[0]}?" if near else f"Known keys: {', '.join(keys)}."
            raise ValueError(f"There is no key {key!r}. {hint}")
        if key in given:
            raise ValueError(f"{key} is given twice. Type it once.")
        given.add(key)
        if key in groups:
            one_of(key, value, choices(key))


def _typed(hint, value, path):
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise ValueError(f"{path}={value!r} must be set by its keys, such as {path}.{dataclasses.fields(hint)[0].name}=.")
        return build(hint, value, path + ".")
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(typing.get_args(hint)[0], item, path) for item in value)
    kinds = _kinds(hint)
    if value is None and type(None) in kinds:
        return None
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if str in kinds and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if type(value) in kinds:
        return value
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}
    wanted = " or ".join(names.get(kind, "a list, such as '[A,B]'") for kind in kinds)
    raise ValueError(f"{path}={value!r} is not {wanted}.")


def _kinds(hint) -> tuple[type, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _defaults(kind: type) -> dict:
    return dataclasses.asdict(kind())


def _default(field: dataclasses.Field):
    """The default of a field; None where it has none and must be given."""
    return None if field.default is dataclasses.MISSING else field.default


def run_command(name: str, main, help_lines=lambda _: []) -> typing.NoReturn:
    """Runs `main(arguments)` as a command: a `ValueError` is one message and exit code 2, anything else a traceback.

    `help_lines(arguments)` gives what --help prints.
    """
    arguments = sys.argv[1:]
    try:
        if "--help" in arguments or "-h" in arguments:
            rest = [argument for argument in arguments if argument not in ("--help", "-h")]
            print(f"python {name}.py [key=value ...]\n\n" + "\n".join(help_lines(rest)))
            sys.exit(0)
        sys.exit(main(arguments))
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def describe_keys(kind: type) -> list[str]:
    """The keys of `kind` for --help: groups, nested keys with their defaults, then the attributes it documents."""
    lines = [f"{group}=  one of {', '.join(choices(group))}" for group in groups_of(kind)]
    for name, hint in typing.get_type_hints(kind).items():
        if dataclasses.is_dataclass(hint):
            fields = ", ".join(f"{f.name}={f.default}" for f in dataclasses.fields(hint))
            lines.append(f"{name}.  {fields}")
    docs = (kind.__doc__ or "").partition("Attributes")[2]
    return [*lines, "", *(line.strip() for line in docs.splitlines()[1:])]
