"""Steps whose inputs are on the root device at first, as DistIR counts them before it removes their distribution."""

from mstrain.parallel.schedules import FORWARD
from mstrain.simulator.placement import GROUP, SEND, Degrees, Placement
from mstrain.simulator.replicas import Step
from research.distir.mlp import Mlp
from research.distir.rules import RuleSet
from research.distir.schedules import schedule
from research.distir.transform_mlp import MlpStep, schedule_name


class UnloadedStep(MlpStep):
    """Distributes the inputs from the root to stage 0 of every rank; other stages fetch theirs just before use."""

    def variant(self, chunk: int, direction: int, microbatch: int) -> tuple[bool, ...]:
        return (microbatch == 0,) if direction == FORWARD else super().variant(chunk, direction, microbatch)

    def forward(self, chunk: int, first: bool) -> None:
        begin, stage = len(self.ops), self.stage(chunk)
        super().forward(chunk, first)
        mine = self.ops[begin:]
        del self.ops[begin:]
        for op in mine:
            if stage and (op.spec.kind == "Loss" or first and op.spec.kind == "MatMul"):  # labels, or the weight
                self._op("Send", op.spec.shapes[-1:], 0, (), axis=SEND, peer=stage)
            self.ops.append(op)

    def begin(self) -> None:
        d, h = self.degrees.data, self.degrees.tensor
        worker = Placement(self.degrees, self.rules.axis_order, 1).worker
        inputs = [(self.mlp.batch, self.mlp.input_dim), (self.mlp.batch, self.mlp.output_dim)]
        full = inputs + [self.mlp.dims(layer) for layer in range(self.mlp.layers)]

        def on_all(kind: str, shape: tuple[int, ...], *members: int) -> None:
            group = self.groups.setdefault(members, len(self.groups))
            self._op(kind, (shape,), 0, (), axis=GROUP, peer=group)

        first = [worker(i, 0, 0) for i in range(d)]
        for n, shape in enumerate(full):
            on_all("Send" if d == 1 else "Scatter" if n < 2 else "Broadcast", shape, 0, *first)
        for i in range(d if h > 1 else 0):
            for n, shape in enumerate(full):
                on_all("Broadcast" if n < 2 else "Scatter", shape, *(worker(i, j, 0) for j in range(h)))
        for rank in range(d * h if self.degrees.pipeline > 1 else 0):
            for shape in inputs:
                on_all("Split", shape, worker(*divmod(rank, h), 0))


def unloaded_step(mlp: Mlp, degrees: Degrees, rules: RuleSet) -> Step:
    """The training step of `mlp` with the operations that distribute its inputs."""
    writer = UnloadedStep(mlp, degrees, rules)
    name = schedule_name(degrees, rules)
    return writer.write(schedule(name, degrees.pipeline, degrees.microbatches, writer.chunks))
