"""A calibration file comes back whole or is refused, and a prediction from it is arithmetic by hand."""

import dataclasses
import itertools
import json

import pytest

from mstrain.cli.command import run_command
from mstrain.commands.benchmark import COMMAND as BENCHMARK
from mstrain.hardware import Link, chip_named, collective_seconds
from mstrain.hardware.calibration import (
    KINDS,
    Calibration,
    KernelTime,
    load_calibration,
    read_constants,
)
from mstrain.hardware.clusters import find_pod
from mstrain.hardware.gemm_times import GemmTime, gemm_seconds
from mstrain.hardware.pod import Pod
from mstrain.tuning.calibrated import StepTerms, predict_step

LINK = Link(1e-5, 2e-6, 1e9)
CALIBRATION = Calibration(
    device_kind="cpu", platform="cpu", devices=8, dtype="float32", jax="0.10.2", date="2026-11-21T00:00:00+00:00",
    source="a test", dispatch_seconds=1e-3, argument_seconds=1e-6, exponential_seconds=1e-9, reduction_seconds=2e-9,
    transpose_seconds=3e-9, step_ratio=1.0,
    kernels=(KernelTime(8, 1e-6), KernelTime(1008, 2e-6)),
    gemm=tuple(GemmTime(m, k, n, m * k * n * 1e-9) for m, k, n in itertools.product((8, 64), repeat=3)),
    links={axis: dict.fromkeys(KINDS, LINK) for axis in ("row", "col")},
)  # fmt: skip
PROGRAM = """HloModule jit_step, is_scheduled=true

%body (p: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %p = (s32[], f32[16,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[16,8]{1,0} get-tuple-element(%p), index=1
  %w = f32[8,8]{1,0} constant({...})
  %y = f32[16,8]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (s32[], f32[16,8]{1,0}) tuple(%i, %y)
}

%no (p: (s32[], f32[16,8])) -> pred[] {
  %p = (s32[], f32[16,8]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

%tanh_computation (a: f32[4,25]) -> f32[4,25] {
  %a = f32[4,25]{1,0} parameter(0)
  ROOT %tanh = f32[4,25]{1,0} tanh(%a)
}

ENTRY %main (a: f32[4,25], x: (s32[], f32[16,8])) -> (f32[4,25], f32[16,25]) {
  %a = f32[4,25]{1,0} parameter(0)
  %x = (s32[], f32[16,8]{1,0}) parameter(1)
  %f = f32[4,25]{1,0} fusion(%a), kind=kLoop, calls=%tanh_computation
  %g = f32[16,25]{1,0} all-gather(%f), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %loop = (s32[], f32[16,8]{1,0}) while(%x), condition=%no, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %out = (f32[4,25]{1,0}, f32[16,25]{1,0}) tuple(%f, %g)
}
"""


def test_a_file_comes_back_whole(tmp_path):
    CALIBRATION.save(tmp_path / "c.json")
    assert load_calibration(tmp_path / "c.json") == CALIBRATION


def test_a_step_is_predicted_as_by_hand():
    terms = predict_step(PROGRAM, {"data": 1, "row": 2, "col": 4}, CALIBRATION)
    assert terms.products == pytest.approx(3 * 16 * 8 * 8 * 1e-9)
    moved = 2 * 4 * 25 * 4  # bytes read and written by tanh
    assert terms.kernels == pytest.approx(1e-6 + (moved - 8) / 1000 * 1e-6 + 4 * 25 * 1e-9)
    assert terms.communication == pytest.approx(collective_seconds(LINK, 4 * 25 * 4, 4))
    assert terms.dispatch == pytest.approx(1e-3 + (2 + 2) * 1e-6)
    assert terms.seconds == pytest.approx(sum(dataclasses.astuple(terms)))
    assert predict_step(PROGRAM, {"data": 2, "row": 2, "col": 4}, CALIBRATION).products == 2 * terms.products
    slower = predict_step(PROGRAM, {"data": 1, "row": 2, "col": 4}, dataclasses.replace(CALIBRATION, step_ratio=1.5))
    assert slower.seconds == pytest.approx(1.5 * terms.seconds)


def test_products_are_interpolated_and_extrapolated_at_the_rate_of_the_largest():
    for shape in ((8, 8, 8), (16, 32, 64), (640, 64, 128)):
        assert gemm_seconds(CALIBRATION.gemm, *shape) == pytest.approx(1e-9 * shape[0] * shape[1] * shape[2])
    assert gemm_seconds(CALIBRATION.gemm, 1, 8, 8) == pytest.approx(8**3 * 1e-9)  # launch bound
    assert CALIBRATION.kernel_seconds(10080) == pytest.approx(2e-5)


def test_terms_of_one_device_need_no_links():
    alone = dataclasses.replace(CALIBRATION, links={}, devices=1)
    with pytest.raises(ValueError, match="one device"):
        predict_step(PROGRAM, {"data": 1, "row": 2, "col": 4}, alone)
    one_each = PROGRAM.replace("{{0,1,2,3},{4,5,6,7}}", "{{0},{1},{2},{3},{4},{5},{6},{7}}")
    assert predict_step(one_each, {"data": 1, "row": 1, "col": 1}, alone).communication == pytest.approx(1e-6)
    assert StepTerms(1, 2, 3, 4).seconds == 10


