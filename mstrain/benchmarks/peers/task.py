"""The task and the outcome of one process of bench=peers, as JSON."""

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from mstrain.cli.fields import build
from mstrain.models.config import ModelConfig

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.1, 1.0  # of the peers of mstrain, which has its defaults


@dataclasses.dataclass(frozen=True)
class Task:
    """Steps of `peer`: batches of `batch` sequences of `seq` tokens; `warmup` steps untimed, `repeats` timed."""

    peer: str
    model: ModelConfig
    batch: int
    seq: int
    dtype: str = "auto"
    warmup: int = 2
    repeats: int = 20
    seed: int = 0

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Task":
        return build(Task, json.loads(text))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a peer measured.

    Attributes:
      device: its name.
      how: versions and options that matter.
      compile_seconds: the first step, with tracing and compiling.
      seconds: of each timed step.
      memory: bytes at the peak; None where the device does not count them.
      losses: of all steps, all on one batch.
    """

    device: str
    how: str
    compile_seconds: float
    seconds: list[float]
    memory: int | None
    losses: list[float]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def from_json(text: str) -> "Outcome":
        return Outcome(**json.loads(text))


@dataclasses.dataclass(frozen=True)
class Peer:
    """A step that is ready to run: `step()` starts one and returns its loss, `wait(loss)` returns when it is done."""

    device: str
    how: str
    step: Callable[[], Any]
    wait: Callable[[Any], None]
    memory: Callable[[], int | None]


def run(peer: Peer, task: Task) -> Outcome:
    """Times the steps of `peer`, one after the other."""
    losses, seconds = [], []
    for _ in range(1 + task.warmup + task.repeats):
        begin = time.perf_counter()
        losses.append(peer.step())
        peer.wait(losses[-1])
        seconds.append(time.perf_counter() - begin)
    values = [float(loss) for loss in losses]
    return Outcome(peer.device, peer.how, seconds[0], seconds[1 + task.warmup :], peer.memory(), values)
