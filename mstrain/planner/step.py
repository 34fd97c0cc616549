"""The simulated step of a plan: the operations of one device of every stage, with the times of the cost model.

A layer is a chain of products, attention and element-wise work. Products are written slice by slice, with their
collectives (`mstrain.planner.products`); all other operations take the seconds of the cost model, and values have the
bytes of the memory model. Gradients are summed over the replicas, and sharded weights are all-gathered, as often as in
the cost model; the all_gather of a layer starts with the layer before it, its gradient sum when its gradients are
complete. Experts that are sharded over replicas are all-gathered and summed over the replicas that have the same
experts. The exposed exchange of their tokens, and copies of all-gathered weights, take device time before the products.
"""

import itertools

from mstrain.hardware.expert_links import owner_links
from mstrain.parallel.gemms import gemms_of
from mstrain.parallel.schedules import FORWARD, WHOLE, schedule, ticks, with_waits
from mstrain.planner.cost import Costed
from mstrain.planner.layer import PIECES
from mstrain.planner.memory import (
    WEIGHT_BYTES,
    Count,
    gathered_table,
    loss_bytes,
    parameter_counts,
    saved_values,
    stage_parameters,
    state_bytes,
)
from mstrain.planner.products import ProductStep
from mstrain.planner.remat import parse_remat
from mstrain.planner.request import PlanRequest
from mstrain.simulator.placement import DATA, LOCAL, SEND, STAGES, Degrees
from mstrain.simulator.program import OpSpec, timed
from mstrain.simulator.replicas import Step

INPUT = -1  # index of a layer's input in its list of results
ELEMENTWISE = 4  # number of element-wise pieces, among which the time of element-wise work is divided evenly
KINDS = {"attention": "Attention", "elementwise": "Elementwise"}
Part = tuple[int, object]  # (chunk, number of a layer or "embedding" or "head")
Values = tuple[int, ...]  # numbers of values of the simulated step
GATHERED_BYTES = 2  # per all-gathered weight that is sharded over the replicas


class Layer:
    """A layer of one of `PlanRequest.layer_groups`: its pieces with their products, seconds and bytes.

    Attributes:
      pieces: the entries of PIECES that the layer has, in order.
      last: index of the last piece, whose result is that of the layer.
      bytes: bytes of the result of each piece.
      saved: the parts that are saved in device memory for the backward pass.
      count: parameters of the layer.
      experts: parameters of its experts.
      ahead: seconds of device time before a product by its name: (forward, backward, recomputation).
    """

    def __init__(self, costed: Costed, number: int):
        step, plan = costed.step, costed.plan
        request = step.request.layer_groups[number][0]
        self.work, self.blocks = step.works[number], costed.products.kinds[number].by_name
        self.repeated, self.host = step.repeated[number], step.host[number]
        self.pieces = [piece for piece in PIECES if piece[0] in KINDS or piece[0] in self.blocks]
        self.last = len(self.pieces) - 1
        sizes, remat = saved_values(request, plan), parse_remat(plan.remat)
        self.saved = remat.saved - remat.offloaded
        wide, seen = sizes["input"], [made for name, made in self.pieces if name in self.blocks]
        values = [sizes[made] / max(1, seen.count(made)) for _, made in self.pieces]
        norm, residual, hidden = (i for i, (_, made) in enumerate(self.pieces) if made == "elementwise")
        values[norm], values[residual] = wide, 2 * wide  # a residual sum and its norm
        values[hidden] = sizes["elementwise"] - 3 * wide
        values[self.pieces.index(("attention", "context"))] += sizes["scores"] if "scores" in self.saved else 0.0
        self.bytes = [request.element_bytes * costed.products.tokens * each for each in values]
        self.count = parameter_counts(request.model)[0]
        only = (int(each == number) for each in range(len(step.works)))
        held = stage_parameters(step.request.model, tuple(only), False, False)
        self.experts = held.experts
        copies = step.copies(plan, held.over(plan.tensor))
        (first, second), stacked = (each / 2 for each in self.work.exchange), step.stacked[number].elementwise
        self.ahead = {"mlp in": (first + stacked, second + stacked + copies, first), "mlp out": (first, second, first)}

    def seconds(self, piece: str, work) -> float:
        """Seconds of a piece that is not a product, in a pass `work`."""
        if piece == "attention":  # includes the exposed transfers to and from host memory
            return work.attention + work.context + self.host / 2
        return work.elementwise / ELEMENTWISE


