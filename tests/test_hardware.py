"""The table of chips, slice names, the link formula and MFU."""

import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstrain.gemm import ALGORITHMS
from mstrain.hardware import (
    CompilerOption,
    Link,
    all_chips,
    chip_for,
    chip_named,
    collective_seconds,
    compiler_options,
    mfu,
    parse_target,
)

NUMBERS = (
    "peak_bf16",
    "peak_f32",
    "hbm_bytes",
    "hbm_bandwidth",
    "ici_links",
    "ici_bandwidth",
    "launch_all_gather",
    "launch_reduce_scatter",
    "launch_permute",
    "sync",
    "node_devices",
    "node_bandwidth",
)


@pytest.mark.parametrize(
    "kind, name, peak",
    [
        ("TPU v2", "v2", 22.5e12),
        ("TPU v3", "v3", 61.5e12),
        ("TPU v4", "v4", 275e12),
        ("TPU v5 lite", "v5e", 197e12),
        ("TPU v5e", "v5e", 197e12),
        ("TPU v5", "v5p", 459e12),
        ("TPU v5p", "v5p", 459e12),
        ("TPU v6 lite", "v6e", 918e12),
        ("TPU v6e", "v6e", 918e12),
        ("TPU7x", "tpu7x", 1153.5e12),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb", 312e12),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb", 312e12),
        ("NVIDIA H100 80GB HBM3", "h100", 989.4e12),
        ("NVIDIA H200", "h200", 989.4e12),
        ("NVIDIA B200", "b200", 2.25e15),
        ("NVIDIA L4", "l4", 121e12),
        ("Tesla T4", "t4", None),
        ("cpu", "cpu", None),
    ],
)
def test_device_kind_finds_its_chip(kind, name, peak):
    chip = chip_for(kind)
    assert chip.name == name and chip.peak("bf16") == chip.peak("bfloat16") == peak


@pytest.mark.parametrize("kind", ["TPU v5 litepod", "TPU v8", "NVIDIA H100 NVL", "NVIDIA L40", "H200", ""])
def test_unknown_kind_is_none_never_a_neighbor(kind):
    assert chip_for(kind) is None
    assert compiler_options(chip_for(kind)) == {}


def test_every_number_names_its_source():
    for chip in all_chips().values():
        known = {number for number in NUMBERS if getattr(chip, number) is not None}
        assert set(chip.sources) == known
        assert all(len(source) > 10 for source in chip.sources.values()), chip.name


def test_no_two_chips_answer_to_one_kind():
    kinds = [kind.lower() for chip in all_chips().values() for kind in chip.device_kinds]
    assert len(kinds) == len(set(kinds))


def test_unknown_chip_or_dtype_is_an_error_that_lists_the_known():
    with pytest.raises(ValueError, match="v5p"):
        chip_named("v5q")
    with pytest.raises(ValueError, match="bf16"):
        chip_named("v4").peak("fp4")


def test_compiler_options_have_reasons_and_no_continuation_fusion():
    for chip in all_chips().values():
        assert set(chip.algorithm_options) <= set(ALGORITHMS)
        for option in (*chip.options, *itertools.chain(*chip.algorithm_options.values())):
            assert option.reason and option.source
            if "async_collective_fusion" in option.name:  # refused by the compiler, except on v5e
                assert option.value is False or chip.name == "v5e"
    assert compiler_options(chip_named("cpu")) == {}
    assert compiler_options(chip_named("v5p"))["xla_max_concurrent_async_all_gathers"] == 2


def test_programs_of_one_algorithm_get_its_options_too():
    shared, own = CompilerOption("a", 1, "", ""), CompilerOption("b", True, "", "")
    chip = dataclasses.replace(chip_named("v6e"), options=(shared,), algorithm_options={"fsdp": (own,)})
    assert compiler_options(chip, "fsdp") == {"a": 1, "b": True}
    assert compiler_options(chip, "wang") == compiler_options(chip) == {"a": 1}


