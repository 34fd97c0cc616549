"""Each process digests what it wrote, process 0 reads none of it again; a save may take as long as its size needs."""

import concurrent.futures
import json

import pytest
from etils import epath

from mstrain.checkpoints import manifest
from mstrain.checkpoints.handler import DigestingHandler, _Part
from mstrain.checkpoints.limits import seconds_allowed


def write_files(folder, names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_process_0_joins_digests_that_others_made(tmp_path):
    folder, elsewhere = epath.Path(tmp_path) / "7", tmp_path / "elsewhere"
    names = ["ocdbt.process_0/d/a", "ocdbt.process_1/d/b", "ocdbt.process_10/d/c", "_METADATA"]
    write_files(tmp_path / "7" / "state", names)
    sizes = [manifest.write_part(folder / "state", process, {"limit_seconds": 1}) for process in range(3)]
    assert sizes == [len("ocdbt.process_0/d/a")] * 2 + [0]
    lost = tmp_path / "7" / "state" / "ocdbt.process_1" / "d" / "b"
    lost.rename(elsewhere)
    manifest.join(folder, "state", 3)
    assert manifest.problems(folder) == ["state/ocdbt.process_1/d/b is missing"]
    elsewhere.rename(lost)
    assert not manifest.problems(folder)
    assert [host["bytes"] for host in manifest.read(folder)["hosts"]] == sizes
    assert len(manifest.read(folder)["files"]) == 4


@pytest.mark.parametrize("content, problem", [("dbta", "checksum differs"), ("dat", "has 3 bytes, 4 were written")])
def test_a_changed_or_shortened_file_is_a_problem(tmp_path, content, problem):
    write_files(tmp_path, ["data", "other"])
    manifest.write(epath.Path(tmp_path))
    assert not manifest.problems(tmp_path)
    (tmp_path / "data").write_text(content)
    (found,) = manifest.problems(tmp_path)
    assert problem in found


@pytest.mark.parametrize("size, speed, at_least", [(0, None, 120), (760e9, 2e9, 3800), (760e9, None, 152_000)])
def test_the_limit_grows_with_size_and_slowness(size, speed, at_least):
    assert at_least <= seconds_allowed(size, speed) <= at_least + 120


def test_a_write_that_hangs_ends_at_the_limit(tmp_path):
    handler = DigestingHandler()
    handler.limit = 0.05
    with pytest.raises(TimeoutError, match="this host's part was not written within 0 s"):
        _Part(handler, epath.Path(tmp_path), [concurrent.futures.Future()], 0.0).result(timeout=1e6)
    assert handler.speed is None


@pytest.mark.parametrize("name", ["../x", "/x", "state/../../x"])
def test_a_manifest_cannot_name_a_file_outside_the_folder(tmp_path, name):
    folder = epath.Path(tmp_path) / "7"
    write_files(tmp_path / "7", ["data"])
    manifest.write(folder)
    document = json.loads((folder / manifest.NAME).read_text())
    document["files"] = {name: document["files"]["data"]}
    (folder / manifest.NAME).write_text(json.dumps(document))
    assert "outside the folder" in manifest.problems(folder)[0]


def test_a_folder_without_a_readable_manifest_has_no_size(tmp_path):
    assert manifest.size(tmp_path) == 0
    (tmp_path / manifest.NAME).write_text("{")
    assert manifest.size(tmp_path) == 0
