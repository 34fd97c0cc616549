"""The mesh on fewer hosts: legal for the model, all devices of its hosts, no device with more state or tokens."""

import pytest

from mstrain.commands.train import load_config
from mstrain.mesh import abstract_mesh
from mstrain.models.plan import make_plan
from mstrain.training.elastic import largest_layout


def layout(total, left, *words):
    return largest_layout(load_config(["model=tiny", "seq=16", *words]), total, left)


@pytest.mark.parametrize(
    "words, total, left, expected",
    [
        ("mesh=4x1x1 batch=12", 4, 3, "3 hosts, mesh=data3-row1-col1 accumulate=2"),  # 3 sequences a device -> 2
        ("mesh=4x2x2 batch=24", 4, 3, "3 hosts, mesh=data3-row2-col2 accumulate=2"),
        ("mesh=4x2x2 batch=48 accumulate=3", 4, 2, "2 hosts, mesh=data2-row2-col2 accumulate=6"),
        ("mesh=4x1x1 batch=16", 4, 3, "3 hosts, mesh=data3-row1-col1 accumulate=2"),  # a sequence is padding
        ("mesh=2x4 batch=16", 4, 3, "3 hosts, mesh=row2-col3 accumulate=2"),  # a head is padding
        ("mesh=2x2x2 batch=16", 4, 2, "2 hosts, mesh=row2-col2 accumulate=2"),
        ("mesh=1x8 batch=16", 2, 1, "1 host, mesh=row1-col4 accumulate=2"),
        ("mesh=4x1x2 batch=24", 4, 4, "4 hosts, mesh=data4-row1-col2 accumulate=1"),
    ],
)
def test_the_mesh_shrinks_to_what_divides(words, total, left, expected):
    assert str(layout(total, left, *words.split())) == expected


@pytest.mark.parametrize("mesh, total", [("4x2x2", 4), ("2x2x4", 8), ("8x1x2", 8), ("3x2x2", 6), ("4x4", 4)])
@pytest.mark.parametrize("batch, accumulate", [(48, 1), (48, 2), (96, 4)])
def test_every_number_of_hosts_left_has_a_layout_that_holds_no_more_per_device(mesh, total, batch, accumulate):
    words = ["model=tiny", "seq=16", f"mesh={mesh}", f"batch={batch}", f"accumulate={accumulate}"]
    config = load_config(words)
    full = largest_layout(config, total, total)
    for left in range(1, total):
        found = largest_layout(config, total, left)
        assert found.hosts <= left and found.mesh.devices * total == full.mesh.devices * found.hosts
        assert found.mesh.devices * found.accumulate >= full.mesh.devices * accumulate
        make_plan(config.parallel, config.model, abstract_mesh(found.mesh), batch // found.accumulate, 16)
        could_keep_state = found.mesh.devices >= full.mesh.row * full.mesh.col
        assert found.mesh.row * found.mesh.col >= full.mesh.row * full.mesh.col or not could_keep_state


def test_what_cannot_shrink_is_refused_with_what_to_type():
    with pytest.raises(ValueError, match="Type a mesh such as"):
        layout(4, 3)
    with pytest.raises(ValueError, match="do not divide over"):
        layout(3, 2, "mesh=2x2")
