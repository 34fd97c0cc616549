"""Groups and permutations as the compiler prints them, against the mesh they came from."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.compiler import read_schedule
from mstrain.compiler.collectives import replica_group
from mstrain.compiler.hlo import shape_bytes
from mstrain.compiler.torus import Torus
from tests.compiler.programs import LINKS, MACHINE, machine, module


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
    """Of 4 x 4 x 2 devices with the last two dims exchanged, the neighbors on the part of size 2 are 0 and 1."""
    mesh = "mesh['a'=8,'b'=4], device_ids=([4,4,2]T(0,2,1))"
    assert replica_group(f"replica_groups={mesh} {{'a':(4)2}}, dimensions={{0}}", 32) == [0, 1]
    assert replica_group(f"replica_groups={mesh} {{'b'}}", 32) == [0, 2, 4, 6]
    assert replica_group("replica_groups=mesh['a'=2,'b'=2], device_ids=([4]) {'b'}", 4) == [0, 1]


def test_an_unknown_form_is_not_taken_for_all_devices():
    with pytest.raises(ValueError, match="not known"):
        replica_group("replica_groups=<@mesh>", 4)


def test_no_groups_means_all_devices():
    assert replica_group("replica_groups={}, dimensions={0}", 4) == [0, 1, 2, 3]


X = "%x = bf16[64,64]{1,0} parameter(0)\n"
BYTES = 64 * 64 * 2
US = 1e-6
LATE = dataclasses.replace(LINKS, **{
    name: dataclasses.replace(LINKS.all_gather, launch=1e-6, sync=1e-6) for name in ("all_gather", "permute")
})  # fmt: skip


def permute_text(name, pairs):
    text = ",".join(f"{{{a},{b}}}" for a, b in pairs)
    return f"%{name} = bf16[64,64]{{1,0}} collective-permute(%x), source_target_pairs={{{text}}}"


def permute(pairs, on=MACHINE):
    (transfer,) = read_schedule(module(f"{X}ROOT {permute_text('p', pairs)}"), on).transfers
    return transfer.collective


def ring(shift, size=8):
    return [(i, (i + shift) % size) for i in range(size)]


RING = {"data": 1, "row": 1, "col": 8}


@pytest.mark.parametrize(("shift", "hops", "way"), [(1, 1, 1), (-1, 1, -1), (2, 2, 1), (4, 4, 1), (7, 1, -1)])
def test_a_rotation_takes_the_shorter_way_round_and_shares_the_links_on_it(shift, hops, way):
    """A shift of 2 puts two messages on every link; hops cost a sync each, the launch is paid once."""
    found = permute(ring(shift), machine(RING, (False, False, True), link=LATE))
    assert found.axes == ("col",)
    assert found.lanes == ((2, way),)
    assert found.seconds == pytest.approx(1 * US + hops * US + hops * BYTES / 1e9)


def test_the_message_that_closes_an_open_line_takes_every_link_back():
    found = permute(ring(1), machine(RING, link=LATE))
    assert found.lanes == ((2, -1), (2, 1))
    assert found.seconds == pytest.approx(1 * US + 7 * US + BYTES / 1e9)


@pytest.mark.parametrize(("closed", "times"), [(True, 1), (False, 2)])
def test_opposite_directions_of_a_ring_do_not_wait_for_each_other(closed, times):
    """On an open line they do: the message that closes either ring uses the links of the other."""

    def start(name, shift):
        text = permute_text(name, ring(shift)).replace("collective-permute(", "collective-permute-start(")
        return text.replace("= bf16[64,64]{1,0}", "= (bf16[64,64]{1,0}, bf16[64,64]{1,0}, u32[])")

    done = "bf16[64,64]{1,0} collective-permute-done"
    entry = f"{X}{start('a', 1)}\n{start('b', -1)}\n%c = {done}(%a)\nROOT %d = {done}(%b)"
    schedule = read_schedule(module(entry), machine(RING, (False, False, closed)))
    assert schedule.seconds == pytest.approx(times * BYTES / 1e9)


def gather(groups="{}", strategy="", on=MACHINE):
    entry = f"""{X}ROOT %g = bf16[512,64]{{1,0}} all-gather(%x), replica_groups={groups}, dimensions={{0}}{strategy}"""
    (transfer,) = read_schedule(module(entry), on).transfers
    return transfer.collective


def test_a_gather_along_both_axes_uses_the_links_of_both():
    """Half the data takes either axis first: twice the bandwidth, and 1 + 3 hops on 2 x 4 devices."""
    found = gather(on=machine(link=LATE))
    assert found.axes == ("row", "col")
    assert found.seconds == pytest.approx(1 * US + 4 * US + 7 * BYTES / 2e9)


def test_a_closed_ring_gathers_in_both_directions():
    assert gather(on=machine(RING, (False, False, True))).seconds == pytest.approx(7 * BYTES / 2e9)
    assert gather(on=machine(RING)).seconds == pytest.approx(7 * BYTES / 1e9)


def laid(sizes, closed):
    """One mesh axis over a block of dims; `sizes` ends with the devices of a chip."""
    count = int(np.prod(sizes))
    torus = Torus(sizes, closed, np.stack(np.unravel_index(np.arange(count), sizes), -1))
    return machine({"data": 1, "row": 1, "col": count}, torus=torus, link=LATE)


def test_an_axis_over_two_closed_dims_has_four_links_and_2_x_7_hops():
    found = gather(on=laid((8, 8, 1), (True, True, False)))
    assert found.participants == 64
    assert found.seconds == pytest.approx(1 * US + 14 * US + 63 * BYTES / 4e9)
    assert set(found.lanes) == {(0, 1), (0, -1), (1, 1), (1, -1)}


def test_a_ring_over_two_closed_dims_turns_the_corner_in_two_hops():
    on = laid((8, 8, 1), (True, True, False))
    found = permute(ring(1, 64), on)
    assert found.seconds == pytest.approx(1 * US + 2 * US + BYTES / 1e9)
    assert found.lanes == ((0, 1), (1, 1))


def test_groups_that_alternate_on_a_dim_and_devices_of_one_chip_share_its_links():
    torus = Torus((8, 2), (True, False), np.stack(np.unravel_index(np.arange(16), (8, 2)), -1))
    on = machine({"data": 1, "row": 8, "col": 2}, torus=torus)
    assert gather("[2,8]<=[8,2]T(1,0)", on=on).seconds == pytest.approx(7 * BYTES / (2e9 / 2))
    assert gather("[4,4]<=[4,2,2]T(2,1,0)", on=on).seconds == pytest.approx(3 * BYTES / (2e9 / 2 / 2))
    printed = ",".join(color((way, 8, "X_TORUS")) for way in ("CW", "CCW"))  # of one core of every chip
    strategy = f', backend_config={{"ici_strategy_config":{{"color_strategies":[{printed}]}}}}'
    assert gather("[2,8]<=[8,2]T(1,0)", strategy, on).seconds == pytest.approx(7 * BYTES / (2e9 / 2))


def color(*rings):
    found = ",".join(
        f'{{"ring_type":"ICI_RING_TYPE_{way if way == "BIDIR" else f"UNIDIR_{way}"}","core_count":"{n}",'
        f'"explicit_strategy_ring_dim":"ICI_RING_DIM_{dim}"}}'
        for way, n, dim in rings
    )
    return f'{{"phase_rings":[{found}]}}'


@pytest.mark.parametrize(("colors", "steps", "links", "lanes"), [
    ([[("CW", 4, "Z_TORUS")], [("CCW", 4, "Z_TORUS")]], 3, 2, {(2, 1), (2, -1)}),
    ([[("CW", 4, "Z_TORUS")]], 3, 1, {(2, 1)}),
    ([[("BIDIR", 4, "Z_TORUS")]], 2, 2, {(2, 1), (2, -1)}),
    ([[("CW", 4, "Z_MESH")], [("CCW", 4, "Z_MESH")]], 3, 1, {(2, 1), (2, -1)}),
    ([[("CW", 2, "Y_TORUS"), ("CW", 4, "Z_TORUS")], [("CCW", 4, "Z_TORUS"), ("CCW", 2, "Y_TORUS")]], 4, 2,
     {(1, 1), (1, -1), (2, 1), (2, -1)}),
])  # fmt: skip
def test_the_rings_that_the_compiler_prints_come_first(colors, steps, links, lanes):
    printed = ",".join(color(*rings) for rings in colors)
    strategy = f', backend_config={{"ici_strategy_config":{{"color_strategies":[{printed}]}}}}'
    found = gather("{{0,1,2,3},{4,5,6,7}}", strategy, machine(link=LATE))
    assert found.seconds == pytest.approx(1 * US + steps * US + 3 * BYTES / (links * 1e9))
    assert set(found.lanes) == lanes


def test_one_ring_through_all_devices_where_the_compiler_says_so():
    """The TensorCore's emitter over 8 x 8 chips, and the SparseCore's rings of tpu7x, which name no dim."""
    on = laid((8, 8, 1), (True, True, False))
    expected = 1 * US + 63 * US + 63 * BYTES / 2e9
    emitter = ', backend_config={"collective_algorithm_config":{"emitter":"1DAllGatherNonMajorDimImbalanced"}}'
    assert gather(strategy=emitter, on=on).seconds == pytest.approx(expected)
    colors = ",".join(
        f'{{"phase_rings":[{{"ring_type":"ICI_RING_TYPE_UNIDIR_{way}","core_count":"64"}}]}}' for way in ("CW", "CCW")
    )
    strategy = f', backend_config={{"ici_strategy_config":{{"color_strategies":[{colors}]}}}}'
    assert gather(strategy=strategy, on=on).seconds == pytest.approx(expected)
    line = laid((1, 64, 1), (False, False, False))
    assert gather(strategy=emitter, on=line).seconds == pytest.approx(1 * US + 63 * US + 63 * BYTES / 1e9)


def test_a_permutation_of_both_axes_occupies_both():
    assert permute([(i, (i + 5) % 8) for i in range(8)]).axes == ("row", "col")
