"""Predictions: columns that only a schedule fills, one dumped file per row, reasons for what is missing."""

import dataclasses

import pytest

from mstrain.benchmarks import predicted
from mstrain.benchmarks.command import run
from mstrain.benchmarks.config import load
from mstrain.benchmarks.table import from_json
from mstrain.hardware import parse_target

ARGUMENTS = ["target=v5p:2x2x1", "models=tiny", "seq=16", "layers=1"]


@pytest.mark.usefixtures("no_compiler")
def test_without_the_compiler_it_says_how_to_get_it():
    with pytest.raises(ValueError, match="pip install"):
        run(ARGUMENTS)


@pytest.mark.usefixtures("tpu_compiler")
def test_products_are_predicted_and_dumped(tmp_path, capsys):
    where = [f"run_dir={tmp_path / 'run'}", f"dump={tmp_path / 'hlo'}"]
    assert run([*ARGUMENTS, "bench=gemm", "meshes=2x2 1x4", "algorithms=collective cannon", *where]) == 0
    report = from_json((tmp_path / "run" / "benchmark.json").read_text())
    assert report.kind == "predicted" and report.source.startswith("Predicted for v5p:2x2x1")
    good = [row for row in report.rows if not row.problem]
    assert len(good) == 4 + 4 + 4  # cannon only on the square mesh
    assert all(0 <= row.exposed <= row.seconds and row.memory > 0 and 0 < row.mfu < 1 for row in good)
    (bad,) = [row for row in report.rows if row.problem]
    assert bad.algorithm == "cannon" and "square" in bad.problem
    files = sorted(path.name for path in (tmp_path / "hlo").iterdir())
    assert len(files) == len(good)
    assert all("is_scheduled=true" in (tmp_path / "hlo" / name).read_text()[:200] for name in files)
    assert "Predicted for v5p:2x2x1" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("tpu_compiler")
def test_what_a_device_cannot_hold_is_said(monkeypatch, capsys, tmp_path):
    chip = parse_target("v5p:2x2x1").chip
    small = dataclasses.replace(chip, hbm_bytes=1e3)
    tpu_slice = dataclasses.replace(parse_target("v5p:2x2x1"), chip=small)
    monkeypatch.setattr("mstrain.benchmarks.config.parse_target", lambda text: tpu_slice)
    where = [f"run_dir={tmp_path}", "bench=gemm", "meshes=2x2", "algorithms=collective"]
    assert run([*ARGUMENTS, *where]) == 0
    assert "collective on row2-col2: does not fit, 0.00 of 0.00 GiB" in " ".join(capsys.readouterr().out.split())


@pytest.mark.usefixtures("tpu_compiler")
def test_the_tuner_chooses_a_mesh_of_the_torus(monkeypatch):
    config = load([*ARGUMENTS, "algorithms=meshslice"])
    (mesh,) = predicted.choose_meshes(config, config.tpu_slice)
    assert (mesh.row, mesh.col) in config.tpu_slice.mesh_shapes(mesh.data)
    every = predicted.choose_meshes(load([*ARGUMENTS, "meshes=all"]), config.tpu_slice)
    assert [(m.row, m.col) for m in every] == list(config.tpu_slice.mesh_shapes())
