"""A simulated step and the cost model's prediction of it: what the simulation of a plan returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from mstrain.display.gantt import plot_gantt
from mstrain.display.plots import plot_memory
from mstrain.display.tables import decimal
from mstrain.json_files import write_json
from mstrain.simulator.simulate import Simulation
from mstrain.timeline import exposed_communication, first_events, write_perfetto

TRACE_EVENTS = 150_000  # at most, the first ones; ui.perfetto.dev does not open much larger traces
GANTT_LANES = 24  # at most


@dataclass(frozen=True, eq=False)
class Compared:
    """A simulated step of `microbatches` microbatches.

    Attributes:
      predicted_seconds: time of the same step by the cost model, on equally fast devices.
      predicted_bytes: peak memory of its fullest device by the memory model.
      devices: the devices of each stage; empty if one device represents a stage.
      stages: one dict per stage with its simulated and predicted figures.
    """

    result: Simulation
    microbatches: int
    predicted_seconds: float
    predicted_bytes: float
    devices: tuple[tuple[int, ...], ...] = ()
    stages: Sequence[dict] = field(default_factory=list)

    @cached_property
    def exposed(self) -> float:
        """Mean fraction of the step in which a device waits for communication and does not compute."""
        waits = exposed_communication(self.result.timeline())
        return sum(waits.values()) / len(waits) / self.result.seconds

    def write(self, folder: Path) -> list[str]:
        """simulation.json, trace.json.gz for ui.perfetto.dev, and pictures; returns their names.

        Pictures show lanes over time, memory over time (both of the first device of each stage only), and memory of the
        fullest device by category.
        """
        result, timeline = self.result, self.result.timeline()
        document = {
            "microbatches": self.microbatches,
            "step_seconds": result.seconds,
            "predicted_seconds": self.predicted_seconds,
            "exposed_fraction": self.exposed,
            "operations": result.program.num_ops,
            "peak_bytes": result.peak_bytes,
            "predicted_bytes": self.predicted_bytes,
            "peak_bytes_by_category": {
                name: max(use.peak_bytes.values()) for name, use in result.memory_by_category.items()
            },
            "stages": list(self.stages),
        }
        write_json(document, folder / "simulation.json")
        write_perfetto(first_events(timeline, TRACE_EVENTS), folder / "trace.json.gz")
        shown = [devices[0] for devices in self.devices] or None
        plot_gantt(timeline, folder / "gantt.png", GANTT_LANES, shown)
        plot_memory(timeline, folder / "memory.png", shown)
        peaks = result.memory.peak_bytes
        plot_memory(timeline, folder / "memory_by_category.png", [max(peaks, key=peaks.__getitem__)], by_category=True)
        names = ("trace.json.gz (ui.perfetto.dev)", "gantt.png", "memory.png", "memory_by_category.png")
        return [*names, "simulation.json"]

    def summary(self, microbatches: int) -> list[str]:
        """Lines with simulated and predicted time and memory; `microbatches` is the number that the plan has."""
        result, predicted = self.result, self.predicted_seconds
        part = "" if self.microbatches == microbatches else f" ({self.microbatches} of {microbatches} microbatches)"
        more = f"{100 * (result.seconds / predicted - 1):+.1f} %"
        return [
            f"Simulated step{part}: {decimal(1e3 * result.seconds)} ms, {more} relative to the cost model "
            f"({decimal(1e3 * predicted)} ms without stragglers); exposed communication "
            f"{100 * self.exposed:.1f} % of the step; {result.program.num_ops:,} operations on all devices",
            f"Simulated peak memory: {decimal(result.peak_bytes / 1e9)} GB on the fullest device, cost model "
            f"{decimal(self.predicted_bytes / 1e9)} GB",
        ]
