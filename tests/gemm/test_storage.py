"""Stored order: round trips are exact, and slice s holds the same features over rows as over columns."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from mstrain.gemm import Plan, Span, Storage, grid_of
from mstrain.gemm.local import all_gather, piece
from tests.gemm.products import check, dense, error, expected, mesh_of, place, random_operands, run

counts = st.integers(1, 3)


@pytest.fixture
def on_numpy(monkeypatch):
    """Orders are reshapes and transposes, which NumPy does without compiling; other tests run them on devices."""
    for module in ("storage", "padding"):
        monkeypatch.setattr(f"mstrain.gemm.{module}.jnp", np)


@st.composite
def storages(draw):
    """A storage whose shape divides as a plan would have checked, with or without padding."""
    rows, columns, slices, transposed = draw(counts), draw(counts), draw(counts), draw(st.booleans())
    unit = np.lcm(rows, columns) * slices
    segments = tuple(columns * slices * rows * draw(counts) for _ in range(draw(counts)))
    # Some groups lack their last feature, and a vocabulary its end.
    spans = tuple(Span(n) if draw(st.booleans()) else Span(n - columns).padded(1, 1, n) for n in segments)
    first = int(unit) * draw(counts)
    first = Span(first) if draw(st.booleans()) else Span(first - 1).to_multiple(first)
    halves = draw(st.sampled_from([1, columns]))
    if halves > 1:  # two of them, of which every column has its part
        first = Span(2 * first.size).padded(2, 2, first.stored)
    shape = (first.size, sum(span.size for span in spans))
    return Storage(shape, spans, columns, rows, slices, transposed and sum(segments) % unit == 0, first, halves)


@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(storages(), st.integers(0, 2))
def test_restore_undoes_store(on_numpy, storage, leading):
    if min(storage.shape) < 1:
        return
    lead = (2, 3)[:leading]
    x = np.arange(np.prod((*lead, *storage.shape)), dtype=np.float32).reshape(*lead, *storage.shape)
    stored = storage.from_canonical(x)
    np.testing.assert_array_equal(storage.to_canonical(stored), x)
    values = np.sort(np.asarray(stored), axis=None)
    padding = values.size - x.size
    np.testing.assert_array_equal(values[padding:], np.asarray(x).ravel())  # nothing lost, nothing twice
    assert not values[:padding].any()


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.integers(0, 3))
def test_column_shards_hold_their_part_of_every_segment(on_numpy, columns, widths, padding):
    segments = tuple(columns * width for width in widths)
    storage = Storage((sum(segments),), tuple(map(Span, segments)), columns)
    parts = np.split(storage.from_canonical(np.arange(sum(segments))), columns)
    starts = np.cumsum((0, *segments[:-1]))
    for j, part in enumerate(parts):
        want = [np.arange(s + j * w, s + (j + 1) * w) for s, w in zip(starts, widths, strict=True)]
        np.testing.assert_array_equal(part, np.concatenate(want))


def slices_over(shards, index, slices):
    """The features that each slice gathers when `index` is split over `shards` devices."""
    return [np.concatenate([np.split(x, slices)[s] for x in np.split(index, shards)]) for s in range(slices)]


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counts, counts, st.integers(1, 5), counts, st.booleans())
def test_slices_over_rows_and_columns_are_the_same_ordered_set(on_numpy, rows, columns, slices, width, transposed):
    dim = int(np.lcm(rows, columns)) * slices * width
    index = np.arange(dim)
    kernel = np.broadcast_to(index[:, None], (dim, 2))
    shape = (2, dim) if transposed else (dim, 2)  # an X-stationary weight is stored [out, in], sliced over out
    storage, kernel = (
        Storage(shape, (), columns, rows, slices, transposed),
        kernel.T if transposed else kernel,
    )
    stored = storage.from_canonical(kernel)[:, 0]
    over_rows, over_columns = slices_over(rows, stored, slices), slices_over(columns, index, slices)
    np.testing.assert_array_equal(over_rows, over_columns)
    np.testing.assert_array_equal(np.sort(np.concatenate(over_rows)), index)  # every index exactly once
    plain = slices_over(rows, index, slices)
    assert (rows == columns or slices == 1) == np.array_equal(plain, over_columns)  # slice-major is needed


@pytest.mark.parametrize("mesh, slices", [("2x4", 3), ("4x2", 2), ("3x2", 4)])
def test_devices_gather_the_same_slices(mesh, slices):
    """As above, through the collectives themselves."""
    grid = grid_of("meshslice", mesh_of(mesh))
    index = jnp.arange(48, dtype=jnp.int32)[:, None]
    kernel = Storage((48, 1), columns=grid.num_cols, rows=grid.num_rows, slices=slices).from_canonical(index)

    def local(x, w):
        over_columns = [all_gather(piece(x, 1, s, slices), grid.cols, 1) for s in range(slices)]
        over_rows = [all_gather(piece(w, 0, s, slices), grid.rows, 0) for s in range(slices)]
        return jnp.stack(over_columns)[None], jnp.stack(over_rows)[None]

    every = P(("row", "col"))
    both = jax.shard_map(
        local, mesh=grid.mesh, in_specs=(P(None, "col"), P("row")), out_specs=(every, every), check_vma=False
    )
    over_columns, over_rows = map(np.asarray, jax.jit(both)(index.T, kernel))
    first = over_columns[0]
    assert (over_columns.squeeze() == first.squeeze()).all() and (over_rows.squeeze() == first.squeeze()).all()
    np.testing.assert_array_equal(np.sort(first, axis=None), np.arange(48))


@pytest.mark.parametrize("mesh, right", [("2x4", False), ("4x2", False), ("2x2", True)])
def test_contiguous_slices_of_canonical_weights_are_wrong_unless_square(mesh, right):
    dims = (24, 24, 48)
    operands = random_operands(dims)
    plans = [Plan("meshslice", flow, grid_of("meshslice", mesh_of(mesh)), 3) for flow in ("os", "ls")]
    stored = [place(plan, operands) for plan in plans]
    canonical = [(x, jax.device_put(w, s[1].sharding), dy) for (x, _, dy), s, w in zip(
        stored, stored, (operands.w, operands.w.T), strict=True)]  # fmt: skip
    for plan, good, naive in zip(plans, run(plans, stored), run(plans, canonical), strict=True):
        reference = expected(plan, dense(dims))
        check(good, reference)
        assert (error(naive[0], reference[0]) <= 1e-5) == right
        assert right or error(naive[0], reference[0]) > 0.1
