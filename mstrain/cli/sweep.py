"""--multirun: runs every combination of values in its own process and folder, and prints a table."""

import csv
import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mstrain.cli.compose import sweep_values
from mstrain.job.exit_codes import FINISHED, SIGNALED, STOPPED
from mstrain.job.signals import handled

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = "run_dir"


def run_sweep(
    name: str,
    pairs: list[str],
    folder: Path | None,
    config: Callable,
    results: Callable[[Path], dict[str, str]],
) -> int:
    """Runs the command `name` once for each combination; returns the highest exit code.

    All combinations are composed and checked before the first one starts. Each writes to RUN_DIR/KEY=VALUE_KEY=VALUE,
    so that the same sweep resumes where it stopped.

    Raises:
      ValueError: nothing is swept, or a combination is not valid.
    """
    fixed, swept = [], []
    for pair in pairs:
        values = sweep_values(pair)
        key = pair.partition("=")[0]
        if values is None:
            fixed.append(pair)
        else:
            swept.append([f"{key}={value}" for value in values])
    if not swept:
        raise ValueError("--multirun has nothing to vary. Separate values by commas, such as parallel=meshslice,wang.")
    combinations = list(itertools.product(*swept))
    base = Path(config([*fixed, *combinations[0]]).run_dir)
    fixed = [pair for pair in fixed if not pair.startswith(FOLDER + "=")]
    jobs = [(chosen, base / _folder_name(chosen)) for chosen in combinations]
    for chosen, run_dir in jobs:
        config([*fixed, *chosen, f"{FOLDER}={run_dir}"])
    rows, child = [], _Child()
    with handled(child.forward):
        for number, (chosen, run_dir) in enumerate(jobs, 1):
            print(f"[{number}/{len(jobs)}] {' '.join(chosen)} {FOLDER}={run_dir}", flush=True)
            code = child.run(name, [*fixed, *chosen, f"{FOLDER}={run_dir}"], folder)
            rows.append({"run": " ".join(chosen), "exit code": str(code), **(results(run_dir) if code == 0 else {})})
            if child.signaled or code == STOPPED or code >= SIGNALED:
                break
    _report(rows, base)
    stopped = STOPPED if child.signaled and len(rows) < len(jobs) else FINISHED
    return max(stopped, *(int(row["exit code"]) for row in rows))


def _folder_name(chosen: tuple[str, ...]) -> str:
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


def _report(rows: list[dict[str, str]], base: Path) -> None:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = Table(*columns, title="Sweep", title_justify="left")
    for row in rows:
        table.add_row(*(row.get(column, "") for column in columns))
    Console(highlight=False).print(table)
    base.mkdir(parents=True, exist_ok=True)
    with (base / "sweep.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    print(f"Written: {base / 'sweep.csv'}")
