"""The job's secret: made anew, private, gone afterwards; nothing planted in its place is followed or waited for."""

import contextlib
import os
import stat

import pytest

from mstrain.job import secret as secrets
from mstrain.job.secret import VARIABLE, new_secret, secret_file

COORDINATOR = "10.0.0.1:8476"
FILE = secret_file("", COORDINATOR).name


@contextlib.contextmanager
def offered_secret(run_dir, coordinator=COORDINATOR):
    secret = new_secret()
    with secrets.offered_secret(run_dir, coordinator, secret):
        yield secret


def read_secret(run_dir, coordinator=COORDINATOR):
    return secrets.read_secret(run_dir, coordinator)


@pytest.fixture(autouse=True)
def no_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_secret_is_private_and_gone_with_the_folders_made_for_it(tmp_path):
    run = tmp_path / "a" / "b"
    with offered_secret(run) as secret:
        assert read_secret(run) == secret and len(secret) == 64
        assert stat.S_IMODE((run / FILE).stat().st_mode) == 0o600 and os.listdir(run) == [FILE]
    assert not (tmp_path / "a").exists() and read_secret(run) is None


def test_a_folder_of_a_run_keeps_its_files(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    with offered_secret(tmp_path) as first:
        pass
    with offered_secret(tmp_path) as second:
        assert second != first
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_stale_secret_is_replaced_and_that_of_a_later_job_is_kept(tmp_path):
    (tmp_path / FILE).write_bytes(b"of a process that was killed")
    with offered_secret(tmp_path) as secret:
        assert read_secret(tmp_path) == secret
        (tmp_path / FILE).write_bytes(b"of a later job")
    assert read_secret(tmp_path) == b"of a later job"


def test_a_planted_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "victim").write_text("untouched")
    (tmp_path / FILE).symlink_to(tmp_path / "victim")
    assert read_secret(tmp_path) is None
    with offered_secret(tmp_path) as secret:
        assert read_secret(tmp_path) == secret
    assert (tmp_path / "victim").read_text() == "untouched"


def test_a_planted_pipe_or_folder_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / FILE)
    assert read_secret(tmp_path) is None
    (tmp_path / FILE).unlink()
    (tmp_path / FILE).mkdir()
    assert read_secret(tmp_path) is None


def test_the_environment_comes_first_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "0123456789abcdef\n")
    with offered_secret(tmp_path / "run") as secret:
        assert secret == read_secret(tmp_path) == b"0123456789abcdef"
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(ValueError, match="has 5 characters.*openssl rand"):
        read_secret(tmp_path)


def test_a_run_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="Cannot write into run_dir=.*Type another"), offered_secret(tmp_path / "file"):
        pass


def test_a_second_job_in_the_same_folder_leaves_the_secret_of_the_first(tmp_path):
    with offered_secret(tmp_path) as first:
        with offered_secret(tmp_path, "10.0.0.2:8476") as second:
            assert (read_secret(tmp_path), read_secret(tmp_path, "10.0.0.2:8476")) == (first, second)
        assert read_secret(tmp_path) == first
