"""The option `--golden DIR` of the suite, and what the folder holds.

A plugin and not part of a conftest.py: pytest takes the DIR of an option that it does not know for a path of tests, and
then does not load tests/conftest.py. pytest.ini loads this file before the command line is read. If DIR is outside the
checkout, pytest does not read pytest.ini either; `golden_option.dist-info` loads this file then, which starts pytest
again with `--golden=DIR`, a spelling that pytest does not take for a path.
"""

import json
import os
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "golden"
FILES = ("metis.json", "distir.json", "published.json")


def pytest_addoption(parser):
    arguments = sys.argv[1:]
    if "--golden" in arguments[:-1] and Path(sys.argv[0]).parent.name == "pytest":
        at = arguments.index("--golden")
        arguments[at : at + 2] = [f"--golden={arguments[at + 1]}"]
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    parser.addoption(
        "--golden",
        metavar="DIR",
        help=f"folder with any of {', '.join(FILES)}; every case in it is a test, and no other test runs unless its "
        "file is given (default: tests/golden)",
    )


def pytest_configure(config):
    folder = golden_folder(config)
    if not any((folder / name).is_file() for name in FILES):
        raise pytest.UsageError(f"--golden {folder}: the folder holds none of {', '.join(FILES)}")
    if config.getoption("--golden"):
        given = config.args if config.args_source is config.ArgsSource.ARGS else [str(FOLDER.parent)]
        config.args[:] = [test for path in given for test in golden_tests(path)]


def golden_tests(path: str) -> list[str]:
    """The files below a folder whose tests are golden cases; the path itself if it is a file, or has none."""
    return sorted(map(str, Path(path).rglob("test_golden.py"))) or [path]


def golden_folder(config) -> Path:
    return Path(config.getoption("--golden") or FOLDER).expanduser()


def golden(config, name: str) -> dict:
    """The document `name` of the folder; empty when the folder does not hold it."""
    path = golden_folder(config) / name
    return json.loads(path.read_text()) if path.is_file() else {}


def parametrize(metafunc, argument: str, cases: list, name) -> None:
    """One test per case of a golden file; `name(number, case)` is its id."""
    if argument in metafunc.fixturenames:
        ids = [str(name(number, case)) for number, case in enumerate(cases)]
        metafunc.parametrize(argument, cases, ids=ids)


def differences(found: dict, expected: dict, tolerance: float) -> list[str]:
    """What disagrees under the names that both have; floats within the relative tolerance, nested values too.

    AssertionError when they share no name: a case that nothing compares must not pass.
    """
    common = [name for name in expected if name in found]
    assert common, f"nothing to compare: expected {', '.join(expected)}, found {', '.join(found)}"
    return [
        f"{name}: {found[name]} instead of {expected[name]}"
        for name in common
        if not agree(found[name], expected[name], tolerance)
    ]


def agree(found, expected, tolerance: float) -> bool:
    if isinstance(expected, dict):
        return isinstance(found, dict) and all(
            name in found and agree(found[name], value, tolerance) for name, value in expected.items()
        )
    if isinstance(expected, list):
        return (
            isinstance(found, list | tuple)
            and len(found) == len(expected)
            and all(agree(*pair, tolerance) for pair in zip(found, expected))
        )
    if isinstance(expected, float) and isinstance(found, int | float):
        return abs(found - expected) <= tolerance * abs(expected)
    return found == expected
