"""Groups and permutations as the compiler prints them, against the mesh they came from."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.compiler import Machine, read_schedule
from mstrain.compiler.collectives import replica_group
from mstrain.compiler.hlo import shape_bytes
from tests.compiler.programs import LINKS, MACHINE, module


def test_bytes_of_a_tuple_are_those_of_its_parts():
    assert shape_bytes("bf16[16,128]{1,0:T(8,128)(2,1)S(1)}") == 16 * 128 * 2
    assert shape_bytes("((f32[4]{0}, token[]), /*index=1*/s8[3,3]{1,0}, pred[], s4[8])") == 16 + 9 + 1 + 4
    assert shape_bytes("f8e4m3fn[7]{0}") == 7


@settings(deadline=None)
@given(sizes=st.tuples(*[st.integers(1, 5)] * 3), axes=st.sets(st.integers(0, 2), min_size=1))
def test_lists_iotas_and_meshes_name_the_same_group(sizes, axes):
    kept = [a for a in range(3) if a not in axes]
    order = (*kept, *sorted(axes))
    ids = np.arange(np.prod(sizes)).reshape(sizes).transpose(order)
    groups = ids.reshape(-1, int(np.prod([sizes[a] for a in axes])))
    listed = "replica_groups={" + ",".join("{" + ",".join(map(str, g)) + "}" for g in groups.tolist()) + "}"
    dims, perm = (",".join(map(str, t)) for t in (sizes, order))
    iota = f"replica_groups=[{groups.shape[0]},{groups.shape[1]}]<=[{dims}]T({perm})"
    shape = ",".join(f"'axis_{a}'={n}" for a, n in enumerate(sizes))
    along = ",".join(f"'axis_{a}'" for a in sorted(axes))
    named = f"replica_groups=mesh[{shape}] {{{along}}}, channel_id=3"
    found = [replica_group(text, ids.size) for text in (listed, iota, named)]
    assert found == [groups[0].tolist()] * 3


def test_a_group_may_be_part_of_an_axis():
    assert replica_group("replica_groups=mesh['a'=2,'b'=8] {'b':(2)4}", 16) == [0, 1, 2, 3]
    assert replica_group("replica_groups=mesh['a'=2,'b'=8] {'a','b':(1)2}", 16) == [0, 4, 8, 12]


def test_a_mesh_may_list_its_devices_in_another_order():
    """Of 4 x 4 x 2 devices with the last two dims exchanged, the neighbours on the part of size 2 are 0 and 1."""
    mesh = "mesh['a'=8,'b'=4], device_ids=([4,4,2]T(0,2,1))"
    assert replica_group(f"replica_groups={mesh} {{'a':(4)2}}, dimensions={{0}}", 32) == [0, 1]
    assert replica_group(f"replica_groups={mesh} {{'b'}}", 32) == [0, 2, 4, 6]
    assert replica_group("replica_groups=mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", 4) == [0, 1]


def test_an_unknown_form_is_not_taken_for_all_devices():
    with pytest.raises(ValueError, match="not known"):
        replica_group("replica_groups=<@mesh>", 4)


def test_no_groups_means_all_devices():
    assert replica_group("replica_groups={}, dimensions={0}", 4) == [0, 1, 2, 3]


def permute(pairs, machine=MACHINE):
    text = ",".join(f"{{{a},{b}}}" for a, b in pairs)
    entry = f"""%x = bf16[64,64]{{1,0}} parameter(0)
        ROOT %p = bf16[64,64]{{1,0}} collective-permute(%x), source_target_pairs={{{text}}}"""
    (transfer,) = read_schedule(module(entry), machine).transfers
    return transfer.collective


@pytest.mark.parametrize(("shift", "hops"), [(1, 1), (-1, 1), (2, 2), (4, 4), (7, 1)])
def test_a_rotation_pays_for_the_shorter_way_round(shift, hops):
    sizes = {"data": 1, "row": 1, "col": 8}
    ring = Machine("ring", 1e9, 1e12, 1e12, sizes, dict.fromkeys(sizes, LINKS))
    found = permute([(i, (i + shift) % 8) for i in range(8)], ring)
    assert found.axes == ("col",)
    assert found.seconds == pytest.approx(hops * 8192 / 1e9)


def test_a_gather_along_both_axes_uses_the_links_of_both():
    """Half the data goes round either axis first: twice the bandwidth, and 1 + 3 hops on 2 x 4 devices."""
    link = dataclasses.replace(LINKS.all_gather, sync=1e-6)
    links = dict.fromkeys(MACHINE.links, dataclasses.replace(LINKS, all_gather=link))
    entry = """%x = bf16[64,64]{1,0} parameter(0)
        ROOT %g = bf16[512,64]{1,0} all-gather(%x), replica_groups={}, dimensions={0}"""
    (transfer,) = read_schedule(module(entry), dataclasses.replace(MACHINE, links=links)).transfers
    assert transfer.collective.axes == ("row", "col")
    assert transfer.collective.seconds == pytest.approx(4e-6 + 7 * 8192 / 2e9)


def test_a_permutation_of_both_axes_occupies_both():
    assert permute([(i, (i + 5) % 8) for i in range(8)]).axes == ("row", "col")
