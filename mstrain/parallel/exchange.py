"""What it costs to exchange keys and values between devices that split sequences, in a ring or by a gather.

A gather is exposed, in the forward and in the backward pass, which gathers again and scatters gradients in float32. In
a ring every transfer runs under the attention of one part; what takes longer is exposed, in every step. Gradients of
keys and values follow them in float32. Hence few key-value heads and short parts favor the gather.
"""

import dataclasses

from mstrain.hardware import collective_seconds
from mstrain.hardware.constants import AxisLinks

BACKWARD = 2.5  # products of a fused attention kernel's backward pass over those of its forward pass
HIDDEN = 0.8  # of the compute that a transfer runs under
SUM_BYTES = 4  # of a gradient that is accumulated


def join_seconds(parts: int, results: float, kv_values: float, memory_bandwidth: float) -> tuple[float, float]:
    """Of the sums over the steps of attention, forward and backward, on one device and in one layer.

    Every step reads and writes float32 results of the device's part, and gradients of queries, keys and values.
    """
    moved = (parts - 1) * 4 * SUM_BYTES / memory_bandwidth  # the sum, and what is added to it
    return moved * results, moved * (results + kv_values)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Attention of one layer and microbatch on one device.

    Attributes:
      parts: of every sequence.
      kv_values: number of elements of the keys and values of the device's part.
      size: bytes of an element.
      attention: seconds of its forward pass without communication.
    """

    parts: int
    kv_values: float
    size: int
    attention: float

    def seconds(self, kind: str, links: AxisLinks) -> tuple[float, float]:
        """What `gather` or `ring` adds to the forward and to the backward pass."""
        return self._gather(links) if kind == "gather" else self._ring(links)

    def cheaper(self, links: AxisLinks) -> str:
        """The cheaper of both."""
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
        last = collective_seconds(links.permute, both - part, 2)  # brings gradients home
        return waits(part, self.attention), waits(both, BACKWARD * self.attention) + last
