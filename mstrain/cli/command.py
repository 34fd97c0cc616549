"""Runs a command: parses its options and prints a ValueError as one message."""

import argparse
import dataclasses
import os
import signal
import sys
import typing
from collections.abc import Callable
from pathlib import Path

import mstrain
from mstrain.cli.compose import config_dir, to_yaml
from mstrain.cli.help import OPTIONS
from mstrain.cli.sweep import Results, plan_sweep, run_sweep
from mstrain.job.exit_codes import SIGNALED, code_of


@dataclasses.dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
      name: as it is typed.
      main: key=value arguments to exit code. Raises ValueError for invalid arguments.
      summary: what it does, one line.
      config: key=value arguments to the composed, checked config; what `--cfg job` prints.
      help_lines: key=value arguments to the lines of --help.
      results: what a sweep shows of finished runs.
      folder: the key of the folder that a run writes to; None for a command that writes no files.
    """

    name: str
    main: Callable[[list[str]], int]
    summary: str = ""
    config: Callable[[list[str]], typing.Any] | None = None
    help_lines: Callable[[list[str]], list[str]] = lambda pairs: []
    results: Results = Results()
    folder: str | None = "run_dir"


def run_command(command: Command, arguments: list[str] | None = None) -> typing.NoReturn:
    """Runs `command` and exits. A ValueError becomes one message and exit code 2 (75 where a restart may help)."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        options, pairs = _options(words)
        with config_dir(options.config_dir):
            sys.exit(_run(command, options, pairs))
    except ValueError as error:
        print(f"{command.name}: {error}", file=sys.stderr)
        sys.exit(code_of(error))
    except KeyboardInterrupt:
        sys.exit(SIGNALED + signal.SIGINT)


def _run(command: Command, options: argparse.Namespace, pairs: list[str]) -> int:
    if options.version:
        print(f"mstrain {mstrain.__version__}")
        return 0
    if options.help:
        usage = f"mstrain {command.name} [key=value ...], or python -m mstrain {command.name} [key=value ...]"
        return _show("\n".join([command.summary, "", usage, "", OPTIONS, "", *command.help_lines(pairs)]))
    if not (options.cfg or options.multirun):
        return command.main(pairs)
    if command.config is None:
        raise ValueError(f"{command.name} has no configuration to print or vary.")
    if options.multirun:
        sweep = plan_sweep(pairs, command.config, command.folder)
        if not options.cfg:
            return run_sweep(command.name, sweep, options.config_dir, command.results)
    configs = [run.config for run in sweep] if options.multirun else [command.config(pairs)]
    return _show("---\n".join(map(to_yaml, configs)).removesuffix("\n"))


def _show(text: str) -> int:
    """Prints a text that `| head` may cut; returns the exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more when it exits
        return SIGNALED + signal.SIGPIPE
    return 0


def _options(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = _Parser(add_help=False, allow_abbrev=False)
    for names in (("-h", "--help"), ("-m", "--multirun"), ("--version",)):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("-c", "--cfg", choices=["job"])
    parser.add_argument("-cd", "--config-dir", type=Path)
    options, pairs = parser.parse_known_args(words)
    if unknown := [word for word in pairs if word.startswith("-")]:
        raise ValueError(f"Unknown option {unknown[0]}. Write keys as key=value (--help lists options and keys).")
    return options, pairs


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise ValueError(f"{message}. --help lists the options.")