def wrong(**changes):
    def edit(document):
        return {**document, **changes}

    return edit


BAD = {
    "nothing": (lambda d: None, 'not a calibration of mstrain'),
    "constants of another format": (lambda d: {"flops": 1}, 'not a calibration of mstrain'),
    "version": (wrong(version=1), "version is 1"),
    "text as number": (wrong(dispatch_seconds="1"), "dispatch_seconds is '1'"),
    "true as number": (wrong(dispatch_seconds=True), "dispatch_seconds is True"),
    "not a number": (wrong(dispatch_seconds=float("nan")), "dispatch_seconds is nan"),
    "negative": (wrong(exponential_seconds=-1), "exponential_seconds is -1"),
    "huge": (wrong(dispatch_seconds=10**400), "401 digits"),
    "no ratio": (wrong(step_ratio=0), "step_ratio is 0"),
    "no kernels": (wrong(kernels=[]), "kernels is a list"),
    "kernels": (wrong(kernels={}), "kernels is an object"),
    "a row of products": (wrong(gemm=[7]), r"gemm\[0\] is 7"),
    "half a grid": (lambda d: {**d, "gemm": d["gemm"][:-1]}, "full grid"),
    "one axis": (lambda d: {**d, "links": {"row": d["links"]["row"]}}, "links are of row"),
    "no bandwidth": (wrong(links={"row": {"all_gather": {}}, "col": {}}), "launch_seconds"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_with_what_is_wrong(case, tmp_path):
    edit, message = BAD[case]
    path = tmp_path / "c.json"
    CALIBRATION.save(path)
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message) as error:
        load_calibration(path)
    assert str(path) in str(error.value) and "bench=calibrate" in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 10**5, b"\xff\xfe", b"1" * 5000, b" " * (2**20 + 1)])
def test_what_is_no_json_is_refused(content, tmp_path):
    path = tmp_path / "c.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"calibration={path}") as error:
        load_calibration(path)
    assert "set_int_max_str_digits" not in str(error.value)  # Python's advice, for programmers


def test_a_truncated_file_ends_the_command_with_two(tmp_path, capsys):
    path = tmp_path / "c.json"
    CALIBRATION.save(path)
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(SystemExit) as stopped:
        run_command(BENCHMARK, ["bench=tune", "meshes=2x2", f"calibration={path}"])
    assert stopped.value.code == 2
    assert "not JSON" in capsys.readouterr().err


def test_a_file_of_other_devices_is_refused(tmp_path):
    CALIBRATION.save(tmp_path / "c.json")
    with pytest.raises(ValueError, match="measured on cpu"):
        Pod("v5p", chip_named("v5p"), 8).calibrated(tmp_path / "c.json", "bf16")


def test_a_file_of_another_dtype_is_refused(tmp_path):
    CALIBRATION.save(tmp_path / "c.json")
    with pytest.raises(ValueError, match="products of float32.*dtype=bf16"):
        Pod("cpu", chip_named("cpu"), 8).calibrated(tmp_path / "c.json", "bf16")


def test_one_device_keeps_the_links_of_the_table(tmp_path):
    kind = chip_named("h100").device_kinds[0]
    dataclasses.replace(CALIBRATION, device_kind=kind, dtype="bfloat16", devices=1, links={}).save(tmp_path / "c.json")
    pod = find_pod("h100:64")
    measured = pod.calibrated(tmp_path / "c.json", "bf16")
    sizes = (1, 2, 1, 4, 8)
    assert measured.constants(sizes, "bf16").row == pod.constants(sizes, "bf16").row
    assert measured.constants(sizes, "bf16").flops == CALIBRATION.flops != pod.constants(sizes, "bf16").flops
    assert measured.memory_bandwidth(measured.constants(sizes, "bf16")) == CALIBRATION.memory_bandwidth


def test_axes_between_nodes_keep_the_network_if_one_node_was_measured(tmp_path):
    kind = chip_named("h100").device_kinds[0]
    one = dataclasses.replace(CALIBRATION, device_kind=kind, dtype="bfloat16", devices=8)
    one.save(tmp_path / "one.json")
    dataclasses.replace(one, devices=16).save(tmp_path / "two.json")
    pod, sizes = find_pod("h100:8x4@1GB/s"), (1, 2, 1, 2, 8)
    derived, constants = pod.links(sizes), pod.calibrated(tmp_path / "one.json", "bf16").constants(sizes, "bf16")
    within = pod.calibrated(tmp_path / "one.json", "bf16").links(sizes)
    assert (within.row, within.replica, within.ring) == (derived.row, derived.replica, derived.ring)
    assert within.col.permute == LINK and (constants.row, constants.col) == (within.row, within.col)
    between = pod.calibrated(tmp_path / "two.json", "bf16").links(sizes)
    assert between.row.permute == between.replica.permute == LINK and between.ring is None


def test_the_planner_takes_measured_rates(tmp_path):
    CALIBRATION.save(tmp_path / "c.json")
    constants = read_constants(tmp_path / "c.json")
    assert (constants.flops, constants.hbm_bandwidth) == (pytest.approx(2e9), pytest.approx(1008 / 2e-6))
    assert constants.row.permute == LINK
