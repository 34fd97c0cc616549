"""Mesh strings are read exactly or refused with what to type; without accelerators JAX looks for none."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mstrain import mesh
from mstrain.mesh import (
    AXES,
    MeshShape,
    attached,
    emulate_devices,
    fit_to_devices,
    make_mesh,
    parse_mesh,
)  # fmt: skip

axis_sizes = st.integers(1, 999)
shapes = st.builds(
    MeshShape,
    axis_sizes,
    axis_sizes,
    axis_sizes,
    replica=axis_sizes,
    stage=axis_sizes,
    expert=axis_sizes,
    context=axis_sizes,
)


@given(shapes)
def test_a_mesh_reads_back_what_it_prints(shape):
    assert parse_mesh(str(shape)) == shape
    assert parse_mesh(f"  {shape} ") == shape
    assert shape.devices == shape.copies * shape.stage * shape.context * shape.row * shape.col


def test_two_sizes_are_rows_and_columns():
    assert parse_mesh("2x4") == MeshShape(data=1, row=2, col=4)
    assert parse_mesh("3x2x4") == MeshShape(data=3, row=2, col=4)


def test_axes_have_names_in_any_order_and_those_left_out_have_one_device():
    assert parse_mesh("data3-row2-col4") == parse_mesh("col4-data3-row2") == MeshShape(3, 2, 4)
    assert parse_mesh("data8") == MeshShape(data=8) and str(MeshShape(data=8)) == "data8-row1-col1"
    assert str(MeshShape(row=2, col=4)) == "row2-col4"


@pytest.mark.parametrize("text, words", [
    ("experts4-col8", "unknown axis 'experts'. Did you mean expert?"),
    ("rows4-col8", "unknown axis 'rows'. Did you mean row?"),
    ("banana2-col8", "is not a mesh. Write rows x columns (mesh=2x4)"),
    ("row2-row4", "gives axis row twice"),
])  # fmt: skip
def test_an_axis_that_the_trainer_does_not_have_is_refused_by_its_name(text, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_mesh(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4",
        "x",
        "2x",
        "x4",
        "2x4x",
        "2x2x2x2",
        "0x4",
        "2x0",
        "-2x4",
        "2.0x4",
        "2X4",
        "2*4",
        "auto",
        "1" * 9,
        "row",
        "row0-col4",
        "row-2",
        "data2-",
        "data2_row4",
        "row2,col4",
    ],
)
def test_what_is_no_mesh_is_told_what_one_looks_like(text):
    with pytest.raises(ValueError, match="mesh=2x4.*mesh=2x4x8.*mesh=data2-row4-col8.*mesh=auto"):
        parse_mesh(text)


@given(
    st.one_of(
        st.text(),
        st.text("0123456789x X*-"),
        st.from_regex(r"[a-z]+[0-9]+(-(row|col|data|stage)[0-9]+){0,3}", fullmatch=True),
        st.none(),
        st.integers(),
        st.floats(),
        st.lists(st.integers()),
    )
)
def test_anything_else_raises_only_value_error(text):
    try:
        shape = parse_mesh(text)
    except ValueError:
        return
    assert min(shape.sizes) >= 1 and parse_mesh(str(shape)) == shape
    assert re.fullmatch(r"\s*(\d+x\d+(x\d+)?|((data|row|col)\d+-?)+)\s*", str(text))


@given(shapes, st.integers(1, 4096))
def test_surplus_devices_become_data_parallelism_or_the_message_names_a_mesh_that_fits(shape, available):
    try:
        fitted = fit_to_devices(shape, available)
    except ValueError as refused:
        proposals = re.findall(r"mesh=([\w-]+)", str(refused).split("Type ")[1])
        assert proposals and all(parse_mesh(mesh).devices == available for mesh in proposals)
        assert available % shape.devices
    else:
        assert fitted.devices == available
        assert (fitted.row, fitted.col) == (shape.row, shape.col)
        assert fitted.data % shape.data == 0


def test_make_mesh_uses_every_device_once_along_named_axes():
    mesh = make_mesh(MeshShape(2, 2, 4))
    assert mesh.axis_names == AXES
    assert dict(mesh.shape) == {"replica": 1, "stage": 1, "data": 2, "expert": 1, "context": 1, "row": 2, "col": 4}
    assert {device.id for device in mesh.devices.flat} == {device.id for device in jax.devices()}


def test_make_mesh_may_leave_devices_out_but_not_invent_them():
    assert make_mesh(MeshShape(1, 1, 3)).size == 3
    with pytest.raises(ValueError, match="needs 32 devices and 16 are present. Type mesh=row4-col4"):
        make_mesh(MeshShape(1, 4, 8))


class SliceDevice:
    """A device of one of several TPU slices."""

    platform, device_kind, process_index = "cpu", "cpu", 0

    def __init__(self, number: int, slice_index: int):
        self.id, self.slice_index = number, slice_index


def test_replicas_are_the_tpu_slices():
    devices = [SliceDevice(i, i % 2) for i in range(8)]
    mesh = make_mesh(parse_mesh("replica2-data2-col2"), devices)
    assert [{device.slice_index for device in part.flat} for part in mesh.devices] == [{0}, {1}]
    for text in ("data4-col2", "replica4-col2", "replica2-col2"):
        with pytest.raises(ValueError, match="does not fit 2 TPU slices of 4 devices.* Type mesh=replica2-"):
            make_mesh(parse_mesh(text), devices)


@pytest.fixture
def host(monkeypatch, tmp_path):
    """Makes this host one with these device files, with or without libtpu, and `said` in JAX_PLATFORMS."""
    before = jax.config.jax_platforms

    def make(files=(), libtpu=True, said=None):
        for file in files:
            (tmp_path / file).touch()
        patterns = {f"{tmp_path}/accel[0-9]*": "TPU", f"{tmp_path}/kfd": "GPU"}
        monkeypatch.setattr(mesh, "ACCELERATORS", patterns)
        monkeypatch.setattr(mesh.importlib.util, "find_spec", lambda name: libtpu or None)
        jax.config.update("jax_platforms", said)

    yield make
    jax.config.update("jax_platforms", before)


@pytest.mark.parametrize(("files", "said"), [
    ([], None), (["kfd"], "1 GPU device file"), (["accel0", "accel1", "kfd"], "2 TPU device files")
])  # fmt: skip
def test_attached_accelerators_are_counted(host, files, said):
    host(files)
    assert attached() == said


@pytest.mark.parametrize(("case", "platforms"), [
    ({}, "cpu"),
    ({"files": ["accel0"]}, None),
    ({"files": ["kfd"]}, None),
    ({"libtpu": False}, None),
    ({"said": "tpu,cpu"}, "tpu,cpu"),
])  # fmt: skip
def test_only_a_libtpu_without_any_accelerator_is_not_started(host, case, platforms):
    host(**case)
    emulate_devices(jax.device_count())
    assert jax.config.jax_platforms == platforms


def train(**environment: str) -> str:
    """What a run without its data leaves on standard error; the devices are looked for before the data."""
    others = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "train.py", "model=tiny", "data=text", "data.path=/absent"],
        cwd=Path(__file__).resolve().parent.parent, env=others | environment, stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode
    return done.stderr


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None or attached() is not None, reason="needs libtpu without a TPU"
)
def test_a_libtpu_without_a_tpu_is_heard_only_when_it_is_asked_for():
    assert train() == "train: data.path=/absent is not a file or folder: type one that exists\n"
    assert "Unable to initialize backend 'tpu'" in train(JAX_PLATFORMS="tpu")
