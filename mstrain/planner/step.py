"""The training step of a transformer under a plan, written down for one rank: forward, backward, optimizer.

What a layer keeps for its backward pass follows remat exactly as train.py's does: nothing recomputed, all
but the results of products, or everything from the layer's input. Gradients are summed over the replicas as
soon as a layer's are complete: after every microbatch where train.py does so (one chunk), else after the
last. Labels say what every operation is to the model, so that a test can execute the program.
"""

import dataclasses

from mstrain.parallel.schedules import FORWARD, schedule
from mstrain.planner.cost import Costed
from mstrain.planner.layer import elementwise_values, fused_attention
from mstrain.planner.memory import MOMENT_BYTES, SCORE_BYTES, WEIGHT_BYTES, loss_bytes, parameter_counts
from mstrain.planner.products import Emit, emit_gemm, gemms_of
from mstrain.planner.request import PlanRequest
from mstrain.planner.sums import emit_loss_sums, emit_norm_sums, emit_table, emit_table_gradient
from mstrain.simulator.pipeline import PipelineStep
from mstrain.simulator.placement import DATA, LOCAL, SEND, Degrees
from mstrain.simulator.program import OpSpec
from mstrain.simulator.replicas import Step
from mstrain.simulator.slots import RankOp

NORM_VALUES, NORM_GRADIENT_VALUES = 2, 3  # moved per feature: read and written; two read and one written
STATE_ELEMENTS = 7  # float32 numbers the update moves per parameter: four read, three written


