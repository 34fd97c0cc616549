"""What it costs to exchange tokens between the devices of their experts, in slices that run beside the products.

The first slice to go and the last one to come back run beside nothing. Every further slice gathers the weights along
the rows again, and adds its part to their gradients.
"""

import dataclasses
from collections.abc import Iterable


@dataclasses.dataclass(frozen=True)
class TokenExchange:
    """The expert layer of one microbatch on one device.

    Attributes:
      way: seconds of the bytes of all slices to the experts, or back.
      launch: seconds of a slice besides.
      products: seconds of the forward products of experts; the backward pass has two of each.
      gather: seconds in which the weights are gathered along the rows.
      add: seconds in which gradients of weights are added to others.
    """

    way: float
    launch: float
    products: float
    gather: float = 0.0
    add: float = 0.0

    def seconds(self, slices: int) -> tuple[float, float]:
        """What the exchange in so many slices adds to the forward and to the backward pass."""
        both, more = 2 * (self.way + slices * self.launch), slices - 1

        def waits(products: float) -> float:
            return both / slices + more / slices * max(0.0, both - products)

        return waits(self.products) + more * self.gather, waits(2 * self.products) + more * (2 * self.gather + self.add)

    def cheapest(self, counts: Iterable[int]) -> int:
        """The one of several slice counts that adds least."""
        return min(counts, key=lambda slices: sum(self.seconds(slices)))