class TransformerStep(ProductStep):
    """Writes the operations of one device of every stage, pass by pass."""

    def __init__(self, request: PlanRequest, costed: Costed):
        plan = costed.plan
        degrees = Degrees(plan.replicas, plan.tensor, plan.pipeline, plan.microbatches, plan.chunks, plan.cols)
        chip = request.pod.chip if request.style.native else None
        super().__init__(degrees, plan.pipeline * plan.chunks, chip)
        self.request, self.costed, self.plan, self.products = request, costed, plan, costed.products
        self.work, self.size = costed.step.works[-1], request.element_bytes  # `work` is used for the head only
        self.bounds = sorted(bounds for stage in costed.stages for bounds in stage.chunks)
        kinds = ([Layer(costed, number)] * count for number, (_, count) in enumerate(request.layer_groups))
        self.layers = [*itertools.chain(*kinds)]
        self.message_bytes = self.layers[-1].bytes[-1]
        self.kept: dict[int, dict[int, int]] = {}  # by layer: values saved for its backward pass, by index of the piece
        self.gradients: dict[Part, Values] = {}
        self.divided = plan.pipeline > 1 and plan.schedule not in WHOLE  # whether weight gradients are a separate pass
        self.deferred: dict[tuple, list[tuple]] = {}  # by layer and variant: arguments of `_weight_gradient`
        self.stream: dict[int, int] = {}  # by chunk: the result of its last layer
        self.slope: dict[int, int] = {}  # by chunk: the gradient of its input
        self.counts = self._counts()
        self.totals: dict[Part, int] = {}  # gradients accumulated over the microbatches
        self.weights = {key: self._state(key, count / plan.tensor) for key, count in self.counts.items()}
        self.ready: dict[Part, Values] = {key: (slot,) for key, slot in self.weights.items()}  # weights products read
        self.received = [self.new(self.message_bytes, s, "activations") for s in range(self.chunks)]
        self.returned = [self.new(self.message_bytes, s, "workspace") for s in range(self.chunks)]

    def _counts(self) -> dict[Part, int]:
        _, embedding, head = parameter_counts(self.request.model)
        counts: dict[Part, int] = {(0, "embedding"): embedding}
        for chunk, bounds in enumerate(self.bounds):
            counts |= {(chunk, number): self.layers[number].count for number in range(*bounds)}
        if not (self.request.model.tied and self.chunks == 1):
            counts[self.chunks - 1, "head"] = head
        return counts

    def _state(self, key, count: float) -> int:
        """Allocates weights and optimizer state and, with several microbatches, the accumulated gradients of a part.

        `count` is its number of parameters on one device. Returns the number of the weights.
        """
        stage = self.stage(key[0])
        parameters = Count(0.0, 0.0, count)
        if isinstance(key[1], int):
            experts = self.layers[key[1]].experts / self.plan.tensor
            parameters = Count(count - experts, experts, 0.0)
        weights, gradients, optimizer = state_bytes(self.request, self.plan, parameters)
        self.slots.resident(round(optimizer), stage, "optimizer")
        if self.plan.microbatches > 1:
            one = 0.0 if self.plan.shards_gradients else WEIGHT_BYTES * count  # one microbatch's gradients are separate
            self.totals[key] = self.slots.resident(round(gradients - one), stage, "gradients")
        return self.slots.resident(round(weights), stage)

    def begin(self) -> None:
        """All-gathers the embedding table, and the weights whose update is sharded over the replicas."""
        table = self.size * gathered_table(self.products.head)
        self.ready[0, "embedding"] += (self.slots.resident(round(table), 0, "workspace"),)
        for key in self.counts if self.plan.shard in ("optimizer", "gradients") else ():
            self.ready[key] += self._gather(key)

    def _held(self, key) -> tuple[float, float]:
        """(parameters of a part on one device, number of parameters whose all_gather over all replicas takes as long).

        The numbers differ for sharded experts, which are all-gathered over fewer replicas.
        """
        plan, pod, count = self.plan, self.request.pod, self.counts[key] / self.plan.tensor
        if plan.expert == 1 or not isinstance(key[1], int):
            return count, count
        experts, copies = self.layers[key[1]].experts / plan.tensor, plan.replicas // plan.expert
        links = self.costed.step.at.links.replica, owner_links(pod, plan.sizes, plan.expert)
        over = plan.replicas, copies
        every, few = ((n - 1) / n / link.all_gather.bandwidth for n, link in zip(over, links))
        held = experts / plan.expert
        return count - experts + held, count - experts + held * few / every

    def _gather(self, key, gate: int | None = None) -> Values:
        """Adds the all_gather of a part's weights over the replicas; returns its result, empty for one replica.

        With `gate`, it runs for every microbatch after the value `gate`; without, once for all microbatches.
        """
        if self.plan.replicas == 1:
            return ()
        (held, moved), stage = self._held(key), self.stage(key[0])
        spec = OpSpec("AllGather", ((max(1, round(moved / self.plan.replicas)),),), GATHERED_BYTES)
        if gate is None:  # 0 bytes: the memory model counts them as weights
            inputs, made = (self.weights[key],), self.slots.once(0, stage, "workspace")
        else:
            inputs, made = (self.weights[key], gate), self.new(GATHERED_BYTES * held, key[0], "workspace")
        self.add(spec, DATA, stage, inputs, (made,), label=("weights", key[1]))
        return (made,)

    def _gathered(self, chunk: int, layers: list[int], number: int, gate: int) -> None:
        """With `shard=parameters`, starts the all_gather of the weights of `layers[number]`, if there is one."""
        if self.plan.shard == "parameters" and number < len(layers):
            key = chunk, layers[number]
            self.ready[key] = (self.weights[key], *self._gather(key, gate))

    def forward(self, chunk: int) -> None:
        x, layers = self.received[chunk], list(range(*self.bounds[chunk]))
        if chunk == 0:
            label = ("embedding", "lookup")
            spec = OpSpec("Identity", ((1,),), self.size)
            x = self.emit(chunk, spec, self.ready[0, "embedding"], self.message_bytes, "activations", label=label)
        self._gathered(chunk, layers, 0, x)
        for number, layer in enumerate(layers):
            self._gathered(chunk, layers, number + 1, x)
            made, kind = {INPUT: x}, self.layers[layer]
            for place in range(len(kind.pieces)):
                made[place] = self._piece(chunk, layer, place, made, kind.saved)
            kept = [place for place in range(kind.last) if kind.pieces[place][1] in kind.saved]
            self.kept[layer] = {place: made[place] for place in (INPUT, *kept)}
            x = made[kind.last]
        self.stream[chunk] = self._head(self._to_all_stages(chunk, x)) if chunk == self.chunks - 1 else x

    def _to_all_stages(self, chunk: int, value: int) -> int:
        """Broadcasts an activation or its gradient to all stages in lockstep: an all_reduce to which others add 0."""
        if not self.costed.step.lockstep:
            return value
        elements, count = max(1, round(self.message_bytes / self.size)), self.plan.pipeline
        for kind, shard in (("ReduceScatter", elements), ("AllGather", max(1, elements // count))):
            spec = OpSpec(kind, ((shard,),), self.size)
            value = self.emit(chunk, spec, (value,), self.message_bytes, "workspace", STAGES, ("to all stages",))
        return value

    def _piece(self, chunk: int, layer: int, place: int, made: dict[int, int], saved, gate: Values = ()) -> int:
        """Adds piece `place` of a layer's forward pass, from the results `made` of earlier pieces; returns its result.

        The result is an activation if its part is in `saved`, else workspace. `gate`: values for which it also waits.
        """
        kind, inputs = self.layers[layer], (made.get(place - 1, made[INPUT]), *gate)
        piece, part = kind.pieces[place]
        category, nbytes = "activations" if part in saved else "workspace", kind.bytes[place]
        if piece in kind.blocks:
            product, inputs = kind.blocks[piece], (*inputs, *self.ready[chunk, layer])
            inputs += self._ahead(chunk, layer, piece, 2 if gate else 0, inputs)
            return self.emit_gemm(chunk, product, gemms_of(product.layout)[0], inputs, nbytes, category, (layer,))
        seconds = kind.seconds(piece, kind.work.forward)
        return self.emit(chunk, timed(KINDS[piece], seconds), inputs, nbytes, category, label=(layer, piece))

    def _ahead(self, chunk: int, layer: int, piece: str, when: int, inputs: Values) -> Values:
        """Adds the device time before a product; returns the value to wait for, or nothing if the time is 0.

        `when` is an index into `Layer.ahead`: forward, backward or recomputation.
        """
        seconds = self.layers[layer].ahead.get(piece, (0.0, 0.0, 0.0))[when]
        if not seconds:
            return ()
        wait, label = timed(KINDS["elementwise"], seconds), (layer, piece, "wait")
        return (self.emit(chunk, wait, inputs, 0.0, "workspace", label=label),)

    def _head(self, x: int) -> int:
        last = self.chunks - 1
        self.head_key = (last, "head") if (last, "head") in self.counts else (0, "embedding")
        self.head_ready = self.ready[self.head_key]
        self.head_input, logits = x, self._logits(x)
        loss = timed("Logits", self.work.head_forward.elementwise)
        return self.emit(last, loss, (logits,), 0.0, "workspace", label=("head", "loss"))

    def _logits(self, x: int) -> int:
        head, inputs, last = self.products.head, (x, *self.head_ready), self.chunks - 1
        nbytes = loss_bytes(head, self.size, self.request.pod.chip.platform)[0]
        return self.emit_gemm(last, head, gemms_of(head.layout)[0], inputs, nbytes, "workspace", ("head",))

    def backward(self, chunk: int, last_microbatch: bool) -> None:
        """The backward pass of a chunk; its gradients are summed and accumulated, unless they are deferred."""
        slope = self._head_backward() if chunk == self.chunks - 1 else self.returned[chunk]
        layers = list(reversed(range(*self.bounds[chunk])))
        self._gathered(chunk, layers, 0, slope)
        for number, layer in enumerate(layers):
            self._gathered(chunk, layers, number + 1, slope)
            slope = self._layer_backward(chunk, layer, slope, last_microbatch)
        if chunk == 0:
            key, spec, label = (0, "embedding"), OpSpec("Identity", ((1,),), self.size), ("embedding", "lookup")
            before = self.gradients[key] if self.head_key == key else ()  # gradient of the tied output projection
            inputs = self._to_all_stages(chunk, slope), *before
            nbytes = WEIGHT_BYTES * self.counts[key] / self.plan.tensor
            self.gradients[key] = (self.emit(chunk, spec, inputs, nbytes, self._gradient, label=label),)
        self.slope[chunk] = slope
        for key in [key for key in self.counts if key[0] == chunk and not (self.divided and isinstance(key[1], int))]:
            self._complete(key, last_microbatch)

    def weight_gradients(self, chunk: int, last_microbatch: bool) -> None:
        """The deferred weight gradients of a chunk's layers, which are summed and accumulated."""
        for layer in reversed(range(*self.bounds[chunk])):
            operands = self.deferred[layer, last_microbatch]
            self.gradients[chunk, layer] = tuple(self._weight_gradient(chunk, *each) for each in operands)
            self._complete((chunk, layer), last_microbatch)

    def wait(self, chunk: int, direction: int) -> None:
        """Adds device time as long as a pass of that direction: in lockstep, a stage computes an unused result."""
        stage = self.costed.stages[self.stage(chunk)]
        seconds = (stage.forward, stage.backward - stage.weights, stage.weights)[direction]
        self.add(timed(KINDS["elementwise"], seconds), LOCAL, self.stage(chunk), label=("lockstep", "wait"))

    @property
    def _gradient(self) -> str:
        return "workspace" if self.plan.shards_gradients else "gradients"

    def _head_backward(self) -> int:
        head, part, last = self.products.head, ("head",), self.chunks - 1
        logits = self._logits(self.head_input)  # recomputed, in chunks
        loss, inputs = timed("LogitsGrad", self.work.head_backward.elementwise), (logits, self.stream[last])
        slope = self.emit(last, loss, inputs, 0.0, "workspace", label=("head", "loss"))
        back = self._input_gradient(last, head, part, slope, self.head_ready)
        self.gradients[self.head_key] = (self._weight_gradient(last, head, part, self.head_input, slope),)
        return back

    def _input_gradient(self, chunk: int, product, part, slope: int, weights) -> int:
        nbytes = self.size * self.products.tokens * product.layout.projection.in_dim / self.plan.tensor
        return self.emit_gemm(chunk, product, gemms_of(product.layout)[1], (slope, *weights), nbytes, "workspace", part)

    def _weight_gradient(self, chunk: int, product, part, source: int, slope: int) -> int:
        projection = product.layout.projection
        nbytes = WEIGHT_BYTES * projection.in_dim * projection.out_dim / self.plan.tensor
        tied = product is self.products.head and self.head_key[1] == "embedding"  # the embedding adds to it later
        category = "workspace" if tied else self._gradient
        return self.emit_gemm(chunk, product, gemms_of(product.layout)[2], (source, slope), nbytes, category, part)

    def _layer_backward(self, chunk: int, layer: int, slope: int, last_microbatch: bool) -> int:
        """Recomputation, then all gradients in reverse order; returns the gradient of the layer's input."""
        made, gradients, deferred, kind = self._again(chunk, layer, slope), [], [], self.layers[layer]
        for place in reversed(range(len(kind.pieces))):
            (piece, _), source = kind.pieces[place], made.get(place - 1, made[INPUT])
            if piece in kind.blocks:
                weights, product = self.ready[chunk, layer], kind.blocks[piece]
                operands = product, (layer,), source, slope
                weights += self._ahead(chunk, layer, piece, 1, (slope, source))
                slope = self._input_gradient(chunk, product, (layer,), slope, weights)
                deferred.append(operands) if self.divided else gradients.append(self._weight_gradient(chunk, *operands))
                continue
            seconds, inputs = kind.seconds(piece, kind.work.backward), (slope, source)
            spec, nbytes = timed(f"{KINDS[piece]}Grad", seconds), kind.bytes[place - 1]  # the input has bytes[-1]
            slope = self.emit(chunk, spec, inputs, nbytes, "workspace", label=(layer, piece))
        self.gradients[chunk, layer], self.deferred[layer, last_microbatch] = tuple(gradients), deferred
        return slope

    def _again(self, chunk: int, layer: int, slope: int) -> dict[int, int]:
        """The saved values of a layer, and those that are recomputed after its gradient `slope` has arrived."""
        made, kind = dict(self.kept[layer]), self.layers[layer]
        for place in range(kind.last):
            if kind.pieces[place][0] in kind.repeated:
                made[place] = self._piece(chunk, layer, place, made, (), (slope,))
        return made

    def _complete(self, key, last_microbatch: bool) -> None:
        """Sums a part's gradients over the replicas and accumulates them over the microbatches."""
        parts, plan, label = self.gradients[key], self.plan, ("gradients", key[1])
        each = self.plan.shards_gradients or (plan.shard == "none" and plan.pipeline == 1)
        if plan.replicas > 1 and (each or last_microbatch):
            elements = max(1, round(self._held(key)[1]))
            kind = "AllReduce" if plan.shard == "none" else "ReduceScatter"
            spec = OpSpec(kind, ((elements,),), round(self.request.style.gradient_bytes))
            summed = self.emit(key[0], spec, parts, 0.0, "gradients", DATA, label)
            parts = (summed,) if self.plan.shards_gradients else (summed, *parts)
        if plan.microbatches > 1:
            spec, inputs = OpSpec("Identity", ((1,),), WEIGHT_BYTES), (*parts, self.totals[key])
            parts = (self.emit(key[0], spec, inputs, 0.0, "gradients", label=label),)
        self.gradients[key] = parts

    def variant(self, chunk: int, direction: int, microbatch: int) -> tuple:
        return () if direction == FORWARD else (microbatch == self.plan.microbatches - 1,)

    def messages(self, chunk: int, other: int, direction: int) -> list[tuple[OpSpec, int, int]]:
        """The message with the activation for the next chunk, or with the gradient for the previous one."""
        value = self.stream[chunk] if direction == FORWARD else self.slope[chunk]
        arrival = self.received[other] if direction == FORWARD else self.returned[other]
        return [(OpSpec("Send", ((max(1, round(self.message_bytes / self.size)),),), self.size), value, arrival)]

    def finish(self) -> None:
        """Sends the gradients of a tied table between the first and the last stage, then updates the weights.

        In lockstep every stage computes the gradients of the table, so none are sent. The update is one operation per
        stage.
        """
        copies = (0, "embedding"), (self.chunks - 1, "head")
        exchange = self.plan.pipeline > 1 and not self.costed.step.lockstep
        if self.request.model.tied and copies[1] in self.counts and exchange:
            elements = max(1, round(self.counts[copies[1]] / self.plan.tensor))
            spec, sent = OpSpec("Send", ((elements,),), WEIGHT_BYTES), [self.gradients[key][0] for key in copies]
            for (here, _), key, value in zip(copies, reversed(copies), sent):
                arrived = self.new(WEIGHT_BYTES * elements, key[0], "workspace")
                there, label = self.stage(key[0]), ("gradients", "tied")
                self.add(spec, SEND, self.stage(here), (value,), (arrived,), there, label)
                self.gradients[key] += (arrived,)
        for stage, terms in enumerate(self.costed.stage_terms):
            keys = [key for key in self.counts if self.stage(key[0]) == stage]
            inputs = [value for key in keys for value in (self.weights[key], *self.gradients[key])]
            self.add(timed("Adam", terms.update), LOCAL, stage, inputs, label=("update",))


def transformer_step(request: PlanRequest, costed: Costed) -> Step:
    """The simulated step of a plan."""
    writer, plan = TransformerStep(request, costed), costed.plan
    degrees = plan.schedule, plan.pipeline, plan.microbatches, writer.chunks
    if writer.divided and request.style.lockstep:  # lockstep does not lengthen the other schedules
        return writer.write(with_waits(ticks(*degrees), plan.pipeline))
    return writer.write(schedule(*degrees))
