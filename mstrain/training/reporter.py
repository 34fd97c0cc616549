"""Reports training: progress lines, metrics.jsonl, TensorBoard, Weights & Biases.

`metrics.jsonl` has one object per logged step, `eval.jsonl` one per evaluation.
"""

import contextlib
import math
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mstrain.training import console as output
from mstrain.training import json_lines
from mstrain.training.best_effort import BestEffort
from mstrain.training.tensorboard import EventFile
from mstrain.training.weights_and_biases import WandbRun

METRICS, EVALUATIONS = "metrics.jsonl", "eval.jsonl"
SECONDS_BETWEEN_LINES = 10  # of plain progress lines, without a terminal to redraw


class Reporter:
    """Takes the metrics of every step; only process 0 writes.

    Args:
      files: writes the files.
      directory: the run directory, which exists.
      steps: the steps of this attempt.
      log_every: steps between lines of metrics.jsonl.
      per_step: function of (step, step_seconds) that returns further fields, such as tokens per second.
      observers: called with (step, values) of every step, in this order.
    """

    def __init__(
        self,
        files: BestEffort,
        directory: Path,
        steps: range,
        log_every: int,
        per_step,
        console: Console,
        observers=(),
    ):
        self._writes = jax.process_index() == 0
        self._files, self._log_every, self._per_step = files, log_every, per_step
        first, self._last = steps[0], steps[-1]
        self._console, self._observers = console, observers
        if self._writes:
            self._metrics, self._evaluations = (
                json_lines.Log(files, directory / name, first - 1) for name in (METRICS, EVALUATIONS)
            )
            self._tensorboard = EventFile(files, directory, first)
            self._sinks: list[EventFile | WandbRun] = [self._tensorboard]
        self._progress = Progress(
            TextColumn("[bold]step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"),
            TimeRemainingColumn(), console=console, disable=not (self._writes and console.is_terminal),
        )  # fmt: skip
        self._task = self._progress.add_task("compiling", total=self._last, completed=first - 1)
        self._since = self._started = time.perf_counter()
        self._paused, self._line_at, self.seconds, self.steps = 0.0, 0.0, 0.0, 0
        self._busy_since, self._busy_paused, self.busy_seconds = time.process_time(), 0.0, 0.0  # of all cores
        self.first_loss_at: float | None = None

    def step(self, step: int, metrics: dict) -> None:
        """Waits for the metrics of `step` and reports them."""
        values = {name: np.asarray(value).tolist() for name, value in jax.device_get(metrics).items()}
        now = time.perf_counter()
        seconds = max(now - self._since - self._paused, 1e-9)
        processor = time.process_time()
        busy = processor - self._busy_since - self._busy_paused
        self._since, self._paused, self._busy_since, self._busy_paused = now, 0.0, processor, 0.0
        if self.first_loss_at is None:  # the first step's time includes its start-up
            self.first_loss_at = now
        else:
            self.seconds, self.steps = self.seconds + seconds, self.steps + 1
            self.busy_seconds += busy
        values |= {"step_seconds": seconds, **self._per_step(step, seconds)}
        if self._writes:
            self._write(step, values, now)
        for observer in self._observers:
            observer(step, values)

    @contextlib.contextmanager
    def pause(self):
        """Time inside does not count as step time."""
        start, processor = time.perf_counter(), time.process_time()
        yield
        self._paused += time.perf_counter() - start
        self._busy_paused += time.process_time() - processor

    def evaluation(self, step: int, values: dict) -> None:
        """Records an evaluation and prints it."""
        if not self._writes:
            return
        self._evaluations.append({"step": step, **values})
        self.scalars(step, {f"eval/{name}": value for name, value in values.items()})
        shown = "  ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in values.items())
        self._progress.console.print(f"step {step}/{self._last}  {shown}")

    def add(self, sink: WandbRun) -> None:
        """Sends scalars and text to `sink` too, from here on, and ends it on exit."""
        if self._writes:
            self._sinks.append(sink)

    def scalars(self, step: int, values: dict[str, float]) -> None:
        """Writes further values to TensorBoard and the other sinks."""
        if self._writes:
            for sink in self._sinks:
                sink.scalars(step, values)

    def text(self, name: str, text: str) -> None:
        """Writes text to TensorBoard."""
        if self._writes:
            self._tensorboard.text(name, text)

    def __enter__(self):
        self._progress.start()
        return self

    def __exit__(self, *_):
        self._progress.stop()
        if self._writes:
            for file in (self._metrics, self._evaluations, *self._sinks):
                file.retry()

    def _write(self, step, values, now):
        if step % self._log_every == 0 or step == self._last:
            logged = _plain(values)
            if failures := self._files.failures + output.failures():
                logged["observer_failures"] = failures.total()
            self._metrics.append({"step": step, **logged})
            shown = {f"train/{name}": value for name, value in _scalars(values).items() if value is not None}
            self.scalars(step, shown)
        mfu = "" if values["mfu"] is None else f"  MFU {values['mfu']:.1%}"
        predicted = values.get("predicted_step_seconds")
        beside = "" if predicted is None else f" (predicted {predicted * 1e3:,.0f})"
        text = (
            f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s  "
            f"{values['step_seconds'] * 1e3:,.0f} ms/step{beside}{mfu}"
        )
        self._progress.update(self._task, completed=step, description=text)
        if self._progress.disable and (now - self._line_at > SECONDS_BETWEEN_LINES or step == self._last):
            self._line_at = now
            left = (self._last - step) * self.seconds / self.steps if self.steps else None
            ending = "" if left is None else f"  {left:,.0f} s left"
            self._console.print(f"step {step}/{self._last}  {text}{ending}")


def _plain(values: dict) -> dict:
    """Values for JSON: null instead of NaN and infinity, and `skipped` only for skipped steps."""
    kept = {name: value for name, value in values.items() if name != "skipped" or value}

    def plain(value):
        if isinstance(value, list):
            return [plain(each) for each in value]
        return value if value is None or math.isfinite(value) else None

    return {name: plain(value) for name, value in kept.items()}


def _scalars(values: dict) -> dict:
    """Values with one key for every entry of a list."""
    single = {name: value for name, value in values.items() if not isinstance(value, list)}
    lists = {name: value for name, value in values.items() if isinstance(value, list)}
    return single | {f"{name}/{i}": each for name, value in lists.items() for i, each in enumerate(value)}
