"""Device groups of Metis (the number of devices of each pipeline stage), in the order of the reference."""

from collections.abc import Iterator

Bundle = tuple[int, ...]


def device_groups(num_devices: int, num_stages: int, variance: int, max_permute_len: int) -> Iterator[Bundle]:
    """All lists of `num_stages` powers of two with sum `num_devices`, none below `variance` x devices / stages.

    Lists longer than `max_permute_len` are joined into bundles, which are permuted instead of single stages.
    """
    lower = max(num_devices // num_stages, num_stages // num_devices) * variance
    shapes = [1 << power for power in range(num_devices.bit_length()) if 1 << power >= lower]
    for sizes in _ascending_sums(shapes, num_devices, num_stages):
        bundles = [(size,) for size in sizes]
        if num_stages > max_permute_len:
            bundles = merge_bundles(bundles, max_permute_len)
        for arrangement in multiset_permutations(bundles):
            yield tuple(size for bundle in arrangement for size in bundle)


def _ascending_sums(shapes: list[int], total: int, length: int) -> Iterator[Bundle]:
    """Non-decreasing tuples of `length` shapes with the given sum, in lexicographic order."""
    if length == 0:
        yield ()
        return
    for index, shape in enumerate(shapes):
        if _has_sum(shape, shapes[-1], total - shape, length - 1):
            for rest in _ascending_sums(shapes[index:], total - shape, length - 1):
                yield (shape, *rest)


def _has_sum(smallest: int, largest: int, total: int, length: int) -> bool:
    """Whether `length` powers of two from `smallest` to `largest` can have the sum `total`.

    The fewest terms are copies of `largest` and the binary digits of the remainder. Halving a term gives one more term,
    until all terms are `smallest`.
    """
    units, rest = divmod(total, smallest)
    whole, digits = divmod(units, largest // smallest)
    return rest == 0 and whole + digits.bit_count() <= length <= units


def merge_bundles(bundles: list[Bundle], limit: int) -> list[Bundle]:
    """Joins neighboring bundles of the smallest size until `limit` are left or none can be joined."""
    need = len(bundles) - limit
    while need > 0:
        run = next((at for at, bundle in enumerate(bundles, 1) if bundle != bundles[0]), len(bundles))
        pairs, size = max(need, run // 2), sum(bundles[0])
        merged = []
        for start in range(0, min(2 * pairs, len(bundles)), 2):
            pair = bundles[start : start + 2]
            merged += [pair[0] + pair[1]] if [sum(bundle) for bundle in pair] == [size, size] else pair
        bundles = merged + bundles[2 * pairs :]
        need = len(bundles) - limit
        if need == pairs:  # none was joined
            break
    return bundles


def multiset_permutations(items: list) -> Iterator[list]:
    """Every distinct permutation once, in cool-lex order (A. Williams, SODA 2009), starting with the descending one."""
    start = sorted(items, reverse=True)
    current, length = start, len(items)
    while True:
        yield current
        prefix = next((k for k in range(1, length) if current[k] > current[k - 1]), length)
        moved = min(prefix, length - 1)
        if prefix + 1 < length and current[prefix - 1] >= current[prefix + 1]:
            moved = prefix + 1
        current = [current[moved], *current[:moved], *current[moved + 1 :]]
        if current == start:
            return
