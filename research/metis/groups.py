"""Device groups of Metis: how many devices each pipeline stage gets, in the order of the reference."""

from collections.abc import Iterator

Bundle = tuple[int, ...]


def device_groups(num_devices: int, num_stages: int, variance: int, max_permute_len: int) -> Iterator[Bundle]:
    """All lists of `num_stages` powers of two that sum to `num_devices`, none below the even share.

    The even share is scaled by `variance`. Lists longer than `max_permute_len` are permuted in bundles.
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
    """Whether `length` powers of two from smallest to largest can sum to `total`.

    Without this test the enumeration could run for ever between two results. The fewest terms are the largest
    ones and the binary digits of the rest; any term above the smallest can be halved to get one more.
    """
    units, rest = divmod(total, smallest)
    whole, digits = divmod(units, largest // smallest)
    return rest == 0 and whole + digits.bit_count() <= length <= units


def merge_bundles(bundles: list[Bundle], limit: int) -> list[Bundle]:
    """Join neighbouring bundles of the smallest size until `limit` are left or nothing can be joined."""
    need = len(bundles) - limit
    while need > 0:
        others = (position for position, bundle in enumerate(bundles, 1) if bundle != bundles[0])
        run = next(others, len(bundles))
        need = max(need, run // 2)
        bundles = _merge_pairs(bundles, need)
        if need == len(bundles) - limit:
            break
        need = len(bundles) - limit
    return bundles


def _merge_pairs(bundles: list[Bundle], pairs: int) -> list[Bundle]:
    size = sum(bundles[0])
    merged = []
    for start in range(0, min(2 * pairs, len(bundles)), 2):
        pair = bundles[start : start + 2]
        if len(pair) == 2 and sum(pair[0]) == sum(pair[1]) == size:
            pair = [pair[0] + pair[1]]
        merged += pair
    return merged + bundles[2 * pairs :]


def multiset_permutations(items: list) -> Iterator[list]:
    """Every distinct arrangement once, in cool-lex order (A. Williams, SODA 2009), the largest first."""
    start = sorted(items, reverse=True)
    current = list(start)
    while True:
        yield current
        current = _next_by_prefix_shift(current)
        if current == start:
            return


def _next_by_prefix_shift(items: list) -> list:
    length = len(items)
    prefix = next((k for k in range(1, length) if items[k] > items[k - 1]), length)
    if prefix == length:
        moved = length - 1
    elif prefix + 1 < length and items[prefix - 1] >= items[prefix + 1]:
        moved = prefix + 1
    else:
        moved = prefix
    return [items[moved], *items[:moved], *items[moved + 1 :]]
