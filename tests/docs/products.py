"""Compiles the first product of the MLP of two models for TPU slices and writes docs/data/products.csv.

    python -m tests.docs.products [TARGET ...]

Replaces the rows of each TARGET; without an argument, those of all targets. No TPU is needed.
"""

import dataclasses
import importlib.metadata
import sys
from collections.abc import Iterator
from pathlib import Path

from mstrain.compiler import make_target, predict
from mstrain.compiler.schedule import CompiledSchedule
from tests.compiler.study import compile_flow
from tests.docs.rows import read_rows, replace_rows

PRODUCTS = Path(__file__).parents[2] / "docs/data/products.csv"
MESHES = {
    "v5p-64": "4x8", "v5p-512": "32x8", "v6e-32": "4x8", "v6e-256": "16x16", "tpu7x-32": "4x8", "tpu7x-256": "32x8",
}  # fmt: skip
FEATURES = {"gpt3_175b": (12288, 49152), "megatron_nlg_530b": (20480, 81920)}
TOKENS = {"4x8": 65536, "32x8": 262144, "16x16": 262144}


@dataclasses.dataclass(frozen=True)
class Product:
    """One row: a dataflow of MeshSlice in `slices` slices, compared with Collective; times are predicted, in ms."""

    model: str
    target: str
    dataflow: str
    slices: int
    ms: str
    low_ms: str
    high_ms: str
    collective_ms: str
    collective_low_ms: str
    collective_high_ms: str
    hidden_percent: str
    collectives: int
    overlapped: int
    blocking: int
    copies_percent_of_gemm_cycles: str
    gemm_cycles_over_collective: str
    temporaries_over_collective: str
    libtpu: str


def slices_of(model: str, target: str) -> tuple[int, ...]:
    return (4, 6, 8) if model == "gpt3_175b" and target in ("v6e-32", "tpu7x-32") else (4, 8)


def compile_products(name: str) -> Iterator[Product]:
    """Compiles the rows of one target."""
    target = make_target(name, MESHES[name])
    for model, features in FEATURES.items():
        sizes = (TOKENS[MESHES[name]], *features)
        for flow in ("os", "ls", "rs"):
            rival = predict(compile_flow("collective", flow, 1, target, sizes))
            for slices in slices_of(model, name):
                ours = predict(compile_flow("meshslice", flow, slices, target, sizes))
                yield Product(model, name, flow, slices, *_times(ours), *_times(rival), *_shares(ours, rival))


def _times(schedule: CompiledSchedule) -> tuple[str, ...]:
    return tuple(f"{1e3 * seconds:.2f}" for seconds in (schedule.seconds, *schedule.bounds))


def _shares(ours: CompiledSchedule, rival: CompiledSchedule) -> tuple[str | int, ...]:
    return (
        f"{100 * (ours.hidden or 0):.0f}", len(ours.transfers), ours.overlapped, ours.blocking,
        f"{100 * ours.move_fraction:.1f}", f"{ours.cycles['gemm'] / rival.cycles['gemm']:.3f}",
        f"{ours.memory.temporaries / rival.memory.temporaries:.2f}", importlib.metadata.version("libtpu"),
    )  # fmt: skip


def read_products() -> list[dict[str, str]]:
    return read_rows(PRODUCTS)


def write_products(target: str, products: list[Product]) -> None:
    """Replaces the rows of `target`."""
    fields = [field.name for field in dataclasses.fields(Product)]
    replace_rows(PRODUCTS, fields, ("target",), [dataclasses.asdict(product) for product in products])


if __name__ == "__main__":
    for name in sys.argv[1:] or MESHES:
        products = []
        for product in compile_products(name):
            products.append(product)
            print(product, flush=True)
        write_products(name, products)
