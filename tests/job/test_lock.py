"""One holder of a folder: several contenders, dead and silent holders, takeovers, storage that fails.

Threads stand for hosts: a holder of another machine is one whose `machine` differs, so that its process is not looked
up.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from mstrain.job import lock as module
from mstrain.job.lock import Lock, TakenOver

BEAT, STALE = 0.05, 0.5


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run" / "lock"


@pytest.fixture
def make(folder):
    """Locks of this folder: `make()` on this machine, `make("b")` on another one."""
    made = []

    def build(machine=None, messages=None, lost=None, **changes):
        lock = Lock(folder, (messages if messages is not None else []).append, lost or (lambda _: None), BEAT, STALE)
        if machine:
            changes |= {"machine": machine, "host": machine}
        lock._me = dataclasses.replace(lock._me, **changes)
        made.append(lock)
        return lock

    yield build
    for lock in made:
        lock.release()


def silence(lock):
    """Its process is gone without a word."""
    lock._over.set()
    time.sleep(2 * BEAT)


def records(folder):
    return sorted(path.name for path in folder.iterdir())


HOLD = """
import sys
from pathlib import Path
from mstrain.job.lock import Lock
Lock(Path(sys.argv[1]), print).acquire()
print("held", flush=True)
sys.stdin.read()
"""


def test_a_live_process_is_named_and_a_killed_one_is_followed_at_once(folder, make):
    command = [sys.executable, "-c", HOLD, str(folder)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(BlockingIOError, match=rf"process {holder.pid} on {os.uname().nodename} since 20"):
        make().acquire()
    holder.kill()
    time.sleep(0.1)  # a zombie counts as dead
    messages = []
    make(messages=messages).acquire()
    assert messages == [] and records(folder) == ["2.json"]
    holder.communicate()


def test_an_id_that_another_process_has_now_is_not_the_holder(folder, make):
    make(started="1").acquire()
    make().acquire()
    assert records(folder) == ["2.json"]


def test_released_it_is_free_and_another_machine_is_refused_only_while_it_beats(make):
    first = make("a")
    first.acquire()
    with pytest.raises(BlockingIOError, match="on a since"):
        make("b").acquire()
    first.release()
    second = make("b")
    second.acquire()
    silence(second)
    messages = []
    make("c", messages=messages).acquire()
    assert len(messages) == 1 and "waiting up to" in messages[0] and "on b" in messages[0]


@pytest.mark.parametrize("torn", [b"", b"[" * 5000, b'{"state": "held", "beat": "1", "pid": "x"}', None])
def test_of_many_contenders_for_a_dead_lock_one_wins(folder, make, torn):
    dead = make("dead")
    dead.acquire()
    silence(dead)
    if torn is not None:
        (folder / "1.json").write_bytes(torn)
    results = {}
    start = threading.Barrier(6)

    def contend(name):
        lock = make(name)
        start.wait()
        try:
            lock.acquire()
            results[name] = lock
        except BlockingIOError:
            results[name] = None

    threads = [threading.Thread(target=contend, args=(f"host{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    winners = [lock for lock in results.values() if lock]
    assert len(results) == 6 and len(winners) == 1 and len(records(folder)) == 1
    winners[0].check()


def test_contenders_that_act_on_an_old_record_withdraw(folder, make):
    """Both saw record 1 dead; the second one comes when the first has been followed by a third."""
    dead, late, first, third = make("dead"), make("late"), make("first"), make("third")
    dead.acquire()
    silence(dead)
    first.acquire()
    first.release()
    third.acquire()
    assert not late._create(2) and records(folder) == ["3.json"]
    third.check()


def test_the_old_holder_notices_and_never_writes_into_the_new_record(folder, make):
    lost = []
    old = make("a", lost=lost.append)
    old.acquire()
    silence(old)
    new = make("b")
    new.acquire()
    with pytest.raises(TakenOver, match="on b since"):
        old.check()
    old._over.clear()
    old._beat()  # wakes up
    assert len(lost) == 1 and "on b" in lost[0]
    old.release()
    new.check()
    assert json.loads((folder / "2.json").read_bytes())["state"].strip() == "held"
    new.release()
    with pytest.raises(TakenOver):  # even when nobody holds it any more
        old._number = 1
        old.check()


def test_an_earlier_attempt_of_the_same_slurm_job_is_not_waited_for(make):
    messages = []
    make("a", job="77", attempt=0).acquire()
    with pytest.raises(BlockingIOError, match="SLURM job 77"):
        make("b", job="78", attempt=1).acquire()
    make("b", messages, job="77", attempt=1).acquire()
    assert messages == []


def test_a_copy_of_a_held_folder_is_free(folder, make, tmp_path):
    make().acquire()
    shutil.copytree(folder, tmp_path / "copy" / "lock")
    Lock(tmp_path / "copy" / "lock", print).acquire()
    with pytest.raises(BlockingIOError):
        make().acquire()


def test_a_deleted_lock_is_written_again_unless_another_trainer_came(folder, make):
    lock = make()
    lock.acquire()
    shutil.rmtree(folder.parent)
    time.sleep(3 * BEAT)
    assert not folder.exists()
    lock.check()
    assert records(folder) == ["1.json"]
    shutil.rmtree(folder.parent)
    make("b").acquire()
    with pytest.raises(TakenOver):
        lock.check()


def test_a_full_disk_refuses_the_first_record_and_spares_a_held_one(folder, make, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    lock = make()
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "write", full)
        with pytest.raises(OSError, match="No space"):
            lock.acquire()
    assert records(folder) == []
    lock.acquire()
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "fsync", full)
        time.sleep(4 * BEAT)
        lock.check()
    before = Path(folder / "1.json").read_bytes()
    time.sleep(4 * BEAT)
    assert Path(folder / "1.json").read_bytes() != before  # it beats again