@pytest.mark.parametrize(
    "name, devices, topology",
    [
        ("v2-8", 8, "v2:2x2"),
        ("v2-512", 512, "v2:16x16"),
        ("v3-32", 32, "v3:4x4"),
        ("v3-64", 64, "v3:4x8"),
        ("v4-8", 4, "v4:2x2x1"),
        ("v4-64", 32, "v4:2x4x4"),
        ("v4-128", 64, "v4:4x4x4"),
        ("v4-1536", 768, "v4:8x8x12"),
        ("v5e-1", 1, "v5e:1x1"),
        ("v5e-32", 32, "v5e:4x8"),
        ("v5litepod-256", 256, "v5e:16x16"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("v5p-64", 32, "v5p:2x4x4"),
        ("v5p-512", 256, "v5p:4x8x8"),
        ("v5p-384", 192, "v5p:4x4x12"),
        ("v5p-3968", 1984, "v5p:4x4x124"),
        ("v5p-10368", 5184, "v5p:12x12x36"),
        ("v5p-12288", 6144, "v5p:16x16x24"),
        ("v6e-8", 8, "v6e:2x4"),
        ("v6e-64", 64, "v6e:8x8"),
        ("tpu7x-8", 8, "tpu7x:2x2x1"),
        ("tpu7x-64", 64, "tpu7x:2x4x4"),
        ("v5p:4x4x2", 32, "v5p:4x4x2"),
        ("V4:4X4X2", 32, "v4:4x4x2"),
        ("tpu7x:4x4x2", 64, "tpu7x:4x4x2"),
        ("v3:4x8", 64, "v3:4x8"),
        ("2xv5p-64", 64, "v5p:2x4x4"),
    ],
)
def test_target_names(name, devices, topology):
    target = parse_target(name)
    assert (target.devices, target.topology_name) == (devices, topology)
    assert ("chip_config_name" in target.topology_options) == (target.chip.name == "v4")


@pytest.mark.parametrize(
    "name, fix",
    [
        ("v5p-65", "v5p-64"),
        ("v5e-48", "v5e-32"),
        ("v5litepod-200", "v5litepod-256"),
        ("v5p-99999", "v5p-12288"),
        ("v5p:3x4x4", "v5p:4x4x4"),
        ("v5e:17x2", "v5e:16x2"),
        ("v5p:4x4", "v5p:2x4x4"),
        ("v5p:256x256x256", "v5p:16x16x24"),
        ("v9-64", "v5p-64"),
        ("v5p", "v5p:4x4x2"),
        ("2xv5p-65", "v5p-64"),
        ("", "v5p-64"),
    ],
)
def test_a_wrong_target_names_the_nearest_right_one_which_parses(name, fix):
    with pytest.raises(ValueError, match=re.escape(fix)):
        parse_target(name)
    assert parse_target(fix)


def test_meshes_of_a_torus_are_products_of_whole_axes():
    assert parse_target("v6e-256").mesh_shapes() == ((1, 256), (16, 16), (256, 1))
    assert (32, 8) in parse_target("v5p:8x8x4").mesh_shapes()
    assert (16, 16) not in parse_target("v5p:8x8x4").mesh_shapes()
    assert (32, 2) in parse_target("tpu7x-64").mesh_shapes()  # the two devices of a chip are an axis
    assert parse_target("v5p:8x8x4").mesh_shapes(data=8) == ((1, 32), (4, 8), (8, 4), (32, 1))
    with pytest.raises(ValueError, match="use data=4 "):
        parse_target("v5p:8x8x4").mesh_shapes(data=5)


def test_rings_close_on_whole_cubes_and_full_edges():
    assert parse_target("v5p-128").wraps and parse_target("v6e-256").wraps
    assert not parse_target("v5p-64").wraps and not parse_target("v6e-32").wraps


def test_mfu_formula_and_its_refusals():
    assert mfu(6e12, 2.0, 3, 2e12) == 0.5
    assert mfu(6e12, 2.0, 3, None) is None
    with pytest.raises(ValueError, match="measurement or the peak is wrong"):
        mfu(6e12, 0.4, 3, 2e12)
    with pytest.raises(ValueError, match="positive time"):
        mfu(6e12, 0.0, 3, 2e12)


@given(n=st.integers(2, 512), size=st.floats(1, 1e9), bandwidth=st.floats(1e8, 1e12), sync=st.floats(0, 1e-4))
def test_collective_cost_is_monotone_and_splits_into_latency_and_traffic(n, size, bandwidth, sync):
    link, faster = Link(1e-5, sync, bandwidth), Link(1e-5, sync, 2 * bandwidth)
    cost = collective_seconds(link, size, n)
    assert cost > collective_seconds(faster, size, n)
    assert cost < collective_seconds(link, size, n + 1)
    latency = collective_seconds(link, 0, n)
    assert math.isclose(cost - latency, (n - 1) * size / bandwidth, rel_tol=1e-6, abs_tol=1e-12)
    assert collective_seconds(link, size, 1) == 0.0


def test_a_link_without_bandwidth_is_refused():
    with pytest.raises(ValueError, match="positive"):
        Link(0.0, 0.0, 0.0)