class TransformerStep(PipelineStep):
    """Writes the operations of one rank, pass by pass."""

    def __init__(self, request: PlanRequest, costed: Costed, microbatches: int):
        plan = costed.plan
        degrees = Degrees(plan.data, plan.tensor, plan.pipeline, microbatches, plan.chunks, plan.cols)
        super().__init__(degrees, plan.pipeline * plan.chunks)
        self.request, self.costed, self.style = request, costed, request.style
        self.seq, self.model, self.plan, self.products = request.seq, request.model, plan, costed.products
        self.microbatches = microbatches
        self.bounds = sorted(bounds for stage in costed.stages for bounds in stage.chunks)
        self.blocks = self.products.by_name
        self.layout = self.blocks["attention in"].layout
        self.size, self.tokens = self.layout.dtype_bytes, self.layout.tokens
        self.kept: dict[int, dict[str, int]] = {}  # by layer: values for its backward pass
        self.gradients: dict[tuple[int, object], tuple[int, ...]] = {}  # by chunk and part: of this microbatch
        self.summed: dict[tuple[int, object], tuple[int, ...]] = {}  # over the replicas
        self.totals: dict[tuple[int, object], int] = {}  # over the microbatches
        self.stream: dict[int, int] = {}  # by chunk: what its last layer makes
        self.slope: dict[int, int] = {}  # by chunk: the gradient of its input
        layer, embedding, head = parameter_counts(self.model)
        self.counts: dict[tuple[int, object], int] = {}
        for chunk, (begin, end) in enumerate(self.bounds):
            if chunk == 0:
                self.counts[chunk, "embedding"] = embedding
            self.counts |= {(chunk, number): layer for number in range(begin, end)}
            if chunk == len(self.bounds) - 1 and not (chunk == 0 and self.model.tied):
                self.counts[chunk, "head"] = head
        self.weights = {key: self._state(key, count) for key, count in self.counts.items()}
        width = self.model.width
        self.received = [self._new(self._bytes(width), s, "activations") for s in range(len(self.bounds))]
        self.returned = [self._new(self._bytes(width), s, "workspace") for s in range(len(self.bounds))]

    def _state(self, key, count: int) -> int:
        """Weights and moments; with several microbatches also the sum of gradients so far."""
        stage, mine = self.stage(key[0]), count / self.plan.tensor
        moments = MOMENT_BYTES * mine / (self.plan.data if self.plan.shard == "optimizer" else 1)
        self.slots.resident(round(moments), stage, "optimizer")
        if self.microbatches > 1:
            self.totals[key] = self.slots.resident(round(WEIGHT_BYTES * mine), stage, "gradients")
        return self.slots.resident(round(WEIGHT_BYTES * mine), stage)

    def _new(self, nbytes: float, chunk: int, category: str) -> int:
        return self.slots.value(round(nbytes), self.stage(chunk), category=category)

    def _bytes(self, values: float) -> float:
        """Bytes of `values` per token on one device."""
        return self.size * values * self.tokens / self.plan.tensor

    def _emit(self, ops: list[RankOp], chunk: int) -> Emit:
        return Emit(
            ops,
            lambda nbytes, category: self._new(nbytes, chunk, category),
            self.stage(chunk),
            (self.plan.rows, self.plan.cols),
            chunk,
        )

    def _traffic(self, emit: Emit, kind: str, moved, inputs, kept: float, category: str, label: tuple) -> int:
        """A kernel bound by memory that moves `moved` values per token and leaves `kept`."""
        elements = max(1, round(moved * self.tokens / self.plan.tensor))
        spec = OpSpec(kind, ((elements,),), self.size)
        return emit.add(spec, inputs, self._bytes(kept), category, label=label)

    def _norm(self, emit: Emit, moved: float, x: int, category: str, label: tuple) -> int:
        """A norm; where features are sharded its sums are all-reduced."""
        sums = emit_norm_sums(emit, self.products, self.model, (x,), label)
        return self._traffic(emit, "Norm", moved, (x, *sums), self.model.width, category, label)

    def _norm_gradient(self, emit: Emit, moved: float, inputs: tuple[int, ...], label: tuple) -> int:
        """The gradient of a norm's input, from that input and the gradients of its output and past it."""
        sums = emit_norm_sums(emit, self.products, self.model, inputs[:2], label)
        width = self.model.width
        return self._traffic(emit, "NormGrad", moved, (*inputs, *sums), width, "workspace", label)

    def begin(self) -> list[RankOp]:
        """Makes the embedding's table ready for the lookups of all microbatches."""
        ops: list[RankOp] = []
        emit = dataclasses.replace(self._emit(ops, 0), value=self._once)
        self.table = emit_table(emit, self.products, self.weights[0, "embedding"])
        return ops

    def _once(self, nbytes: float, category: str) -> int:
        return self.slots.once(round(nbytes), 0, category)

    def forward(self, chunk: int) -> list[RankOp]:
        """The forward pass of a chunk."""
        ops: list[RankOp] = []
        emit, x = self._emit(ops, chunk), self.received[chunk]
        begin, end = self.bounds[chunk]
        if chunk == 0:
            width, label = self.model.width, ("embedding", "lookup")
            x = self._traffic(emit, "Norm", width, (self.table,), width, "activations", label)
        for layer in range(begin, end):
            x, self.kept[layer] = self._layer(emit, layer, x, self.plan.remat)
        if chunk == len(self.bounds) - 1:
            x = self._head(emit, x)
        self.stream[chunk] = x
        return ops

    def _layer(self, emit: Emit, layer: int, x: int, remat: str) -> tuple[int, dict[str, int]]:
        """(what the layer makes, what its backward pass needs)."""
        kept = {"x": x}
        values = self._recomputable(emit, layer, kept, remat)
        category = "activations" if remat == "dots" else "workspace"
        z, out = self._out(emit, layer, values, self.model.width, (category, "activations"))
        saved = {"none": values, "dots": {**{n: values[n] for n in ("x", "qkv", "o", "y", "u")}, "z": z}, "full": kept}
        return out, saved[remat]

    def _out(self, emit: Emit, layer: int, values: dict[str, int], width: int, categories) -> tuple[int, int]:
        """The last product and the residual sum behind it; both leave `width` values per token."""
        down, inputs = self.blocks["mlp out"], (values["a"], self.weights[emit.chunk, layer])
        z = emit_gemm(emit, down, gemms_of(down)[0], inputs, self._bytes(width), categories[0], (layer,))
        moved, inputs = 0.3 * elementwise_values(self.model, self.style)[0], (values["x2"], z)
        return z, self._traffic(emit, "Residual", moved, inputs, width, categories[1], (layer, "mlp sum"))

    def _recomputable(self, emit: Emit, layer: int, kept: dict[str, int], remat: str) -> dict[str, int]:
        """Everything of a layer up to the input of its last product, but for what is in `kept` already."""
        m, blocks, weight = self.model, self.blocks, self.weights[emit.chunk, layer]
        qkv, heads, up = self._widths()
        around, inside = elementwise_values(m, self.style)
        cheap = "activations" if remat == "none" else "workspace"
        dear = "workspace" if remat == "full" else "activations"
        found = dict(kept)

        def make(name, write):
            if name not in found:
                found[name] = write()

        def product(name, source, values, category):
            return emit_gemm(
                emit,
                blocks[name],
                gemms_of(blocks[name])[0],
                (found[source], weight),
                self._bytes(values),
                category,
                (layer,),
            )

        def norm(source, name):
            return self._norm(emit, 0.2 * around, found[source], cheap, (layer, name))

        def traffic(kind, moved, sources, values, name):
            inputs = [found[source] for source in sources]
            return self._traffic(emit, kind, moved, inputs, values, cheap, (layer, name))

        make("h", lambda: norm("x", "attention norm"))
        make("qkv", lambda: product("attention in", "h", qkv, dear))
        make("o", lambda: self._attention(emit, layer, found["qkv"], heads, dear))
        make("y", lambda: product("attention out", "o", m.width, dear if remat == "dots" else "workspace"))
        make("x2", lambda: traffic("Residual", 0.3 * around, ["x", "y"], m.width, "attention sum"))
        make("h2", lambda: norm("x2", "mlp norm"))
        make("u", lambda: product("mlp in", "h2", up, dear))
        make("a", lambda: traffic("Activation", inside, ["u"], m.mlp_dim, "activation"))
        return found

    def _widths(self) -> tuple[int, int, int]:
        """Features behind the projection into attention, behind attention, and behind that into the MLP."""
        qkv, out, up = (self.blocks[name].layout.projection for name in ("attention in", "attention out", "mlp in"))
        return qkv.out_dim, out.in_dim, up.out_dim

    def _attention(self, emit: Emit, layer: int, qkv: int, heads: int, category: str) -> int:
        scores = 0.0
        if self.plan.remat != "dots" and not fused_attention(self.request):
            scores = SCORE_BYTES * self.model.heads * self.seq * self.tokens / self.plan.tensor
        spec, nbytes = self._attention_spec("Attention"), self._bytes(heads) + scores
        return emit.add(spec, (qkv,), nbytes, category, label=(layer, "attention"))

    def _attention_spec(self, kind: str) -> OpSpec:
        rows, stage = max(1, self.tokens * self.model.heads // self.plan.tensor), self.costed.stages[0]
        seconds = stage.useful_forward.attention / stage.layers
        seen = round(seconds * self.costed.product_rate / (4.0 * rows * self.model.head_dim))  # at the rate of products
        return OpSpec(kind, ((rows, self.model.head_dim), (max(1, seen),)), self.size)

    def _head(self, emit: Emit, x: int) -> int:
        """Final norm, projection and loss; returns the logits."""
        head, stream = self.products.head, x
        x = self._norm(emit, NORM_VALUES * self.model.width, stream, "workspace", ("head", "norm"))
        vocab_size = head.layout.projection.out_dim
        weight = self.weights[emit.chunk, "embedding" if (emit.chunk, "head") not in self.weights else "head"]
        logits = self._logits(emit, (x, weight))
        moved = self.style.logit_bytes / 2 * vocab_size / self.size
        inputs = (logits, *emit_loss_sums(emit, head, logits))
        loss = self._traffic(emit, "Logits", moved, inputs, 0.0, "workspace", ("head", "loss"))
        self.head = {"stream": stream, "x": x, "logits": logits, "loss": loss, "weight": weight}
        return logits

    def _logits(self, emit: Emit, inputs: tuple[int, int]) -> int:
        head = self.products.head
        vocab_size = head.layout.projection.out_dim
        whole = self._bytes(vocab_size) + 4 * vocab_size * self.tokens / self.plan.tensor
        nbytes = loss_bytes(head, self.size)[0] if self.style.native else whole
        return emit_gemm(emit, head, gemms_of(head)[0], inputs, nbytes, "workspace", ("head",))

    def backward(self, chunk: int, last_microbatch: bool) -> list[RankOp]:
        """The backward pass of a chunk, its gradients summed and accumulated."""
        ops: list[RankOp] = []
        emit = self._emit(ops, chunk)
        begin, end = self.bounds[chunk]
        slope = self.returned[chunk]
        if chunk == len(self.bounds) - 1:
            slope = self._head_backward(emit)
        for layer in reversed(range(begin, end)):
            slope = self._layer_backward(emit, layer, slope)
        if chunk == 0:
            key = (0, "embedding")
            shared = len(self.bounds) == 1 and (0, "head") not in self.counts
            before = self.gradients[key] if shared else ()  # of the output projection
            spec = OpSpec("NormGrad", ((max(1, round(self._bytes(self.model.width) / self.size)),),), self.size)
            nbytes = WEIGHT_BYTES * self.counts[key] / self.plan.tensor
            inputs = (slope, *before)
            self.gradients[key] = (emit_table_gradient(emit, self.products, spec, inputs, nbytes),)
        self.slope[chunk] = slope
        for key in [key for key in self.counts if key[0] == chunk]:
            self._complete(emit, key, last_microbatch)
        return ops

    def _head_backward(self, emit: Emit) -> int:
        head, chunk = self.products.head, emit.chunk
        _, into, weight = gemms_of(head)
        vocab_size = head.layout.projection.out_dim
        logits, kept = self.head["logits"], vocab_size
        if self.style.native:  # computed again, in chunks, whose gradient is in their bytes
            logits, kept = self._logits(emit, (self.head["x"], self.head["weight"])), 0.0
        sources = (logits, self.head["loss"])
        moved, part = self.style.logit_bytes / 2 * vocab_size / self.size, ("head",)
        logits = self._traffic(emit, "LogitsGrad", moved, sources, kept, "workspace", ("head", "loss"))
        inputs, nbytes = (logits, self.head["weight"]), self._bytes(self.model.width)
        slope = emit_gemm(emit, head, into, inputs, nbytes, "workspace", part)
        own = (chunk, "head") in self.counts
        key = (chunk, "head" if own else "embedding")
        nbytes = WEIGHT_BYTES * self.model.width * self.model.known_vocab_size / self.plan.tensor
        inputs, category = (self.head["x"], logits), "gradients" if own else "workspace"
        self.gradients[key] = (emit_gemm(emit, head, weight, inputs, nbytes, category, part),)
        inputs, moved = (self.head["stream"], slope), NORM_GRADIENT_VALUES * self.model.width
        return self._norm_gradient(emit, moved, inputs, ("head", "norm"))

    def _layer_backward(self, emit: Emit, layer: int, slope: int) -> int:
        """Recomputation, then every gradient in reverse; returns that of the layer's input."""
        m, blocks = self.model, self.blocks
        found = self._again(emit, layer, slope)
        around, inside = elementwise_values(m, self.style)
        qkv, heads, up = self._widths()
        parts: list[int] = []

        def product(name, source, gradient, values):
            _, into, of_weight = gemms_of(blocks[name])
            weight = self.weights[emit.chunk, layer]
            inputs, part = (gradient, weight), (layer,)
            back = emit_gemm(emit, blocks[name], into, inputs, self._bytes(values), "workspace", part)
            projection = blocks[name].layout.projection
            share = projection.in_dim * projection.out_dim / self.plan.tensor
            inputs = (found[source], gradient, *parts[-1:])
            nbytes = WEIGHT_BYTES * share
            parts.append(emit_gemm(emit, blocks[name], of_weight, inputs, nbytes, "gradients", part))
            return back

        da = product("mlp out", "a", slope, m.mlp_dim)
        label, inputs = (layer, "activation"), (found["u"], da)
        du = self._traffic(emit, "ActivationGrad", self.style.backward_passes * inside, inputs, up, "workspace", label)
        dh2 = product("mlp in", "h2", du, m.width)
        around *= self.style.backward_passes / 2
        dx2 = self._norm_gradient(emit, around, (found["x2"], dh2, slope), (layer, "mlp norm"))
        do = product("attention out", "o", dx2, heads)
        spec, inputs = self._attention_spec("AttentionGrad"), (found["qkv"], found["o"], do)
        dqkv = emit.add(spec, inputs, self._bytes(qkv), "workspace", label=(layer, "attention"))
        dh = product("attention in", "h", dqkv, m.width)
        dx = self._norm_gradient(emit, around, (found["x"], dh, dx2), (layer, "attention norm"))
        self.gradients[emit.chunk, layer] = tuple(parts)
        return dx

    def _again(self, emit: Emit, layer: int, slope: int) -> dict[str, int]:
        """What the backward pass needs, recomputed where remat kept less, once the gradient has come."""
        kept = self.kept[layer]
        if self.plan.remat == "none":
            return kept
        names = [kept["x"], *([kept["z"]] if "z" in kept else []), slope]
        spec = OpSpec("Identity", ((1,),), self.size)
        gate = emit.add(spec, names, 0.0, "workspace", label=(layer, "recompute"))
        first = len(emit.ops)
        found = self._recomputable(emit, layer, {n: v for n, v in kept.items() if n != "z"}, "full")
        for index in range(first, len(emit.ops)):
            op = emit.ops[index]
            if kept["x"] in op.inputs:
                emit.ops[index] = op._replace(inputs=(*op.inputs, gate))
        if self.plan.remat == "full" and not self.style.dead_code:  # the whole forward pass, its last product too
            self._out(emit, layer, found, 0, ("workspace", "workspace"))
        return found

    def _complete(self, emit: Emit, key, last_microbatch: bool) -> None:
        """Sums a part's gradients over the replicas and adds them to those of earlier microbatches."""
        parts = self.gradients[key]
        elements = max(1, round(self.counts[key] / self.plan.tensor))
        trainer = len(self.bounds) == 1 and self.plan.shard == "none"
        spec = OpSpec("AllReduce", ((elements,),), WEIGHT_BYTES)
        if self.plan.data > 1 and trainer:
            parts = (emit.add(spec, parts, 0.0, "gradients", DATA, ("gradients", *key)), *parts)
        if self.microbatches > 1:
            moved, inputs = OpSpec("Residual", ((3 * elements,),), WEIGHT_BYTES), (*parts, self.totals[key])
            parts = (emit.add(moved, inputs, 0.0, "gradients", label=("gradients", *key)),)
        if self.plan.data > 1 and not trainer and last_microbatch:
            parts = (emit.add(spec, parts, 0.0, "gradients", DATA, ("gradients", *key)), *parts)
        self.summed[key] = parts

    def variant(self, chunk: int, direction: int, microbatch: int) -> tuple:
        return () if direction == FORWARD else (microbatch == self.microbatches - 1,)

    def messages(self, chunk: int, other: int, direction: int) -> list[tuple[OpSpec, int, int]]:
        """The activation to the next chunk, or the gradient back to the one before."""
        value = self.stream[chunk] if direction == FORWARD else self.slope[chunk]
        arrival = self.received[other] if direction == FORWARD else self.returned[other]
        elements = max(1, round(self._bytes(self.model.width) / self.size))
        return [(OpSpec("Send", ((elements,),), self.size), value, arrival)]

    def _message(self, chunk: int, other: int, spec: OpSpec, value: int, arrival: int) -> RankOp:
        here, there = self.stage(chunk), self.stage(other)
        return RankOp(spec, SEND, here, (value,), (arrival,), there, ("to chunk", other))

    def tie(self) -> list[RankOp]:
        """Adds up the gradients of the two copies of a tied table, on the first and the last stage."""
        last = len(self.bounds) - 1
        copy, table = (last, "head"), (0, "embedding")
        if not self.model.tied or last == 0:
            return []
        elements = max(1, round(self.counts[copy] / self.plan.tensor))
        spec = OpSpec("Send", ((elements,),), WEIGHT_BYTES)
        arrived, returned = (self._new(WEIGHT_BYTES * elements, chunk, "workspace") for chunk in (0, last))
        ops = [self._message(last, 0, spec, self.summed[copy][0], arrived)]
        added, inputs = OpSpec("Residual", ((3 * elements,),), WEIGHT_BYTES), (*self.summed[table], arrived)
        total = self._emit(ops, 0).add(added, inputs, 0.0, "gradients", label=("gradients", "tied"))
        ops.append(self._message(0, last, spec, total, returned))
        self.summed[table] = (total, *self.summed[table])
        self.summed[copy] = (returned, *self.summed[copy])
        return ops

    def finish(self) -> list[RankOp]:
        """What ties need, and one optimizer operation per stage."""
        shards = self.plan.data if self.plan.shard == "optimizer" else 1
        ops = self.tie()
        for stage in range(self.plan.pipeline):
            keys = [key for key in self.counts if self.stage(key[0]) == stage]
            moved = STATE_ELEMENTS * sum(self.counts[key] for key in keys) / self.plan.tensor / shards
            spec = OpSpec("Adam", ((max(1, round(moved)),),), WEIGHT_BYTES)
            inputs = [*(self.weights[key] for key in keys), *(part for key in keys for part in self.summed[key])]
            ops.append(RankOp(spec, LOCAL, stage, tuple(inputs), label=("update",)))
        return ops


def transformer_step(request: PlanRequest, costed: Costed, microbatches: int) -> Step:
    """The step of `costed.plan` with so many microbatches of the plan's size."""
    writer = TransformerStep(request, costed, microbatches)
    return writer.write(schedule(costed.plan.schedule, costed.plan.pipeline, microbatches, writer.chunks))
