"""The time limit of a save, from its size and the measured speed.

A host may take FLOOR seconds + MULTIPLIER x its share of the state / the speed of the slowest host in the last
save (writing and digesting together; SLOWEST before the first). The manifest of a checkpoint records bytes,
seconds and limit of every host.
"""

FLOOR = 120.0  # seconds
MULTIPLIER = 10.0
SLOWEST = 50e6  # bytes per second


def seconds_allowed(size: float, speed: float | None) -> float:
    """Seconds for `size` bytes per host at `speed` bytes per second, None where nothing was measured."""
    return FLOOR + MULTIPLIER * size / (speed or SLOWEST)
