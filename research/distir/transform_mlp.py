"""The training step of a multi-layer perceptron under data, tensor and pipeline parallelism.

Layers are MatMul + Relu. Even layers are split over the tensor ranks by columns, odd ones by rows, so that an
all-reduce is needed after every odd layer forward and every even layer backward (Shoeybi et al., 2019). A
stage owns consecutive layers. The step is the one that DistIR builds (`mlp_dhp_transform`), so that its rule
sets can be compared number by number; `RuleSet` says what the corrected step does differently.
"""

from __future__ import annotations

from mstrain.simulator.pipeline import PipelineStep
from mstrain.simulator.placement import DATA, LOCAL, SEND, TENSOR, Degrees, Placement
from mstrain.simulator.program import OpSpec
from mstrain.simulator.replicas import Step
from mstrain.simulator.schedules import FORWARD
from mstrain.simulator.slots import RankOp, Slots
from research.distir.loading import LoadingStep
from research.distir.mlp import Mlp, StepOptions, check_mlp, chunk_bounds
from research.distir.rules import RuleSet, rule_set
from research.distir.schedules import schedule as find_schedule


class _MlpStep(PipelineStep):
    """Writes down the operations of one rank, task by task."""

    def __init__(self, mlp: Mlp, degrees: Degrees, rules: RuleSet, options: StepOptions):
        super().__init__(degrees, degrees.pipeline * degrees.interleave)
        self.mlp, self.rules, self.options = mlp, rules, options
        self.rows = mlp.batch // (degrees.data * degrees.microbatches)
        self.bounds = chunk_bounds(mlp.layers, self.chunks)
        # Local shapes of the weights: even layers are cut by columns, odd ones by rows.
        self.shapes = [self._local_weight(j) for j in range(mlp.layers)]
        self.last_stage = self.stage(self.chunks - 1)
        self.x = self._tensor(mlp.input_dim, 0, resident=True)
        self.z = self._tensor(mlp.output_dim, self.last_stage, resident=True)
        self.count = (self.slots.resident(4, self.last_stage),) if rules.batch_count else ()
        self.weights, self.y, self.reduced_y, self.a, self.final, self.accumulated = {}, {}, {}, {}, {}, {}
        for chunk in range(self.chunks):
            self._declare(chunk)
        self.received_a = {
            c: self._tensor(self.out_width(self.bounds[c - 1][1] - 1), self.stage(c)) for c in range(1, self.chunks)
        }
        self.received_g = {
            c: self._tensor(self.out_width(self.bounds[c][1] - 1), self.stage(c)) for c in range(self.chunks - 1)
        }
        self.sent_g: dict[int, int] = {}

    def _declare(self, chunk: int) -> None:
        for j in range(*self.bounds[chunk]):
            stage = self.stage(chunk)
            self.weights[j] = self.slots.resident(self._bytes(self.shapes[j]), stage)
            self.y[j], self.a[j] = (self._tensor(self.out_width(j), stage) for _ in range(2))
            if self._reduces(j % 2 == 1):
                self.reduced_y[j] = self._tensor(self.out_width(j), stage)

    def _local_weight(self, j: int) -> tuple[int, int]:
        fan_in, fan_out = self.mlp.dims(j)
        h = self.degrees.tensor
        return (fan_in, fan_out // h) if j % 2 == 0 else (fan_in // h, fan_out)

    def out_width(self, j: int) -> int:
        return self.shapes[j][1]

    def _reduces(self, condition: bool) -> bool:
        return self.degrees.tensor > 1 and condition

    def _bytes(self, shape: tuple[int, ...]) -> int:
        size = self.mlp.element_bytes
        for dim in shape:
            size *= dim
        return size

    def _tensor(self, width: int, stage: int, **kwargs) -> int:
        return self.slots.value(self._bytes((self.rows, width)), stage, **kwargs)

    def _op(self, kind, shapes, stage, inputs, outputs, axis=LOCAL, peer=-1) -> RankOp:
        return RankOp(OpSpec(kind, shapes, self.mlp.element_bytes), axis, stage, inputs, outputs, peer)

    def _load(self, ops: list[RankOp], shape: tuple[int, ...], stage: int) -> None:
        # Unloaded steps start with everything on stage 0 and fetch what another stage needs just before use.
        if not self.options.loaded and stage:
            ops.append(self._op("Send", (shape,), 0, (), (), SEND, stage))

    def forward(self, chunk: int, first: bool) -> list[RankOp]:
        """The forward pass of `chunk`; `first`: for microbatch 0."""
        stage, ops = self.stage(chunk), []
        value = self.received_a[chunk] if chunk else self.x
        for j in range(*self.bounds[chunk]):
            weight, out = self.shapes[j], (self.rows, self.out_width(j))
            if first:
                self._load(ops, weight, stage)
            ops.append(
                self._op("MatMul", ((self.rows, weight[0]), weight), stage, (value, self.weights[j]), (self.y[j],))
            )
            if j in self.reduced_y:
                ops.append(self._op("AllReduce", (out,), stage, (self.y[j],), (self.reduced_y[j],), TENSOR))
            ops.append(self._op("Relu", (out,), stage, (self.reduced_y.get(j, self.y[j]),), (self.a[j],)))
            value = self.a[j]
        if chunk == self.chunks - 1:
            self._loss(ops, value, stage, first)
        return ops

    def _loss(self, ops: list[RankOp], prediction: int, stage: int, first: bool) -> None:
        shape = (self.rows, self.mlp.output_dim)
        scalar = self.rules.scalar_loss
        inputs = (prediction, self.z, *self.count)
        self.loss_shape = (1,) if scalar else shape
        if "l" not in self.final:
            self.loss = self.slots.value(self._bytes(self.loss_shape), stage)
            self.loss_gradient = self._tensor(shape[1], stage)
        self._load(ops, shape, stage)
        ops.append(self._op("Loss", (shape,), stage, inputs, (self.loss,)))
        self._output(ops, "l", self.loss, self.loss_shape, stage, first, "Add" if scalar else "Concat")
        ops.append(self._op("LossGrad", (shape,), stage, inputs, (self.loss_gradient,)))

    def _output(self, ops, name, slot: int, shape, stage: int, first: bool, combine: str) -> None:
        """Combine a result over microbatches: the first is passed on, later ones are added or appended."""
        if self.degrees.microbatches == 1:
            self.final[name] = slot
            return
        if name not in self.final:
            self.final[name] = self.slots.value(self._bytes(shape), stage, grows=combine == "Concat")
        total = self.final[name]
        if first:
            ops.append(self._op("Identity", (shape,), stage, (slot,), (total,)))
        else:
            ops.append(self._op(combine, (shape,), stage, (Slots.previous(total), slot), (total,)))

    def backward(self, chunk: int, first: bool, last: bool) -> list[RankOp]:
        """The backward pass of `chunk`; `last`: gradients are complete after it and reduced at once."""
        stage, ops = self.stage(chunk), []
        gradient = self.received_g[chunk] if chunk < self.chunks - 1 else self.loss_gradient
        begin, end = self.bounds[chunk]
        for j in reversed(range(begin, end)):
            weight, out = self.shapes[j], (self.rows, self.out_width(j))
            value = self.a[j - 1] if j > begin else self.received_a[chunk] if chunk else self.x
            wanted = bool(j) or self.rules.input_gradient
            da, dw, g, reduced = self._backward_slots(j, stage)
            ops.append(self._op("ReluGrad", (out,), stage, (self.reduced_y.get(j, self.y[j]), gradient), (da,)))
            shapes = ((self.rows, weight[0]), weight)
            ops.append(
                self._op("MatMulGrad", shapes, stage, (value, self.weights[j], da), (g, dw))
                if wanted
                else self._op("WeightGrad", (shapes[0], out), stage, (value, da), (dw,))
            )
            if wanted and reduced != g:
                ops.append(self._op("AllReduce", ((self.rows, weight[0]),), stage, (g,), (reduced,), TENSOR))
            gradient = reduced
            if j == 0 and wanted:
                self._output(ops, "g", gradient, (self.rows, weight[0]), stage, first, "Concat")
            self._output(ops, j, dw, weight, stage, first, "Add")
            if last and self.degrees.data > 1:
                ops.append(self._reduce_gradient(j))
        self.sent_g[chunk] = gradient
        return ops

    def _backward_slots(self, j: int, stage: int) -> tuple[int, int, int, int]:
        """The slots of da, dw, g and the all-reduced g (g itself where there is no all-reduce)."""
        if j not in self.accumulated:
            da, dw = (self._tensor(self.out_width(j), stage), self.slots.value(self._bytes(self.shapes[j]), stage))
            g = self._tensor(self.shapes[j][0], stage)
            reduced = self._tensor(self.shapes[j][0], stage) if self._reduces(j % 2 == 0) else g
            self.accumulated[j] = (da, dw, g, reduced)
        return self.accumulated[j]

    def _reduce_gradient(self, j: int) -> RankOp:
        stage = self.stage(next(c for c, (_, end) in enumerate(self.bounds) if j < end))
        total = self.final[j]
        self.final[j] = self.slots.value(self._bytes(self.shapes[j]), stage)
        axis = TENSOR if self.rules.gradient_axis == "tensor" and self.degrees.tensor > 1 else DATA
        return self._op("AllReduce", (self.shapes[j],), stage, (total,), (self.final[j],), axis)

    def variant(self, chunk: int, direction: int, microbatch: int) -> tuple[bool, ...]:
        first = microbatch == 0
        if direction == FORWARD:  # for the loss and for loading; elsewhere all are alike
            return (first and (chunk == self.chunks - 1 or not self.options.loaded),)
        return first, self.rules.gradients_early and microbatch == self.degrees.microbatches - 1

    def messages(self, chunk: int, other: int, direction: int) -> list[tuple[OpSpec, int, int]]:
        begin, end = self.bounds[chunk]
        value, arrival, width = (
            (self.a[end - 1], self.received_a[other], self.out_width(end - 1))
            if direction == FORWARD
            else (self.sent_g[chunk], self.received_g[other], self.shapes[begin][0])
        )
        return [(OpSpec("Send", ((self.rows, width),), self.mlp.element_bytes), value, arrival)]

    def finish(self) -> list[RankOp]:
        """What follows the last backward pass: sums and gathers over the replicas, then the optimizer."""
        ops = []
        gathers = self.rules.gather_outputs if self.options.gather_outputs is None else self.options.gather_outputs
        for name in ("l", *range(self.mlp.layers - 1, 0, -1), "g", 0) if self.degrees.data > 1 else ():
            if name == "l" and self.rules.scalar_loss:
                ops.append(
                    self._op(
                        "AllReduce",
                        ((1,),),
                        self.last_stage,
                        (self.final["l"],),
                        (self.slots.value(self._bytes((1,)), self.last_stage),),
                        DATA,
                    )
                )
            elif name in ("l", "g"):
                ops += [self._gather(name)] if gathers and name in self.final else []
            elif not self.rules.gradients_early:
                ops.append(self._reduce_gradient(name))
        if self.options.optimizer and self.rules.optimizer != "none":
            ops += [self._optimizer(stage) for stage in range(self.degrees.pipeline)]
        return ops

    def _gather(self, name: str) -> RankOp:
        width, stage = (self.mlp.output_dim, self.last_stage) if name == "l" else (self.mlp.input_dim, 0)
        rows = self.rows * self.degrees.microbatches
        whole = self.slots.value(self._bytes((rows * self.degrees.data, width)), stage)
        return self._op("AllGather", ((rows, width),), stage, (self.final[name],), (whole,), DATA)

    def _optimizer(self, stage: int) -> RankOp:
        layers = [j for c, bounds in enumerate(self.bounds) if self.stage(c) == stage for j in range(*bounds)]
        return self._op(
            "SGD",
            tuple(self.shapes[j] for j in layers),
            stage,
            (*(self.weights[j] for j in layers), *(self.final[j] for j in layers)),
            (),
        )

    def prologue(self) -> list[tuple[OpSpec, tuple[int, ...]]]:
        """How the notebook's unloaded step brings its inputs from the root to stage 0 of every rank."""
        d, h = self.degrees.data, self.degrees.tensor
        worker = Placement(self.degrees, self.rules.axis_order, 1).worker
        full = [(self.mlp.batch, self.mlp.input_dim), (self.mlp.batch, self.mlp.output_dim)]
        full += [self.mlp.dims(j) for j in range(self.mlp.layers)]
        replicas = [worker(i, 0, 0) for i in range(d)]

        def spec(kind, shape):
            return OpSpec(kind, (shape,), self.mlp.element_bytes)

        ops = [
            (spec("Send" if d == 1 else "Scatter" if n < 2 else "Broadcast", shape), (0, *replicas))
            for n, shape in enumerate(full)
        ]
        for i in range(d if h > 1 else 0):
            ranks = tuple(worker(i, j, 0) for j in range(h))
            ops += [(spec("Broadcast" if n < 2 else "Scatter", shape), ranks) for n, shape in enumerate(full)]
        if self.degrees.pipeline > 1:
            ops += [
                (spec("Split", shape), (worker(i, j, 0),)) for i in range(d) for j in range(h) for shape in full[:2]
            ]
        return ops


def schedule_name(degrees: Degrees, rules: RuleSet, options: StepOptions) -> str:
    """The pipeline schedule of a step: the one asked for, else what interleaving or the rule set implies."""
    return options.schedule or ("interleaved" if degrees.interleave > 1 else rules.schedule)


def mlp_step(
    mlp: Mlp, degrees: Degrees = Degrees(), rules: str | RuleSet = "corrected", options: StepOptions = StepOptions()
) -> Step:
    """The training step of `mlp` under `degrees`. Raises ValueError when they do not fit each other."""
    rules = rule_set(rules)
    check_mlp(mlp, degrees, rules)
    writer = _MlpStep(mlp, degrees, rules, options)
    steps = find_schedule(schedule_name(degrees, rules, options), degrees.pipeline, degrees.microbatches, writer.chunks)
    step = writer.write(steps)
    return step if options.loaded else LoadingStep(**vars(step), prologue=tuple(writer.prologue()))
