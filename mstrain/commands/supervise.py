"""Runs train on several hosts, restarts it after failures, and continues without hosts that are lost."""

import contextlib
import os
import shlex
import sys
from pathlib import Path

from mstrain.cli import Command, describe_keys, own_config
from mstrain.commands import train
from mstrain.job.supervisor import SuperviseConfig, Supervisor
from mstrain.training import json_lines
from mstrain.training.elastic import largest_layout
from mstrain.training.record import HISTORY, checkpoint_steps

PROCESS_KEYS = ("coordinator", "processes", "process")
LAYOUT = ("mesh", "accumulate")


def load_config(arguments: list[str]) -> SuperviseConfig:
    """The keys of supervise among `arguments`; raises ValueError with the fix."""
    return _split(arguments)[0]


def _split(arguments: list[str]) -> tuple[SuperviseConfig, list[str]]:
    """The config, and the arguments of train."""
    given = {argument.partition("=")[0] for argument in arguments}
    if placed := [key for key in PROCESS_KEYS if key in given]:
        raise ValueError(f"supervise sets {placed[0]}= itself. Remove it.")
    return own_config(SuperviseConfig, arguments)


def main(arguments: list[str]) -> int:
    config, words = _split(arguments)
    hosts = config.names
    run = train.load_config(words)
    largest_layout(run, len(hosts), len(hosts))  # checks the command for all hosts

    def lines(usable: list[str]) -> list[str]:
        layout = largest_layout(run, len(hosts), len(usable))
        log(f"starting on {layout}")
        changed = layout.keys if layout.hosts < len(hosts) else []
        kept = [word for word in words if not changed or word.partition("=")[0] not in LAYOUT]
        places = [_process_keys(config, usable[0], layout.hosts, i) for i in range(layout.hosts)]
        return [_line([*kept, *changed, *place]) for place in places]

    return Supervisor(config, lines, lambda: newest_step(Path(run.run_dir)), log).run()


def log(text: str) -> None:
    print(f"supervise: {text}", flush=True)


def newest_step(run_dir: Path) -> int | None:
    """The latest step known to be saved: the newest checkpoint in `run_dir`, or the step that the last attempt resumed
    from, which may be a local checkpoint of the hosts. None when there is neither.
    """
    with contextlib.suppress(OSError, ValueError):
        attempts = json_lines.read(run_dir / HISTORY)
        steps = [step for attempt in attempts if type(step := attempt.get("after_step")) is int]
        return max([*steps, *checkpoint_steps(run_dir)], default=None)
    return None


def _process_keys(config: SuperviseConfig, coordinator: str, processes: int, process: int) -> list[str]:
    if processes == 1:
        return []
    host = f"[{coordinator}]" if ":" in coordinator else coordinator
    return [f"coordinator={host}:{config.port}", f"processes={processes}", f"process={process}"]


def _line(words: list[str]) -> str:
    """The shell command line of train, in the same folder with the same Python as here."""
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = shlex.join([sys.executable, "-m", "mstrain", "train", *words])
    return f"cd {shlex.quote(os.getcwd())} && PYTHONPATH={shlex.quote(path)} exec {command}"


def help_lines(_: list[str]) -> list[str]:
    return [*describe_keys(SuperviseConfig, "supervise"), "", "All other keys: mstrain train --help."]


COMMAND = Command("supervise", main, (__doc__ or "").strip(), load_config, help_lines, folder=None)
