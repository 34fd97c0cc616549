"""Reads the fields of a config dataclass: keys, types, defaults, and the documentation under each field."""

import ast
import dataclasses
import functools
import inspect
import math
import re
import textwrap
import types
import typing
from collections.abc import Callable
from typing import Any, TypeGuard

import yaml

Explain = Callable[[str, Any], str | None]
NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", type(None): "null"}


def is_config(hint: Any) -> TypeGuard[type]:
    """Whether a type hint is a config: a dataclass, not an instance of one."""
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def known_keys(kind: type) -> list[str]:
    """Every key of the dataclass `kind` that a command line may set: nested ones as `group.key`."""
    keys, hints = [], typing.get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(kind)):
        if is_config(hints[name]):
            keys += [name] * hasattr(hints[name], "SHORTHAND")
            keys += [f"{name}.{key}" for key in known_keys(hints[name])]
        else:
            keys.append(name)
    return keys


def build(kind: type, values: dict, path: str = "") -> Any:
    """A dataclass from nested plain values, each checked against its annotation.

    Raises ValueError for an unknown key, a missing value or a value of another type, with what to type instead.
    """
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    unknown = set(values) - set(names)
    if unknown:
        raise ValueError(f"{path}{min(unknown)} is not a key. Known: {', '.join(path + name for name in names)}.")
    for field in dataclasses.fields(kind):
        if is_required(field) and values.get(field.name) is None:
            raise ValueError(f"{path}{field.name}= is missing. Type {path}{field.name}=VALUE (--help lists the keys).")
    explain = getattr(kind, "explain", lambda key, value: None)
    return kind(**{name: _typed(hints[name], value, path + name, explain) for name, value in values.items()})


def own_config(kind: type, arguments: list[str]) -> tuple[Any, list[str]]:
    """The dataclass `kind` from those of `arguments` that are its keys, and the others. ValueError as in `build`."""
    hints, own, others = typing.get_type_hints(kind), {}, []
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if equals and key in hints:
            own[key] = _read(hints[key], value)
        else:
            others.append(argument)
    return build(kind, own), others


def _read(hint: Any, text: str) -> Any:
    """The value of a typed `text`; of a key for text, the text as it is, or None for null."""
    kinds = set(types_of(hint))
    if kinds <= {str, type(None)}:
        return None if text == "null" and type(None) in kinds else text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _typed(hint: Any, value: Any, path: str, explain: Explain) -> Any:
    if is_config(hint):
        if not isinstance(value, dict):
            first = dataclasses.fields(hint)[0].name
            raise ValueError(f"{path}={value!r} must be set by its keys, such as {path}.{first}=.")
        return build(hint, value, path + ".")
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        return tuple(_typed(typing.get_args(hint)[0], item, path, explain) for item in value)
    kinds = types_of(hint)
    if value is None and type(None) in kinds:
        return None
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else None
    if float in kinds and number is not None and math.isfinite(number):
        return float(number)
    if str in kinds and number is not None:
        return str(number)
    if type(value) in kinds and (number is None or math.isfinite(number)):
        return value
    if advice := explain(path, value):
        raise ValueError(advice)
    if int in kinds and number is not None and math.isfinite(number) and number == int(number):
        raise ValueError(f"{path}={value} is a floating-point number. Type {path}={int(number)}.")
    wanted = " or ".join(NAMES.get(kind, "a list, such as '[A,B]'") for kind in kinds)
    raise ValueError(f"{path}={value!r} is not {wanted}.")


def types_of(hint) -> tuple[type, ...]:
    """The members of a union, or the one type."""
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def is_required(field: dataclasses.Field) -> bool:
    """Whether a field has no default, so that its key must be typed."""
    return field.default is field.default_factory is dataclasses.MISSING


def default_of(field: dataclasses.Field):
    """The default of a field: a nested dict for a config, None where it must be given."""
    if dataclasses.is_dataclass(field.type):
        return {nested.name: default_of(nested) for nested in dataclasses.fields(field.type)}
    return None if field.default is dataclasses.MISSING else field.default


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The documentation of each field of the dataclass `kind`, as one line of text; inherited fields included.

    It is the string under the field, or the field's entry below `Attributes:` in the class's docstring.
    """
    docs = _attributes(kind.__doc__ or "")
    for base in reversed(kind.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError):  # made at run time: no source
            continue
        assert isinstance(tree.body[0], ast.ClassDef)
        body = tree.body[0].body
        for node, below in zip(body, body[1:]):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and (doc := _text(below)):
                docs[node.target.id] = doc
    return docs


def _text(node: ast.stmt) -> str | None:
    """The text of a string literal that is a statement, on one line; None for other statements."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return re.sub(r"\s+", " ", node.value.value).strip()
    return None


def _attributes(docstring: str) -> dict[str, str]:
    """Entries such as `name: text` or `first, second: text` below `Attributes:`, continued by deeper indentation."""
    docs, names, indent = {}, [], None
    for line in docstring.partition("Attributes:")[2].splitlines():
        depth = len(line) - len(line.lstrip())
        entry = re.match(r"\s+(\w+(?:, \w+)*): (.*)", line)
        if entry and indent in (None, depth):
            indent, names = depth, entry[1].split(", ")
            docs.update(dict.fromkeys(names, entry[2].strip()))
        elif line.strip() and indent is not None and depth > indent:
            docs.update({name: f"{docs[name]} {line.strip()}" for name in names})
        elif line.strip():
            names, indent = [], None
    return docs
