"""Hydra composes the files of conf/ (and of --config-dir) with the command line; frozen dataclasses check the
result."""

import contextlib
import contextvars
import dataclasses
import difflib
import re
import typing
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mstrain.checks import one_of
from mstrain.cli.fields import build, default_of, known_keys
from mstrain.conf_folder import CONF

EXPERIMENT = "experiment"
_added: contextvars.ContextVar[Path | None] = contextvars.ContextVar("config_dir", default=None)


@contextlib.contextmanager
def config_dir(folder: Path | None):
    """Inside, `folder`'s groups are found beside those of conf/. Raises ValueError when it is not a folder."""
    if folder is not None and not folder.is_dir():
        raise ValueError(f"--config-dir {folder} is not a folder. Type one that holds groups, such as {folder}/model/.")
    token = _added.set(folder and folder.resolve())
    try:
        yield
    finally:
        _added.reset(token)


def compose(kind: type, name: str, arguments: list[str]) -> Any:
    """The dataclass `kind` from NAME.yaml and command-line overrides; raises ValueError with the fix."""
    return build(kind, compose_values(kind, name, arguments))


def compose_values(kind: type, name: str, arguments: list[str]) -> dict:
    """Values by key, as `compose` but without the checks of `kind`; None for a required key that is not given."""
    overrides = _checked(kind, arguments)
    schema = {field.name: default_of(field) for field in dataclasses.fields(kind)}
    ConfigStore.instance().store(name="schema", node=schema)
    if folder := _added.get():
        overrides.append(f"hydra.searchpath=['file://{folder}']")
    try:
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            composed = hydra.compose(name, overrides=overrides)
        values = OmegaConf.to_container(composed, resolve=True)
        assert isinstance(values, dict)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"Cannot read the command line: {str(error).splitlines()[0]}") from None
    return values


def to_yaml(config) -> str:
    """A config as YAML that `build` reads back."""
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def groups_of(kind: type) -> list[str]:
    """The keys of `kind` that choose a file: folders of configuration with the name of a nested config."""
    hints = typing.get_type_hints(kind)
    return [name for name, hint in hints.items() if dataclasses.is_dataclass(hint) and choices(name)]


def choices(group: str) -> list[str]:
    """Names of the files of a group, in conf/ and in --config-dir."""
    return sorted({path.stem for folder in (CONF / group, *added(group)) for path in folder.glob("*.yaml")})


def added(group: str) -> list[Path]:
    """The folder of a group in --config-dir, if there is one."""
    folder = _added.get()
    return [folder / group] if folder else []


def sweep_values(argument: str) -> list[str] | None:
    """The values of a Hydra sweep such as `a=1,2` or `a=range(1,4)`; None when `argument` has one value."""
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:  # a value with characters of Hydra's grammar is not a sweep
        return None
    return list(override.sweep_string_iterator()) if override.is_sweep_override() else None


def _checked(kind: type, arguments: list[str]) -> list[str]:
    """The overrides as Hydra takes them. Unknown keys and choices get suggestions that Hydra would not make."""
    keys, groups, given, overrides = [*known_keys(kind), *groups_of(kind)], groups_of(kind), set(), []
    for argument in arguments:
        key, value = _parts(argument)
        if key == EXPERIMENT and EXPERIMENT not in keys and choices(EXPERIMENT):
            one_of(key, value, choices(EXPERIMENT))
            overrides.append(f"+{EXPERIMENT}={value}")
            continue
        if key not in keys:
            raise ValueError(_unknown(kind, key, value, keys))
        key = _expand(kind, key, value, groups)
        if key in given:
            raise ValueError(f"{key} is given twice. Type it once.")
        given.add(key)
        if key in groups:
            one_of(key, value, choices(key))
        elif sweep_values(argument):
            advice = _explain(kind, key, value)
            raise ValueError(advice or f"{argument} lists several values. Type -m to run each of them.")
        overrides.append(_quoted(key, value))
    return overrides


def check_keys(kinds: tuple[type, ...], arguments: list[str]) -> None:
    """Raises ValueError for an argument whose key none of the configs `kinds` has, as `compose` of the last one."""
    keys = [EXPERIMENT, *(key for kind in kinds for key in (*known_keys(kind), *groups_of(kind)))]
    for argument in arguments:
        key, value = _parts(argument)
        if key not in keys:
            raise ValueError(_unknown(kinds[-1], key, value, keys))


def _parts(argument: str) -> tuple[str, str]:
    """Key and value of an argument."""
    key, equals, value = argument.partition("=")
    key = key.removeprefix("+") if key == "+" + EXPERIMENT else key
    if key.startswith("+"):
        raise ValueError(f"{argument}: every key has a default, so none is added. Type {argument.lstrip('+')}.")
    if key.startswith("~"):
        raise ValueError(f"{argument}: keys cannot be removed. Type {key[1:]}=VALUE (--help lists the keys).")
    if not equals or not re.fullmatch(r"[A-Za-z_][\w.]*", key):
        raise ValueError(f"Cannot read {argument!r}. Write key=value, such as mesh=2x4 (--help lists the keys).")
    return key, value


def _quoted(key: str, value: str) -> str:
    """An override that Hydra reads: a value such as `runs/a=1;b` is quoted, unless it is malformed quoting itself."""
    try:
        OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException:
        if not set(value) & set("'\"${}[]\\"):
            return f"{key}='{value}'"
    return f"{key}={value}"


def _expand(kind: type, key: str, value: str, groups: list[str]) -> str:
    """`parallel=wang` is short for `parallel.algorithm=wang` where the nested config defines this."""
    nested = typing.get_type_hints(kind).get(key)
    shorthand = getattr(nested, "SHORTHAND", None)
    if key in groups or shorthand is None:
        return key
    field, allowed = shorthand
    one_of(key, value, allowed)
    return f"{key}.{field}"


def _unknown(kind: type, key: str, value: str, keys: list[str]) -> str:
    if advice := _explain(kind, key, value):
        return f"Unknown key {key!r}. {advice}"
    near = difflib.get_close_matches(key, keys, 1)
    return f"Unknown key {key!r}. " + (f"Did you mean {near[0]}?" if near else "--help lists the keys.")


def _explain(kind: type, key: str, value: str) -> str | None:
    """The config's advice on a key or value of another framework; None without any."""
    explain = getattr(kind, "explain", None)
    return explain(key, value) if explain else None
