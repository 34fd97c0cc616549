"""Cost of exchanging tokens between the devices of their experts, in slices that overlap with the products.

The first slice to the experts and the last slice back are exposed. Every further slice all-gathers the weights along
the rows again, and adds its part to their gradients.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class TokenExchange:
    """The exchange of tokens of one expert layer and microbatch on one device.

    Attributes:
      way: seconds to transfer the bytes of all slices in one direction, to the experts or back.
      launch: seconds that each slice adds to a transfer in one direction.
      products: seconds of the forward products of experts; the backward products take twice as long.
      gather: seconds to all-gather the weights along the rows.
      add: seconds to add weight gradients of a slice to those of earlier slices.
    """

    way: float
    launch: float
    products: float
    gather: float = 0.0
    add: float = 0.0

    def seconds(self, slices: int) -> tuple[float, float]:
        """Seconds that the exchange in `slices` slices adds to the (forward, backward) pass."""
        both, more = 2 * (self.way + slices * self.launch), slices - 1

        def waits(products: float) -> float:
            return both / slices + more / slices * max(0.0, both - products)

        return waits(self.products) + more * self.gather, waits(2 * self.products) + more * (2 * self.gather + self.add)

    def cheapest(self, counts: Iterable[int]) -> int:
        """The slice count that adds the least time."""
        return min(counts, key=lambda slices: sum(self.seconds(slices)))
