"""Legality of slices, proved on index sets, and the orientation of activations."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.parallel.dataflow import Projection, check_slices, legal_slices, mesh_fault, orientations

flows = st.sampled_from(["os", "ls", "rs"])
small = st.integers(1, 96)
axis = st.integers(1, 6)


def gathered(dim, parts, slices, s):
    """Global indices of slice s gathered over an axis: every shard gives its s-th interleaved block of 1."""
    return np.concatenate([shard.reshape(-1, slices)[:, s] for shard in np.split(np.arange(dim), parts)])


@settings(max_examples=200, deadline=None)
@given(in_dim=small, out_dim=small, tokens=small, rows=axis, cols=axis, flow=flows, turned=st.booleans())
def test_a_legal_count_cuts_one_index_set_on_both_axes(in_dim, out_dim, tokens, rows, cols, flow, turned):
    legal = legal_slices(in_dim, out_dim, tokens, rows, cols, flow, transposed=turned)
    dim = {"os": in_dim, "ls": out_dim, "rs": tokens}[flow]
    for s in legal:
        assert dim % (s * math.lcm(rows, cols)) == 0
        for piece in range(s):
            assert np.array_equal(gathered(dim, rows, s, piece), gathered(dim, cols, s, piece))
    assert (1 in legal) == (mesh_fault(in_dim, out_dim, tokens, rows, cols, flow, turned) is None)
    assert legal == tuple(sorted(set(legal))) and all(s <= 32 for s in legal)


@given(rows=axis, cols=axis, flow=flows, turned=st.booleans())
def test_no_divisor_is_forgotten(rows, cols, flow, turned):
    dim = 24 * rows * cols
    width = dim // math.lcm(rows, cols)
    expected = tuple(s for s in range(1, 33) if width % s == 0)
    assert legal_slices(dim, dim, dim, rows, cols, flow, transposed=turned) == expected


def test_rows_and_columns_shard_the_dims_that_the_dataflow_says():
    assert mesh_fault(8, 6, 4, 4, 2, "os") is None  # out over 2 columns, tokens over 4 rows
    assert "out 6 is not a multiple of 4" in mesh_fault(8, 6, 4, 2, 4, "os")
    assert "out 6 is not a multiple of 4" in mesh_fault(8, 6, 4, 4, 2, "os", True)
    assert "in 6 is not a multiple of 4" in mesh_fault(6, 8, 8, 2, 4, "rs")  # input arrives (tokens, in)
    assert mesh_fault(6, 8, 8, 4, 2, "rs") is None


def test_a_limit_cuts():
    assert legal_slices(128, 128, 128, 2, 2, "os") == (1, 2, 4, 8, 16, 32)
    assert legal_slices(128, 128, 128, 2, 2, "os", max_slices=4) == (1, 2, 4)


def test_an_illegal_count_names_its_neighbors():
    assert check_slices(4, (1, 2, 4, 8), "ff1") == 4
    with pytest.raises(ValueError, match="ff1: slice count 5 is illegal. Use 4 or 8"):
        check_slices(5, (1, 2, 4, 8), "ff1")
    with pytest.raises(ValueError, match="Use 8$"):
        check_slices(9, (1, 2, 4, 8), "ff1")
    with pytest.raises(ValueError, match="Choose one of os, ls, rs"):
        legal_slices(8, 8, 8, 1, 1, "is")


def test_orientation_follows_the_graph():
    assert orientations(["os", "ls", "os", "ls"]) == (False,) * 5
    assert orientations(["rs"] * 4) == (False, True, False, True, False)
    assert orientations(["os", "rs", "ls", "rs"]) == (False, False, True, True, False)


def test_a_projection_without_size_is_refused():
    with pytest.raises(ValueError, match="1 or more"):
        Projection("p", 0, 8)
