"""The stages of a pipeline over mesh axis `stage`: the layers of each, and the schedule in which they run.

The first, dense layers of a model with experts are computed before the stages, with the embedding. Consecutive layers
of the others form chunks; chunk c runs on stage c mod the number of stages (interleaved: several chunks per stage). The
parameters of all layers are one stack of rows, sharded over `stage`: stage by stage, chunk by chunk. Chunks with fewer
layers than others are padded with rows that are never applied.
"""

import dataclasses
import re

from mstrain.checks import one_of
from mstrain.models.config import ModelConfig
from mstrain.parallel.schedules import SCHEDULES

AXIS = "stage"


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
    """The pipeline over mesh axis `stage`."""

    schedule: str | None = None
    """Pipeline schedule: `gpipe`, `1f1b`, `interleaved`, or `zero-bubble`, which computes gradients of weights where
    stages of 1f1b wait, and needs more memory; null takes 1f1b. All stages run in lockstep, so 1f1b and zero-bubble
    hold up to 2 x stages - 1 microbatches. `accumulate` is the number of microbatches."""
    interleave: int | None = None
    """Chunks of layers per stage of schedule=interleaved; null takes 2."""
    layers: str | None = None
    """Number of layers of every chunk in order, such as `9 8 7`, without the dense layers of `model.dense_layers`; null
    divides them evenly, with one more in the first chunks if needed."""

    def __post_init__(self):
        if self.schedule is not None:
            one_of("pipeline.schedule", self.schedule, SCHEDULES)
        if self.interleave is not None and (self.schedule != "interleaved" or self.interleave < 2):
            raise ValueError(
                f"pipeline.interleave={self.interleave} has no effect with pipeline.schedule={self.schedule or '1f1b'}."
                " Remove it, or type pipeline.schedule=interleaved pipeline.interleave=2."
            )
        if self.layers is not None and not re.fullmatch(r"[1-9]\d{0,5}( [1-9]\d{0,5})*", self.layers):
            raise ValueError(
                f"pipeline.layers={self.layers!r} is not a list of numbers of layers. Type one number per chunk, such "
                'as pipeline.layers="3 3 2".'
            )


@dataclasses.dataclass(frozen=True)
class Stages:
    """The division of a model into chunks, `layers` of each, over `count` stages, and the schedule."""

    count: int
    schedule: str
    layers: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """Per stage."""
        return len(self.layers) // self.count

    @property
    def deepest(self) -> int:
        """Most layers of a chunk."""
        return max(self.layers)

    @property
    def rows(self) -> tuple[int, ...]:
        """The layer in every row of the stack, -1 for padding."""
        rows = []
        for stage in range(self.count):
            for chunk in range(stage, len(self.layers), self.count):
                first = sum(self.layers[:chunk])
                rows += [*range(first, first + self.layers[chunk]), *[-1] * (self.deepest - self.layers[chunk])]
        return tuple(rows)

    def check_microbatches(self, microbatches: int) -> None:
        """Raises ValueError if the schedule does not support so many microbatches per step."""
        if self.schedule == "interleaved" and microbatches % self.count:
            below = microbatches // self.count * self.count
            near = " or ".join(f"accumulate={n}" for n in (below, below + self.count) if n)
            raise ValueError(
                f"pipeline.schedule=interleaved runs microbatches in groups of as many as there are stages, "
                f"{self.count}, and accumulate={microbatches} is not a multiple of it. Type {near}, or "
                "pipeline.schedule=1f1b."
            )

    def __str__(self) -> str:
        chunks = f" in {len(self.layers)} chunks" if self.chunks > 1 else ""
        return f"{self.count} stages of {'+'.join(map(str, self.layers))} layers{chunks}, {self.schedule}"


def even_layers(layers: int, chunks: int) -> tuple[int, ...]:
    """Layers of every chunk, the first ones with one more."""
    small, extra = divmod(layers, chunks)
    return tuple(small + (chunk < extra) for chunk in range(chunks))


def make_stages(config: PipelineConfig, count: int, layers: int) -> Stages | None:
    """The division of `layers` over `count` stages; None for one stage.

    Raises ValueError if there are too few layers, or for a key without effect.
    """
    if count == 1:
        for field in dataclasses.fields(config):
            if (value := getattr(config, field.name)) is not None:
                raise ValueError(
                    f"pipeline.{field.name}={value} has no effect: the mesh has one stage. Remove it, or type a mesh= "
                    "with a stage axis, such as mesh=stage2-row2-col2."
                )
        return None
    schedule = config.schedule or "1f1b"
    chunks = count * ((config.interleave or 2) if schedule == "interleaved" else 1)
    if layers < chunks:
        per_stage = chunks // count
        fits = [n for n in range(2, layers // per_stage + 1)]
        advice = f"Type a mesh= with up to {fits[-1]} stages" if fits else "Type a mesh= without stage"
        raise ValueError(
            f"model.layers={layers} is less than the {chunks} chunks of {count} stages with "
            f"pipeline.schedule={schedule}: every chunk needs a layer (model.dense_layers do not count). {advice}, or "
            "a model with more layers."
        )
    if config.layers is None:
        return Stages(count, schedule, even_layers(layers, chunks))
    stated = tuple(map(int, config.layers.split()))
    if len(stated) != chunks or sum(stated) != layers:
        even = make_stages(dataclasses.replace(config, layers=None), count, layers)
        assert even
        raise ValueError(
            f'pipeline.layers="{config.layers}" has {len(stated)} chunks with {sum(stated)} layers, and this run has '
            f'{chunks} chunks with {layers} layers. Type pipeline.layers="{" ".join(map(str, even.layers))}".'
        )
    return Stages(count, schedule, stated)


def check_division(stages: Stages, algorithms: list[tuple[str, str]], model: ModelConfig) -> None:
    """Raises ValueError for layers that the stages of a pipeline do not support; layers before the stages are not
    restricted."""
    if min(stages.rows) < 0 and (model.balance_loss or model.router_z_loss):
        raise ValueError(
            f"model.balance_loss and model.router_z_loss need as many layers in every stage, not {stages}. Type a "
            "mesh= with a number of stages that divides the layers, or model.balance_rate=0.001 instead."
        )
    if len(set(algorithms[model.dense_layers :])) > 1:
        raise ValueError(
            "parallel.layers gives layers different algorithms, and the stages of a pipeline run one program. Remove "
            "parallel.layers, or type a mesh= without stage."
        )
