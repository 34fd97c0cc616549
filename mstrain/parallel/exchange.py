"""Cost of exchanging keys and values between devices that split sequences: in a ring, or by an all_gather.

The all_gather is exposed, in the forward pass and again in the backward pass, which also reduce-scatters float32
gradients. In a ring every transfer overlaps with the attention of one part; the excess is exposed, in every step of the
ring. In the backward pass, float32 gradients of keys and values are sent with them. Few key-value heads and short parts
therefore favor the all_gather.
"""

import dataclasses

from mstrain.hardware import collective_seconds
from mstrain.hardware.constants import AxisLinks

BACKWARD = 2.5  # FLOPs of a fused attention kernel's backward pass over those of its forward pass
HIDDEN = 0.8  # fraction of the overlapping compute time that can hide a transfer
SUM_BYTES = 4  # per element of a gradient that is accumulated (float32)


def join_seconds(parts: int, results: float, kv_values: float, memory_bandwidth: float) -> tuple[float, float]:
    """Seconds to accumulate results over the steps of attention, (forward, backward), on one device in one layer.

    Every step reads and writes float32 results of the device's part and, in the backward pass, gradients of queries,
    keys and values. `results` and `kv_values` are numbers of elements; `memory_bandwidth` is in bytes/s.
    """
    moved = (parts - 1) * 4 * SUM_BYTES / memory_bandwidth  # reads and writes of both operands of the sum
    return moved * results, moved * (results + kv_values)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The exchange of keys and values of one layer and microbatch on one device.

    Attributes:
      parts: number of parts into which every sequence is split.
      kv_values: number of elements of the keys and values of the device's part.
      size: bytes of an element.
      attention: seconds of the forward pass of attention without communication.
    """

    parts: int
    kv_values: float
    size: int
    attention: float

    def seconds(self, kind: str, links: AxisLinks) -> tuple[float, float]:
        """Exposed seconds of `gather` or `ring` in the (forward, backward) pass."""
        return self._gather(links) if kind == "gather" else self._ring(links)

    def cheaper(self, links: AxisLinks) -> str:
        """`gather` or `ring`, whichever exposes less time."""
        return min(("gather", "ring"), key=lambda kind: sum(self.seconds(kind, links)))

    def _gather(self, links: AxisLinks) -> tuple[float, float]:
        part = self.kv_values * self.size
        gather = collective_seconds(links.all_gather, part, self.parts)
        return gather, gather + collective_seconds(links.reduce_scatter, SUM_BYTES * self.kv_values, self.parts)

    def _ring(self, links: AxisLinks) -> tuple[float, float]:
        def waits(values: float, compute: float) -> float:
            hop = collective_seconds(links.permute, values, 2)
            return (self.parts - 1) * max(0.0, hop - HIDDEN * compute / self.parts)

        part = self.kv_values * self.size
        both = part + SUM_BYTES * self.kv_values
        last = collective_seconds(links.permute, both - part, 2)  # sends gradients to the devices of their keys
        return waits(part, self.attention), waits(both, BACKWARD * self.attention) + last
