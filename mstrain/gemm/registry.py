"""All algorithms by name."""

import difflib
from collections.abc import Iterable

from mstrain.gemm import cannon, collective, fsdp, gspmd, megatron, meshslice, summa, wang
from mstrain.gemm.algorithm import Algorithm

ALGORITHMS: dict[str, Algorithm] = {
    module.ALGORITHM.name: module.ALGORITHM
    for module in (meshslice, collective, wang, summa, cannon, megatron, fsdp, gspmd)
}
MESHSLICE = meshslice.ALGORITHM.name


def find_algorithm(name: str) -> Algorithm:
    """The algorithm called `name`; raises ValueError naming the nearest one for an unknown name."""
    if name not in ALGORITHMS:
        near = difflib.get_close_matches(name, ALGORITHMS, 1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ValueError(f"Unknown algorithm {name!r}. {hint}Choose one of {', '.join(ALGORITHMS)}.")
    return ALGORITHMS[name]


def same_program(algorithm: str, dataflow: str, cols: int, slices: int) -> str:
    """The algorithm whose program a product of `algorithm` is.

    In one slice MeshSlice is Collective, which is FSDP where activations are not communicated: with one column.
    """
    if slices == 1 and find_algorithm(algorithm).sliced:
        algorithm = collective.ALGORITHM.name
    if algorithm == collective.ALGORITHM.name and cols == 1 and dataflow != "rs":
        return fsdp.ALGORITHM.name
    return algorithm


def any_sliced(names: Iterable[str]) -> bool:
    """Whether one of these algorithms splits collectives into slices."""
    return any(find_algorithm(name).sliced for name in names)
