"""Cycles of custom kernels, for which XLA has no estimate: from the blocks that they visit and the rates of the chip's
units."""

import math
import re

from mstrain.compiler.hlo import Instruction, shape_bytes
from mstrain.compiler.machine import Machine
from mstrain.gemm.expert_exchange import MARGIN, ROUND
from mstrain.gemm.ragged import visits_of

# Operations of the vector unit on one score of JAX's splash attention kernels (jax 0.10, splash_attention_kernel.py).
# Forward: position, comparison and choice of the causal mask, maximum, difference, factor of the exponential, sum, and
# conversion of the matrix unit's operand. Backward: mask, difference, factor, conversion, difference from the row's
# sum, product, conversion. Each computes one exponential a score.
VECTOR_OPERATIONS = {"fwd": 8, "bwd": 9}
POSITIONS = r"s32\[\d+,\d+\]"  # of queries; segments have a dim of sequences in front
GROUPED = re.compile(r"\bjit\((t?gmm)\)")  # Megablox's two kernels, in the name of an operation
PRODUCTS = {"fwd": 2, "bwd": 5}  # scores and values; scores again and the gradients of scores, values, keys, queries


def kernel_cycles(kernel: Instruction, operands: list[Instruction], machine: Machine) -> float:
    """Cycles of a custom kernel: from the blocks that a grouped product visits, or its own cost estimate, or its
    attention, or its bytes."""
    if match := GROUPED.search(kernel.attributes):
        return _grouped_cycles(kernel, operands, match[1] == "tgmm", machine)
    cost = kernel.cost_estimate
    moved = kernel.bytes + sum(operand.bytes for operand in operands)
    bytes_cycles = cost.get("bytes_accessed", moved) / machine.hbm_bandwidth * machine.clock
    if not cost and kernel.name.startswith("splash_"):
        units = _attention_cycles(kernel, operands, machine)
    else:
        matrix = cost.get("flops", 0.0) / machine.kernels.flops * machine.clock
        units = [matrix, cost.get("transcendentals", 0.0) / machine.kernels.exponentials]
    busiest = max(units)
    together = busiest + (1 - machine.kernels.overlap) * (sum(units) - busiest)
    return max(together, bytes_cycles)


def _grouped_cycles(kernel: Instruction, operands: list[Instruction], summed: bool, machine: Machine) -> float:
    """Cycles of a product of rows with the weights of their groups (`mstrain.gemm.ragged`).

    All rows have a group, except those in the margin of a round of `mstrain.gemm.expert_exchange`, which kernels skip.
    """
    shapes = [re.match(r"(\w+)\[([\d,]+)\]", part.shape) for part in (*operands, kernel)]
    matrices = [[int(n) for n in match[2].split(",")] for match in shapes if match and match[1] != "s32"]
    (M, K), other, result = matrices[0], matrices[1], matrices[-1]
    if ROUND in kernel.attributes:
        M = math.ceil(M / MARGIN)
    groups, N = (result[0], result[2]) if summed else (other[0], result[1])
    rows, moved = visits_of(M, K, N, groups, summed)
    size = shape_bytes(operands[-1].shape) / math.prod(other)
    matrix = 2.0 * rows * K * N / machine.kernels.flops
    return max(matrix, size * moved / machine.hbm_bandwidth) * machine.clock


def _attention_cycles(kernel: Instruction, operands: list[Instruction], machine: Machine) -> list[float]:
    """Busy cycles of matrix unit, vector ALUs and exponentials in a splash attention kernel.

    A kernel with a causal mask takes the positions of its queries; without, it visits all scores (a block of
    `mstrain.layers.splash_blocks`).

    A head narrower than the matrix unit leaves the rest of it idle ("How to Scale Your Model", TPUs: matrices are
    padded), in every product once.
    """
    shapes = [re.match(r"bf16\[([\d,]+)\]", operand.shape) for operand in operands]
    q, k = [[int(n) for n in match[1].split(",")] for match in shapes if match][:2]
    part = "fwd" if "fwd" in kernel.name else "bwd"
    width, rates = q[-1], machine.kernels
    causal = any(re.match(POSITIONS, operand.shape) for operand in operands)
    scores = math.prod(q[:-1]) * k[-2] * (visited(kernel, part, q[-2], k[-2]) if causal else 1.0)
    padded = rates.matrix_unit * math.ceil(width / rates.matrix_unit)
    matrix = PRODUCTS[part] * 2 * scores * padded / machine.kernels.flops * machine.clock
    return [matrix, VECTOR_OPERATIONS[part] * scores / rates.vector, scores / rates.exponentials]


def visited(kernel: Instruction, part: str, queries: int, keys: int) -> float:
    """Share of the score matrix in blocks that a causal mask does not remove entirely, from the block sizes that the
    kernel states; half of the matrix where it states none.
    """
    names = ("block_q", "block_kv") if part == "fwd" else ("block_q_dkv", "block_kv_dkv")
    stated = (re.search(rf'\\*"{name}\\*": *(\d+)', kernel.attributes) for name in names)
    found = [match for match in stated if match]
    if len(found) < len(names):
        return 0.5
    rows, columns = (int(match[1]) for match in found)
    blocks = sum(min(math.ceil((i + 1) * rows / columns), math.ceil(keys / columns))
                 for i in range(math.ceil(queries / rows)))  # fmt: skip
    return blocks * rows * columns / (queries * keys)
