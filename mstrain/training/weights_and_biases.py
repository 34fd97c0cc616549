"""Sends scalars to Weights & Biases through its own client, which reads its own environment variables."""

import importlib
import importlib.util
import secrets
from pathlib import Path
from typing import Any

from mstrain.training import files
from mstrain.training.best_effort import BestEffort

SECONDS = 60.0  # time limit for the client at the end of an attempt
FILE = "wandb-id.txt"  # in run_dir: the id under which a resumed run continues


def check_wandb(project: str | None) -> None:
    """Raises ValueError when the client is needed and not installed."""
    if project is not None and importlib.util.find_spec("wandb") is None:
        raise ValueError("wandb= needs the client of Weights & Biases. Type pip install wandb, or remove wandb=.")


class WandbRun:
    """One run of a project, whose attempts continue it.

    Args:
      observers: makes every call of the client, in a thread of its own, as the client waits for a network.
      project: the project's name.
      directory: the run directory, which gives the run its name and keeps its id.
      config: the configuration to show.
    """

    def __init__(self, observers: BestEffort, project: str, directory: Path, config: dict[str, Any]):
        self._observers, self._run = observers, None
        observers.do("wandb", self._start, project, directory, config)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Returns at once."""
        self._observers.do("wandb", self._log, step, values)

    def retry(self) -> None:
        """Ends the attempt: waits for the client to write or send what it has, at most SECONDS."""
        with self._observers:
            self._observers.attempt("wandb", self._finish, seconds=SECONDS)

    def _start(self, project: str, directory: Path, config: dict[str, Any]) -> None:
        client: Any = importlib.import_module("wandb")
        place = directory / FILE
        if not place.exists():
            files.replace(place, secrets.token_hex(4).encode())
        self._run = client.init(
            project=project, name=directory.name, id=place.read_text().strip(), resume="allow", dir=str(directory),
            config=config, settings=client.Settings(console="off", silent=True),
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # steps that a resumed attempt repeats are logged again

    def _log(self, step: int, values: dict[str, float]) -> None:
        if self._run:
            self._run.log({**values, "step": step})

    def _finish(self) -> None:
        if self._run:
            self._run.finish()
