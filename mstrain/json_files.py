"""JSON files that people hand in, and those written for them and for other processes."""

import functools
import json
import secrets
from pathlib import Path

DIGITS = 18  # of an integer: larger ones are not measurements, and overflow where they become floats


def read_json(path: str | Path, what: str, digits: int = DIGITS):
    """The document in `path`; `what` names it in messages.

    Raises ValueError, one message for each, for a file that is missing, unreadable, not UTF-8, not JSON, nested too
    deeply, or with whole numbers of more than `digits` digits.
    """
    try:
        return parse_json(read_text(path, what), digits)
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} {path}: line {error.lineno}: not JSON ({error.msg}).") from None


def read_text(path: str | Path, what: str) -> str:
    """The text in `path`; raises ValueError, with `what` it is, for a file that is missing or not UTF-8."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}. Type the name of a file that can be read.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path} is not a UTF-8 text.") from None


def parse_json(text: str, digits: int = DIGITS):
    """The document in `text`; raises json.JSONDecodeError for whatever cannot be read."""
    try:
        return json.loads(text, parse_int=functools.partial(_integer, most=digits))
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", "", 0) from None


def _integer(digits: str, most: int) -> int:
    if len(digits.lstrip("-")) > most:
        raise json.JSONDecodeError(f"a whole number of {len(digits)} digits", "", 0)
    return int(digits)


def write_json(document, path: str | Path) -> None:
    """Writes a document for people and other programs, UTF-8."""
    Path(path).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def replace_text(path: Path, text: str) -> None:
    """Writes `path` in one step: other processes read the old text or the new one. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
