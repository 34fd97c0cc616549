"""Features and heads padded with zeros, so that every mesh divides them.

The only place that decides how a dim is padded and how much may be wasted. Canonical dims have no padding: `Storage`
adds it to parameters and removes it for checkpoints. Padded features are zero in the forward and in the backward pass.
"""

import dataclasses
import functools
import math

import jax.numpy as jnp
import numpy as np

MOST_WASTE = 0.25  # of what is stored or computed; make_plan refuses more


@dataclasses.dataclass(frozen=True)
class Span:
    """`size` consecutive features of a canonical dim and their padded form.

    Each of `steps`, (groups, padded_groups, padded_width), views the features as groups of equal width and appends
    zeros to every group, and then groups of zeros.
    """

    size: int
    steps: tuple[tuple[int, int, int], ...] = ()

    @property
    def stored(self) -> int:
        """Number of features with padding."""
        return self.steps[-1][1] * self.steps[-1][2] if self.steps else self.size

    def padded(self, groups: int, padded_groups: int, padded_width: int) -> "Span":
        """With a further step, unless that adds nothing."""
        if padded_groups * padded_width == self.stored:
            return self
        return Span(self.size, (*self.steps, (groups, padded_groups, padded_width)))

    def to_multiple(self, unit: int, groups: int = 1) -> "Span":
        """Every one of `groups` equal parts padded by the same, until the whole is a multiple of `unit`."""
        width = self.stored // groups
        while groups * width % unit:
            width += 1
        return self.padded(groups, groups, width)

    def pad(self, x):
        """Pads the last dim of x from `size` to `stored`."""
        for groups, padded_groups, padded_width in self.steps:
            parts = x.reshape(*x.shape[:-1], groups, -1)
            missing = (padded_groups - groups, padded_width - parts.shape[-1])
            parts = jnp.pad(parts, [(0, 0)] * (x.ndim - 1) + [(0, n) for n in missing])
            x = parts.reshape(*x.shape[:-1], -1)
        return x

    def crop(self, x):
        """Undoes `pad`."""
        widths = [self.size, *(padded_groups * width for _, padded_groups, width in self.steps)]
        for (groups, padded_groups, _), before in reversed([*zip(self.steps, widths, strict=False)]):
            parts = x.reshape(*x.shape[:-1], padded_groups, -1)
            x = parts[..., :groups, : before // groups].reshape(*x.shape[:-1], -1)
        return x


@dataclasses.dataclass(frozen=True)
class Heads:
    """N `queries` and K `keys` (key-value heads) of H = `width` features, whole heads on each of `columns`.

    With fewer key-value heads than columns, or a number that does not divide, keys and values are sharded by features
    and gathered among `sharing` columns before attention, so each of these has a copy of the heads that it needs.
    Their gradients are then summed by the reduce_scatter of the backward pass, and parameters have one copy.

    Attributes:
      unit: divisor that the stored features of queries need, a multiple of `columns`.
      key_unit: the same of keys and of values.
    """

    queries: int
    keys: int
    width: int
    columns: int = 1
    unit: int = 1
    key_unit: int = 1

    @functools.cached_property
    def _groups(self) -> tuple[int, int] | None:
        """Padded key-value heads and queries of each with the fewest queries; None gathers all heads everywhere.

        A column has several of the padded key-value heads, or shares one with its neighbors.
        """
        per_key, found = self.queries // self.keys, []
        for keys in {*range(self.keys, self.columns + 1), math.ceil(self.keys / self.columns) * self.columns}:
            if keys % self.columns and self.columns % keys:
                continue
            shared = max(1, self.columns // keys)
            found.append((keys, math.ceil(per_key / shared) * shared))
        best = min(found, key=lambda pair: (math.prod(pair), pair))
        fewest = math.ceil(self.queries / self.columns) * self.columns
        return best if math.prod(best) <= fewest else None

    @functools.cached_property
    def order(self) -> np.ndarray:
        """The canonical query head of each stored one, -1 for padding."""
        count = self.queries_here * self.columns
        if self._groups is None:
            heads = np.arange(count)
            return np.where(heads < self.queries, heads, -1)
        keys, per_key = self._groups
        own = self.queries // self.keys
        heads = np.arange(keys)[:, None] * own + np.arange(per_key)[None, :]
        valid = (np.arange(keys)[:, None] < self.keys) & (np.arange(per_key)[None, :] < own)
        return np.where(valid, heads, -1).reshape(-1)

    @property
    def queries_here(self) -> int:
        """Query heads of one column, with padding."""
        stored = math.prod(self._groups) if self._groups else math.ceil(self.queries / self.columns) * self.columns
        return stored // self.columns

    @property
    def sharing(self) -> int:
        """Number of consecutive columns that gather keys and values from each other."""
        return max(1, self.columns // self._groups[0]) if self._groups else self.columns

    @property
    def keys_here(self) -> int:
        """Key-value heads of one column, after they are gathered and with padding."""
        return max(1, self._groups[0] // self.columns) if self._groups else self.keys

    @functools.cached_property
    def segments(self) -> tuple[Span, Span, Span]:
        """The fused projection: queries, keys, values."""
        query = Span(self.queries * self.width)
        if self._groups:
            keys, per_key = self._groups
            query = query.padded(self.keys, keys, per_key * self.width)
        else:
            query = query.to_multiple(self.columns * self.width)
        query = query.to_multiple(math.lcm(self.unit, self.columns), self.columns)
        key = self._key.to_multiple(math.lcm(self.key_unit, self.columns), self.columns)
        return query, key, key

    @functools.cached_property
    def _key(self) -> Span:
        """Keys, or values, in equal shards of the columns."""
        key = Span(self.keys * self.width)
        if self._groups is None:
            return key.to_multiple(self.columns)
        return key.padded(self.keys, self._groups[0], self.width).to_multiple(self.columns, self._groups[0])

    @property
    def crossing(self) -> bool:
        """Whether a column's query heads cross the groups of key-value heads, all of which it then has."""
        return self._groups is None

    @property
    def key_features(self) -> int:
        """Features of keys, or of values, that one column projects, without the padding that `key_unit` adds."""
        return self._key.stored // self.columns

    @property
    def waste(self) -> float:
        """Padded share of the features of queries, or of keys if it is larger there."""
        return max(waste(span.size, span.stored) for span in self.segments)


def waste(used: int, stored: int) -> float:
    """Share of `stored` that is padding."""
    return 1 - used / stored
