"""JSON files that people hand in."""

import json
from pathlib import Path


def read_json(path: str | Path, what: str):
    """The document in `path`; `what` names it in messages.

    Raises ValueError, one message for each, for a file that is missing, unreadable, not UTF-8, not JSON, nested too
    deeply, or with numbers of thousands of digits.
    """
    try:
        return parse_json(Path(path).read_text(encoding="utf-8"), f"{what} {path}")
    except OSError as error:
        raise ValueError(f"{what} {path}: {error.strerror}. Type the name of a file that can be read.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{what} {path} is not a UTF-8 text.") from None


def parse_json(text: str, what: str):
    """The document in `text`; raises ValueError as `read_json`."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply. Type the name of a file of another form.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{what} is not JSON: line {error.lineno}: {error.msg}.") from None
    except ValueError:  # CPython refuses to convert integers of more than 4,300 digits
        raise ValueError(f"{what} has a number of thousands of digits.") from None
