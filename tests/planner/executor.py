"""Executes the program of a transformer's step, device by device: every operation on the values it names.

What an operation is to the model is its label (`mstrain.planner`); what it works on are its inputs, the
shards of its own device; only collectives and messages see those of others. Weights and gradients of a
product are blocks of its canonical (in, out) matrix, fused segments interleaved by column shard.
"""

import numpy as np

from mstrain.parallel.dataflow import DIMS, MOVING
from mstrain.planner.cost import Costed
from mstrain.planner.products import axes_of
from mstrain.planner.step import TransformerStep, transformer_step
from mstrain.planner.sums import spread_of
from mstrain.simulator.placement import COL, ROW, Degrees, Placement
from mstrain.simulator.program import COMMUNICATION
from tests.planner.layer_math import (
    activation,
    activation_gradient,
    attention,
    norm,
    norm_gradient,
    norm_sums,
)

MATRICES = {"x": ("tokens", "in"), "w": ("in", "out"), "y": ("tokens", "out")}
# GEMM -> (left, right, result); a gradient has the shape of its matrix.
ROLES = {"MatMul": ("x", "w", "y"), "InputGrad": ("y", "w", "x"), "WeightGrad": ("x", "y", "w")}


def interleave(segments, columns):
    """Order of fused features in which column shard j has its part of every segment side by side."""
    begins = np.cumsum([0, *segments[:-1]])
    shards = [
        np.arange(begin + j * size // columns, begin + (j + 1) * size // columns)
        for j in range(columns)
        for begin, size in zip(begins, segments)
    ]
    return np.concatenate(shards)


class Executor:
    """One step of `model` (norms without scale, no biases, no positions) under the plan of `costed`.

    A tied table must not be split over tensor ranks: the program does not say how its two uses lie.

    `weights` maps "table", "output" and (layer, product) to canonical float64 matrices; `tokens` and
    `targets` are int arrays (batch, seq). After `run`, `loss` is the mean over all targets and
    `gradients[replica]` has the matrices of `weights`.
    """

    def __init__(self, request, costed: Costed, microbatches: int, weights: dict, tokens, targets):
        self.request, self.model, self.plan, self.products = request, request.model, costed.plan, costed.products
        self.microbatches, self.weights = microbatches, weights
        self.tokens, self.targets = tokens, targets
        plan = self.plan
        degrees = Degrees(plan.data, plan.tensor, plan.pipeline, microbatches, plan.chunks, plan.cols)
        step = transformer_step(request, costed, microbatches)
        self.program = step.expand(Placement(degrees))
        self.singles, self.repeated = len(step.slots.single), len(step.slots.repeated)
        self.ranks = plan.data * plan.tensor
        self.by_name = {product.name: product for product in (*self.products.block, self.products.head)}
        self.values: dict[int, object] = {}
        self.made: dict[int, tuple] = {}  # label of the operation that wrote a value
        self.updates: dict[tuple[int, int], dict] = {}  # by replica and rank: blocks of gradients
        self.losses: dict[tuple, np.ndarray] = {}  # by replica, microbatch and shard of tokens
        writer = TransformerStep(request, costed, microbatches)
        for key, slot in writer.weights.items():
            for number in range(self.ranks):
                self.values[(-slot - 1) * self.ranks + number] = self.blocks_of(key, number % plan.tensor)
        for slot in writer.totals.values():
            for number in range(self.ranks):
                self.values[(-slot - 1) * self.ranks + number] = {}

    # Where things are.

    def place(self, rank: int, axis: int) -> int:
        """Index of a tensor rank among its peers along `axis`."""
        row, col = divmod(rank, self.plan.cols)
        return {ROW: row, COL: col}.get(axis, rank)

    def cut(self, product, rank: int) -> dict[str, tuple[int, int]]:
        """(index, count) of the shard of a rank, along the rows and along the columns of a product."""
        between_columns, between_rows = axes_of(product, (self.plan.rows, self.plan.cols))
        layout = product.layout
        row = self.place(rank, between_rows) if layout.rows > 1 else 0
        col = self.place(rank, between_columns) if layout.cols > 1 else 0
        return {"rows": (row, layout.rows), "columns": (col, layout.cols)}

    def weight_block(self, product, matrix, rank: int, back: np.ndarray | None = None):
        """The block of a rank of a weight; with `back`, puts such a block into `matrix` instead."""
        flow, cut = product.layout.dataflow, self.cut(product, rank)
        over = ("columns", "rows") if flow == "ls" else ("rows", "columns")  # of (in, out)
        index = tuple(
            slice(size * cut[side][0] // cut[side][1], size * (cut[side][0] + 1) // cut[side][1])
            for size, side in zip(matrix.shape, over)
        )
        if back is None:
            return matrix[index]
        matrix[index] = back
        return None

    def order(self, name: str) -> np.ndarray:
        """The order of a product's output features."""
        m, product = self.model, self.by_name[name]
        kv = m.num_kv_heads * m.head_dim
        segments = {
            "attention in": (m.heads * m.head_dim, kv, kv),
            "mlp in": (m.mlp_dim,) * (2 if m.gated else 1),
        }.get(name, (product.layout.projection.out_dim,))
        return interleave(segments, product.layout.cols)

    def table_index(self, rank: int):
        (token_axis, parts), (feature_axis, columns) = spread_of(self.products.head, self.mesh)
        row = self.place(rank, token_axis) if parts > 1 else 0
        col = self.place(rank, feature_axis) if columns > 1 else 0
        rows, cols = self.model.vocab_size // parts, self.model.width // columns
        return slice(row * rows, (row + 1) * rows), slice(col * cols, (col + 1) * cols)

    @property
    def heads(self) -> tuple:
        return self.model, self.request.seq, self.products.block[0].layout.cols

    @property
    def mesh(self) -> tuple[int, int]:
        return self.plan.rows, self.plan.cols

    def blocks_of(self, key, rank: int) -> dict[str, np.ndarray]:
        """The weights of a part of the model on one rank, by product."""
        _, part = key
        if part == "embedding":
            return {"table": self.weights["table"][self.table_index(rank)]}
        if part == "head":
            return {"output": self.weight_block(self.products.head, self.weights["output"], rank)}
        return {
            product.name: self.weight_block(
                product, self.weights[part, product.name][:, self.order(product.name)], rank
            )
            for product in self.products.block
        }

    def ids(self, array, number: int, microbatch: int, axis: int, parts: int):
        """The tokens or targets of a microbatch on a device; they lie along `axis` in `parts` parts."""
        replica, rank = divmod(number, self.plan.tensor)
        mine = array.reshape(self.plan.data, self.microbatches, parts, -1)[replica, microbatch]
        return mine[self.place(rank, axis) if parts > 1 else 0]

    # The operations.

    def run(self) -> float:
        program = self.program
        for op in range(len(program.spec)):
            kind, label = program.specs[program.spec[op]].kind, program.labels[program.label[op]]
            ins = program.inputs.items[program.inputs.offsets[op] : program.inputs.offsets[op + 1]].tolist()
            outs = program.outputs.items[program.outputs.offsets[op] : program.outputs.offsets[op + 1]].tolist()
            group = set(program.groups[program.group[op]])
            assert {int(program.value_device[value]) for value in (*ins, *outs)} <= group
            if kind in COMMUNICATION:
                members = len(outs)
                lists = [ins[at : at + members] for at in range(0, len(ins), members)]
                assert kind == "Send" or len(group) == members
                results = self.communicate(kind, label, lists, outs)
            else:
                results = [self.compute(kind, label, ins, outs, int(program.microbatch[op]))]
            for value, result in zip(outs, results):
                self.values[value], self.made[value] = result, label
        self.loss = sum(loss.sum() for loss in self.losses.values()) / self.targets.size
        self.gradients = [self.joined(replica) for replica in range(self.plan.data)]
        return self.loss

    def communicate(self, kind, label, lists, outs) -> list:
        """One result per member; `lists` holds every input of every member."""
        args = [[self.values[value] for value in values] for values in lists]
        count = len(outs)
        if kind == "Send":
            return [args[0][0]]
        if label[0] == "gradients":
            mine = [self.merged([values[member] for values in lists]) for member in range(count)]
            total = {name: sum(gradients[name] for gradients in mine) for name in mine[0]}
            return [dict(total) for _ in range(count)]
        if label[-1] == "sums":
            sums = [self.sums(label, [values[member] for values in lists]) for member in range(count)]
            return [sum(sums)] * count
        if label == ("embedding", "table"):
            if kind == "AllGather":
                return [np.concatenate([table["table"] for table in args[0]])] * count
            return np.split(sum(args[0]), count)
        *prefix, between, index = label
        product, name = self.by_name[prefix[1]], prefix[2]
        flow, slices = product.layout.dataflow, product.slices
        role = MOVING[flow][("columns", "rows").index(between)]
        dim = MATRICES[role].index(DIMS[flow][0])
        if kind == "AllGather":
            where = ROLES[name].index(role)
            pieces = [self.piece(self.operand(value, prefix[1]), dim, index, slices) for value in lists[where]]
            return [np.concatenate(pieces, axis=dim)] * count
        shares = np.split(sum(args[0]), count, axis=dim)
        before = [self.found([values[member] for values in lists], (*prefix, between, index - 1))
                  for member in range(count)]  # fmt: skip
        return [self.filled(old, share, dim, index, slices) for old, share in zip(before, shares)]

    def compute(self, kind, label, ins, outs, microbatch):
        if kind in ROLES:
            return self.multiply(label, ins)
        if kind == "Adam":
            gradients = self.merged([value for value in ins if value in self.made])
            self.updates.setdefault(divmod(ins[0] % self.ranks, self.plan.tensor), {}).update(gradients)
            return None
        number = ins[0] % self.ranks
        if label == ("gradients", "tied"):
            table, copy = self.merged(ins[:-1])["table"], self.merged(ins[-1:])["output"]
            return {"table": table + copy.T, "output": (table + copy.T).T}
        if label[0] == "gradients":
            gradients, totals = self.merged(ins[:-1]), self.values[ins[-1]]
            new = {name: totals.get(name, 0.0) + gradient for name, gradient in gradients.items()}
            self.values[ins[-1]] = new
            return new
        args = [self.values[value] for value in ins]
        if label[0] == "embedding":
            (axis, parts), _ = spread_of(self.products.head, self.mesh)
            ids = self.ids(self.tokens, number, microbatch, axis, parts)
            if kind == "Norm":
                return (args[0]["table"] if isinstance(args[0], dict) else args[0])[ids]
            gradient = np.zeros((self.model.vocab_size, args[0].shape[1]))
            np.add.at(gradient, ids, args[0])
            return gradient + (args[1].T if len(args) > 1 else 0.0)  # of a tied projection
        if label == ("head", "loss"):
            return self.lose(kind, ins, args, number, microbatch)
        sums = [value for value in ins if self.made.get(value, ())[-1:] == ("sums",)]
        if kind == "Norm":
            return norm(self.model, args[0], self.values[sums[0]] if sums else norm_sums(args[:1]))
        if kind == "NormGrad":
            past = args[2] if len(ins) - len(sums) > 2 else 0.0
            found = self.values[sums[0]] if sums else norm_sums(args[:2])
            return past + norm_gradient(self.model, *args[:2], found)
        if kind == "Residual":
            return args[0] + args[1]
        if kind == "Activation":
            return activation(args[0], self.model.gated)
        if kind == "ActivationGrad":
            return activation_gradient(args[0], args[1], self.model.gated)
        if kind == "Attention":
            return attention(*self.heads, args[0])
        if kind == "AttentionGrad":
            return attention(*self.heads, args[0], args[2])
        assert kind == "Identity", kind
        return None

    # Products.

    def operand(self, value: int, name: str):
        found = self.values[value]
        if not isinstance(found, dict):
            return found
        return found[name] if name in found else found["table"].T  # a tied table, whole

    @staticmethod
    def piece(shard, dim, index, slices):
        return shard[index::slices] if dim == 0 else shard[:, index::slices]

    @staticmethod
    def filled(old, piece, dim, index, slices):
        """`old` (None before the first slice) with slice `index` in its place."""
        shape = list(piece.shape)
        shape[dim] *= slices
        new = np.zeros(shape) if old is None else old.copy()
        new[(slice(index, None, slices),) if dim == 0 else (slice(None), slice(index, None, slices))] = piece
        return new

    def found(self, values, label):
        """The value among `values` that an operation with `label` wrote, or None."""
        return next((self.values[value] for value in values if self.made.get(value) == label), None)

    def multiply(self, label, ins):
        *prefix, _, index = label
        product, roles = self.by_name[prefix[1]], ROLES[prefix[2]]
        flow, slices = product.layout.dataflow, product.slices
        sliced = DIMS[flow][0]
        moving = dict(zip(MOVING[flow], ("columns", "rows")))
        matrices = []
        for value, role in zip(ins, roles[:2]):
            arrived = self.found(ins[2:], (*prefix, moving.get(role), index))
            if arrived is None:
                arrived = self.operand(value, prefix[1])
                if role in moving:  # among one device nothing travels
                    arrived = self.piece(arrived, MATRICES[role].index(sliced), index, slices)
            matrices.append(arrived)
        left, right = matrices
        result = {"MatMul": lambda: left @ right, "InputGrad": lambda: left @ right.T,
                  "WeightGrad": lambda: left.T @ right}[prefix[2]]()  # fmt: skip
        before = self.found(ins[2:], (*prefix, "multiply", index - 1))
        role = roles[2]
        if role not in moving:
            return result if before is None else before + result
        counts = {"columns": product.layout.cols, "rows": product.layout.rows}
        if counts[moving[role]] > 1:
            return result  # its sum is scattered next
        return self.filled(before, result, MATRICES[role].index(sliced), index, slices)

    # Gradients.

    def merged(self, values) -> dict:
        """Gradients by name; of several of one name the first is the latest."""
        gradients = {}
        for value in values:
            found = self.values[value]
            if not isinstance(found, dict):
                part, name, *_ = self.made[value]
                key = {"embedding": "table", "head": "output"}.get(part, (part, name))
                found = {key: found}
            gradients = {**found, **gradients}
        return gradients

    def joined(self, replica: int) -> dict:
        """The gradients that the optimizers of a replica saw, put together from their shards."""
        result = {name: np.full(matrix.shape, np.nan) for name, matrix in self.weights.items()}
        for (mine, rank), gradients in self.updates.items():
            for name, block in gradients.items() if mine == replica else ():
                if name == "table":
                    result[name][self.table_index(rank)] = block
                    continue
                product = self.by_name["output" if name == "output" else name[1]]
                self.weight_block(product, result[name], rank, block)
        for (layer, name), matrix in [item for item in result.items() if isinstance(item[0], tuple)]:
            canonical = np.empty_like(matrix)
            canonical[:, self.order(name)] = matrix
            result[layer, name] = canonical
        return result

    # What is not a product.

    def sums(self, label, values):
        """What one member adds to a sum over sharded features or symbols."""
        if label[:2] == ("head", "loss"):
            return self.logit_sums(self.values[values[0]], values[0])
        values = [self.values[value] for value in values]
        return norm_sums([value for value in values if value is not None])

    def target_columns(self, number, microbatch):
        """(targets of the device's tokens, the first symbol of its shard of the vocabulary)."""
        head, rank = self.products.head, number % self.plan.tensor
        _, between_rows = axes_of(head, self.mesh)
        targets = self.ids(self.targets, number, microbatch, between_rows, head.layout.rows)
        column, count = self.cut(head, rank)["columns"]
        return targets, column * self.model.vocab_size // count

    def logit_sums(self, logits, value):
        """Sum of exponentials and target's logit, over the symbols of one shard."""
        microbatch = (value // self.ranks - self.singles) // self.repeated
        targets, first = self.target_columns(value % self.ranks, microbatch)
        here = (targets[:, None] - first) == np.arange(logits.shape[1])
        return np.stack([np.exp(logits).sum(axis=1), (logits * here).sum(axis=1)])

    def lose(self, kind, ins, args, number, microbatch):
        logits = args[0]
        if kind == "Logits":
            sums = args[1] if len(args) > 1 else self.logit_sums(logits, ins[0])
            head = self.products.head
            row = self.cut(head, number % self.plan.tensor)["rows"][0]
            self.losses[number // self.plan.tensor, microbatch, row] = np.log(sums[0]) - sums[1]
            return sums
        targets, first = self.target_columns(number, microbatch)
        here = (targets[:, None] - first) == np.arange(logits.shape[1])
        return (np.exp(logits) / args[1][0][:, None] - here) / self.targets.size
