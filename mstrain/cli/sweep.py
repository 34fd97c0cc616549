"""--multirun: runs every combination of values in its own process and folder; prints a table and draws the curves."""

import dataclasses
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mstrain.cli.compose import sweep_values
from mstrain.display.tables import write_csv
from mstrain.job.exit_codes import FINISHED, SIGNALED, STOPPED
from mstrain.job.signals import handled

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclasses.dataclass(frozen=True)
class SweptRun:
    """One run of a sweep.

    Attributes:
      chosen: the values of the swept keys, as KEY=VALUE.
      arguments: all arguments.
      config: the composed, checked config.
      folder: where it writes; None if the command writes no files.
    """

    chosen: str
    arguments: list[str]
    config: Any
    folder: Path | None


@dataclasses.dataclass(frozen=True)
class Results:
    """What a sweep shows of its finished runs.

    Attributes:
      columns: a run's folder to {column: value} of its row.
      picture: {the swept keys of a run: its folder} to a PNG of all of them; None without a picture.
    """

    columns: Callable[[Path], dict[str, str]] = lambda folder: {}
    picture: Callable[[dict[str, Path]], bytes | None] = lambda runs: None


def plan_sweep(pairs: list[str], config: Callable, folder_key: str | None) -> list[SweptRun]:
    """Every combination of swept values, composed and checked.

    Args:
      pairs: key=value arguments; at least one has several values.
      config: arguments to config.
      folder_key: each run writes to a folder of its own below the value of this key, KEY=VALUE_KEY=VALUE, so that the
        same sweep resumes where it stopped. None for a command that writes no files.

    Raises:
      ValueError: nothing is swept, a combination is not valid, or two runs would write to the same folder.
    """
    values = [sweep_values(pair) for pair in pairs]
    if not any(values):
        raise ValueError("--multirun has nothing to vary. Separate values by commas, such as parallel=meshslice,wang.")
    choices = [
        [f"{pair.partition('=')[0]}={value}" for value in several] if several else [pair]
        for pair, several in zip(pairs, values, strict=True)
    ]
    swept = [index for index, several in enumerate(values) if several]
    runs = []
    for arguments in itertools.product(*choices):
        arguments, chosen, folder = list(arguments), [arguments[index] for index in swept], None
        if folder_key:
            folder = Path(getattr(config(arguments), folder_key))
            own = [pair for pair in chosen if not pair.startswith(folder_key + "=")]
            folder = folder / _folder_name(own) if own else folder
            arguments = [pair for pair in arguments if not pair.startswith(folder_key + "=")]
            arguments.append(f"{folder_key}={folder}")
        runs.append(SweptRun(" ".join(chosen), arguments, config(arguments), folder))
    if folder_key and len({run.folder for run in runs}) < len(runs):
        raise ValueError("Two runs of this sweep would write to the same folder. Give each key a value only once.")
    return runs


def run_sweep(name: str, runs: list[SweptRun], config_dir: Path | None, results: Results = Results()) -> int:
    """Runs the command `name` once for each of `runs`; returns the highest exit code.

    Prints a table and writes sweep.csv, and sweep.png if `results` has a picture.
    """
    rows, finished, child = [], {}, _Child()
    with handled(child.forward):
        for number, run in enumerate(runs, 1):
            place = [str(run.folder)] if run.folder else []
            print(f"[{number}/{len(runs)}] {' '.join([run.chosen, *place])}", flush=True)
            code = child.run(name, run.arguments, config_dir)
            row = {"run": run.chosen, "exit code": str(code)}
            if code == FINISHED and run.folder:
                finished[run.chosen] = run.folder
                row |= results.columns(run.folder)
            rows.append(row)
            if child.signaled or code == STOPPED or code >= SIGNALED:
                break
    _print_table(rows)
    picture = results.picture(finished)
    if folders := [os.path.abspath(run.folder.parent) for run in runs if run.folder]:
        _write(Path(os.path.commonpath(folders)), rows, picture)
    stopped = STOPPED if child.signaled and len(rows) < len(runs) else FINISHED
    return max(stopped, *(int(row["exit code"]) for row in rows))


def _folder_name(chosen: list[str]) -> str:
    return re.sub(r"[^\w.=+-]+", "_", "_".join(chosen))


class _Child:
    """Runs one command at a time in its own process, because JAX sets up its devices once per process.

    Attributes:
      signaled: whether a signal has come; no further process is started.
    """

    def __init__(self):
        self.signaled = False
        self._process: subprocess.Popen | None = None

    def run(self, name: str, pairs: list[str], folder: Path | None) -> int:
        """The exit code. STOPPED when a signal ended the process before it could handle signals."""
        options = ["--config-dir", str(folder)] if folder else []
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "mstrain", name, *options, *pairs]
        # In a session of its own: a terminal sends Ctrl-C to all processes of its session, and `forward` sends it too.
        self._process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths}, start_new_session=True)
        if self.signaled:  # while it was being started
            self._process.send_signal(signal.SIGTERM)
        code = self._process.wait()
        return code if code >= 0 else STOPPED if self.signaled else SIGNALED - code

    def forward(self, number: signal.Signals) -> None:
        """Sends a signal of the sweep to the process that runs now."""
        self.signaled = True
        if self._process and self._process.poll() is None:
            self._process.send_signal(number)


def _print_table(rows: list[dict[str, str]]) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(*columns, title="Sweep", title_justify="left")
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    Console(highlight=False).print(table)


def _write(folder: Path, rows: list[dict[str, str]], picture: bytes | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_csv(rows, folder / "sweep.csv")
    print(f"Written: {folder / 'sweep.csv'}")
    if picture:
        (folder / "sweep.png").write_bytes(picture)
        print(f"Written: {folder / 'sweep.png'}")
