"""The training step of a multi-layer perceptron under data, tensor and pipeline parallelism.

Layers are MatMul and Relu. The weights of even layers are sharded over the tensor-parallel ranks by columns, those of
odd layers by rows, so the forward pass needs an all-reduce after every odd layer and the backward pass after every even
one (Shoeybi et al., 2019). A stage has consecutive layers. The step is that of DistIR (`mlp_dhp_transform`), so results
under DistIR's rule sets are equal to DistIR's; `RuleSet` states the differences of the corrected step.
"""

from math import prod

from mstrain.models.stages import even_layers
from mstrain.parallel.schedules import FORWARD
from mstrain.planner.stages import bounds_of
from mstrain.simulator.pipeline import PipelineStep
from mstrain.simulator.placement import DATA, LOCAL, TENSOR, Degrees
from mstrain.simulator.program import OpSpec
from mstrain.simulator.replicas import Step
from mstrain.simulator.slots import Slots
from research.distir.mlp import Mlp, check_mlp
from research.distir.rules import RuleSet, rule_set
from research.distir.schedules import schedule as find_schedule

Shape = tuple[int, ...]


class MlpStep(PipelineStep):
    """The training step of one rank of a perceptron."""

    def __init__(self, mlp: Mlp, degrees: Degrees, rules: RuleSet):
        super().__init__(degrees, degrees.pipeline * degrees.interleave)
        self.mlp, self.rules = mlp, rules
        self.rows = mlp.batch // (degrees.data * degrees.microbatches)
        self.bounds = bounds_of(even_layers(mlp.layers, self.chunks))
        self.stage_of = [self.stage(chunk) for chunk, (begin, end) in enumerate(self.bounds) for _ in range(begin, end)]
        # Local shapes of the weights: even layers are sharded by columns, odd ones by rows.
        h, dims = degrees.tensor, [mlp.dims(layer) for layer in range(mlp.layers)]
        self.shapes = [(i // h, o) if layer % 2 else (i, o // h) for layer, (i, o) in enumerate(dims)]
        self.values: dict[object, int] = {}
        self.x = self._value("x", (self.rows, mlp.input_dim), 0, resident=True)
        self.z = self._value("z", (self.rows, mlp.output_dim), self.stage_of[-1], resident=True)
        self.count = (self.slots.resident(4, self.stage_of[-1]),) if rules.batch_count else ()
        self.weights = [
            self.slots.resident(self._bytes(shape), stage) for shape, stage in zip(self.shapes, self.stage_of)
        ]
        self.sums: dict[int, int] = {}  # by layer: its all-reduced product
        self.gradients: dict[int, int] = {}  # by chunk: the gradient of its input
        # Sums over microbatches: "l" the loss, "g" the input gradient, a layer its weight gradient.
        self.totals: dict[object, int] = {}

    def _bytes(self, shape: Shape) -> int:
        return self.mlp.element_bytes * prod(shape)

    def _value(self, name, shape: Shape, stage: int, **kinds) -> int:
        if name not in self.values:
            self.values[name] = self.slots.value(self._bytes(shape), stage, **kinds)
        return self.values[name]

    def _op(self, kind: str, shapes, stage: int, inputs, *outputs, axis: int = LOCAL, peer: int = -1) -> list[int]:
        """Adds an operation; `outputs` are (name, shape) pairs. Returns the slots of its outputs."""
        made = [self._value(name, shape, stage) for name, shape in outputs]
        self.add(OpSpec(kind, shapes, self.mlp.element_bytes), axis, stage, inputs, made, peer)
        return made

    def _out(self, layer: int) -> Shape:
        return self.rows, self.shapes[layer][1]

    def _input(self, layer: int) -> int:
        begins = [begin for begin, _ in self.bounds]
        if layer == 0:
            return self.x
        if layer in begins:
            return self._value(("arrived", layer), self._out(layer - 1), self.stage_of[layer])
        return self.values["a", layer - 1]

    def forward(self, chunk: int, first: bool) -> None:
        """Adds the forward pass of `chunk`; `first`: of microbatch 0."""
        stage = self.stage(chunk)
        for j in range(*self.bounds[chunk]):
            weight, out, value = self.shapes[j], self._out(j), self._input(j)
            shapes = (self.rows, weight[0]), weight
            (y,) = self._op("MatMul", shapes, stage, (value, self.weights[j]), (("y", j), out))
            if self.degrees.tensor > 1 and j % 2:
                (y,) = self._op("AllReduce", (out,), stage, (y,), (("sum", j), out), axis=TENSOR)
            self.sums[j] = y
            self._op("Relu", (out,), stage, (y,), (("a", j), out))
        if chunk == self.chunks - 1:
            self._loss(stage, first)

    def _loss(self, stage: int, first: bool) -> None:
        shape, scalar = (self.rows, self.mlp.output_dim), not self.rules.original
        inputs, loss_shape = (self.values["a", self.mlp.layers - 1], self.z, *self.count), (1,) if scalar else shape
        (loss,) = self._op("Loss", (shape,), stage, inputs, ("loss", loss_shape))
        self._total("l", loss, loss_shape, stage, first, "Add" if scalar else "Concat")
        self._op("LossGrad", (shape,), stage, inputs, ("loss gradient", shape))

    def _total(self, name, value: int, shape: Shape, stage: int, first: bool, combine: str) -> None:
        """Accumulates a result over microbatches with `combine`, "Add" or "Concat"; `first`: of microbatch 0."""
        if self.degrees.microbatches == 1:
            self.totals[name] = value
            return
        total = self._value(("total", name), shape, stage, grows=combine == "Concat")
        self.totals.setdefault(name, total)
        inputs = (value,) if first else (Slots.previous(total), value)
        self._op("Identity" if first else combine, (shape,), stage, inputs, (("total", name), shape))

    def backward(self, chunk: int, first: bool, last: bool) -> None:
        """Adds the backward pass of `chunk`; `last`: weight gradients are complete after it and are reduced."""
        stage, (begin, end) = self.stage(chunk), self.bounds[chunk]
        gradient = self.values["loss gradient"]
        if chunk < self.chunks - 1:
            gradient = self._value(("returned", chunk), self._out(end - 1), stage)
        for j in reversed(range(begin, end)):
            weight, out, value = self.shapes[j], self._out(j), self._input(j)
            into = (self.rows, weight[0])
            (da,) = self._op("ReluGrad", (out,), stage, (self.sums[j], gradient), (("da", j), out))
            if j or self.rules.original:
                inputs, made = (value, self.weights[j], da), ((("g", j), into), (("dw", j), weight))
                gradient, dw = self._op("MatMulGrad", (into, weight), stage, inputs, *made)
                if self.degrees.tensor > 1 and j % 2 == 0:
                    made = (("g sum", j), into)
                    (gradient,) = self._op("AllReduce", (into,), stage, (gradient,), made, axis=TENSOR)
                if j == 0:
                    self._total("g", gradient, into, stage, first, "Concat")
            else:
                (dw,) = self._op("WeightGrad", (into, out), stage, (value, da), (("dw", j), weight))
            self._total(j, dw, weight, stage, first, "Add")
            if last and self.degrees.data > 1:
                self._reduce_gradient(j)
        self.gradients[chunk] = gradient

    def _reduce_gradient(self, j: int) -> None:
        axis = TENSOR if self.rules.gradient_axis == "tensor" and self.degrees.tensor > 1 else DATA
        shape, made = self.shapes[j], (("reduced", j), self.shapes[j])
        (self.totals[j],) = self._op("AllReduce", (shape,), self.stage_of[j], (self.totals[j],), made, axis=axis)

    def variant(self, chunk: int, direction: int, microbatch: int) -> tuple[bool, ...]:
        first = microbatch == 0
        if direction == FORWARD:  # only the accumulation of the loss differs between microbatches
            return (first and chunk == self.chunks - 1,)
        return first, self.rules.gradients_early and microbatch == self.degrees.microbatches - 1

    def messages(self, chunk: int, other: int, direction: int) -> list[tuple[OpSpec, int, int]]:
        begin, end = self.bounds[chunk]
        if direction == FORWARD:
            width, value, arrival = self._out(end - 1)[1], self.values["a", end - 1], self._input(end)
        else:
            width, value = self.shapes[begin][0], self.gradients[chunk]
            arrival = self._value(("returned", other), self._out(begin - 1), self.stage(other))
        return [(OpSpec("Send", ((self.rows, width),), self.mlp.element_bytes), value, arrival)]

    def finish(self) -> None:
        """Adds all-reduces and all-gathers over the replicas, then the optimizer."""
        for name in ("l", *range(self.mlp.layers - 1, 0, -1), "g", 0) if self.degrees.data > 1 else ():
            if isinstance(name, int):
                if not self.rules.gradients_early:
                    self._reduce_gradient(name)
            elif name == "l" and not self.rules.original:
                made = ("loss sum", (1,))
                self._op("AllReduce", ((1,),), self.stage_of[-1], (self.totals["l"],), made, axis=DATA)
            elif self.rules.gather_outputs and name in self.totals:
                width, stage = (self.mlp.output_dim, self.stage_of[-1]) if name == "l" else (self.mlp.input_dim, 0)
                rows = self.mlp.batch // self.degrees.data
                made = (("whole", name), (self.mlp.batch, width))
                self._op("AllGather", ((rows, width),), stage, (self.totals[name],), made, axis=DATA)
        for stage in range(self.degrees.pipeline) if self.rules.optimizer != "none" else ():
            layers = [layer for layer, its_stage in enumerate(self.stage_of) if its_stage == stage]
            inputs = (*(self.weights[layer] for layer in layers), *(self.totals[layer] for layer in layers))
            self._op("SGD", tuple(self.shapes[layer] for layer in layers), stage, inputs)


def schedule_name(degrees: Degrees, rules: RuleSet) -> str:
    return "interleaved" if degrees.interleave > 1 else rules.schedule


def mlp_step(mlp: Mlp, degrees: Degrees = Degrees(), rules: str | RuleSet = "corrected") -> Step:
    """The training step of `mlp`. Raises ValueError if `degrees` do not divide the model."""
    rules = rule_set(rules)
    check_mlp(mlp, degrees, rules)
    writer, name = MlpStep(mlp, degrees, rules), schedule_name(degrees, rules)
    return writer.write(find_schedule(name, degrees.pipeline, degrees.microbatches, writer.chunks))
