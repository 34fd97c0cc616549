"""Local checkpoints: every bit comes back, from copies too; damage, other layouts and lost shards are noticed; a job
whose host lost its disk continues from the copies.
"""

import resource
import shutil
import sys

import jax
import numpy as np
import pytest

from mstrain.checkpoints import shards
from mstrain.checkpoints.local import LocalCheckpoints, forget
from mstrain.job.exit_codes import RESTART
from mstrain.job.job import ALONE
from mstrain.program.step import abstract_state
from tests.checkpoints.test_checkpoints import OPTIMIZER, module_on, random_state
from tests.job.processes import Job, arguments
from tests.job.test_processes import rows


@pytest.fixture
def module():
    return module_on("2x2x2", slices="2")


@pytest.fixture
def state(module):
    """Values whose bits arithmetic would not keep: minus zero, NaN with a payload, the smallest denormal."""
    odd = np.array([0x80000000, 0x7FC12345, 1], np.uint32).view(np.float32)
    stored = random_state(module)[1]
    return jax.tree.map(lambda x: x.at[..., :3].set(odd) if x.ndim else x, stored)


def assert_same_bits(one, other):
    def compare(a, b):
        assert a.sharding == b.sharding and a.dtype == b.dtype
        for pair in zip(a.addressable_shards, b.addressable_shards, strict=True):
            np.testing.assert_array_equal(*(np.asarray(shard.data).view(np.uint32) for shard in pair))

    jax.tree.map(compare, one, other)


def test_the_newest_undamaged_step_comes_back_bit_for_bit(tmp_path, module, state):
    warnings = []

    def open_local(module=module):
        return LocalCheckpoints(tmp_path / "local", tmp_path, module, OPTIMIZER, ALONE, warnings.append)

    local = open_local()
    for step in (2, 4, 6):
        local.save(step, state, {"step": step})
    local.finish(done=False)
    folders = sorted((tmp_path / "local").glob("*/process_0/*"))
    assert [int(folder.name) for folder in folders] == [4, 6], "all hosts have 4, so 2 is not needed"
    names = shards.names_of(0, jax.tree.leaves(abstract_state(module, OPTIMIZER)))
    with open(folders[-1] / min(names), "r+b") as file:
        byte = file.read(1)[0]
        file.seek(0)
        file.write(bytes([byte ^ 4]))
    found, step, lost = open_local().resume(above=3)
    assert (step, lost) == (4, []) and "local checkpoint 6 is damaged" in warnings[0]
    assert_same_bits(found, state)
    assert open_local().facts(4) == {"step": 4} and open_local().steps() == {4, 6}
    assert open_local().resume(above=4) is None
    assert open_local(module_on("2x4", slices="2")).resume(above=0) is None, "other shards"
    assert open_local(module_on("2x2x2", slices="1")).resume(above=0) is None, "another order of features"
    (tmp_path / "local_checkpoints.json").unlink()
    assert open_local().resume(above=0) is None, "another run in the same folder"


def test_saves_that_a_later_attempt_has_left_behind_are_not_found(tmp_path, module, state):
    def open_local(folder="local", module=module):
        return LocalCheckpoints(tmp_path / folder, tmp_path, module, OPTIMIZER, ALONE, print)

    def saved(step):
        local = open_local()
        local.save(step, state, {})
        local.finish(done=False)
        return open_local().steps()

    assert saved(4) == {4}
    open_local(module=module_on("2x4", slices="2")).drop_after(3)  # an attempt on another mesh resumes after step 3
    assert open_local().steps() == set()
    assert saved(4) == {4}
    assert open_local("other").steps() == set() and open_local().steps() == set(), "another folder in between"
    assert saved(4) == {4}
    forget(tmp_path)  # an attempt without local checkpoints
    assert open_local().steps() == set()


def test_a_full_disk_stops_nothing_and_a_finished_run_leaves_nothing(tmp_path, module, state):
    warnings = []
    local = LocalCheckpoints(tmp_path / "local", tmp_path, module, OPTIMIZER, ALONE, warnings.append)
    local.save(2, state, {})
    local.drop_after(2)  # waits for it
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        local.save(4, state, {})
        local.drop_after(4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (warning,) = warnings
    assert "local save of step 4 failed" in warning and local.steps() == {2}
    local.save(6, state, {})
    local.finish(done=False)
    again = LocalCheckpoints(tmp_path / "local", tmp_path, module, OPTIMIZER, ALONE, warnings.append)
    assert again.resume(above=0)[1] == 6
    again.finish(done=True)
    assert not [*(tmp_path / "local").iterdir()]


def test_a_host_copy_is_not_the_memory_of_the_device():
    array = jax.device_put(np.zeros(1024, np.float32))
    (copied,) = shards.to_host([array]).values()
    assert copied.ctypes.data != array.unsafe_buffer_pointer()


def test_copies_give_the_bits_of_their_source(tmp_path, module, state):
    """As if one device of every group of copies had its shards and all others had lost theirs."""
    leaves = jax.tree.leaves(abstract_state(module, OPTIMIZER))
    for name, shard in shards.to_host(jax.tree.leaves(state)).items():
        shard.tofile(tmp_path / name)
    found = [shards.from_files(tmp_path, i, leaf, having={0}) for i, leaf in enumerate(leaves)]
    assert_same_bits(found, jax.tree.leaves(state))


HANGS_AFTER_7 = """
import time
from mstrain.checkpoints.schedule import Schedule
from mstrain.cli import run_command
from mstrain.commands.train import COMMAND
is_local = Schedule.is_local
Schedule.is_local = lambda self, step: time.sleep(3600) if step == 8 else is_local(self, step)
run_command(COMMAND)
"""


class Spread:
    """A leaf of which device 0 and 2 hold the first half, 1 and 3 the second; two devices per process."""

    def __init__(self, processes):
        self.shape, self.sharding = (8,), self
        self._devices = [type("Device", (), {"process_index": process}) for process in processes]

    def devices_indices_map(self, _):
        return {device: (slice(i % 2 * 4, i % 2 * 4 + 4),) for i, device in enumerate(self._devices)}


@pytest.mark.parametrize("processes, having, found", [
    ((0, 0, 1, 1), {0}, True), ((0, 0, 1, 1), {1}, True), ((0, 0, 1, 1), set(), False),
    ((0, 1, 0, 1), {0}, False), ((0, 1, 0, 1), {0, 1}, True),
])  # fmt: skip
def test_a_shard_without_a_copy_cannot_be_replaced(processes, having, found):
    sources = shards.choose_sources(Spread(processes), having)
    assert (sources is not None) == found
    assert not found or len(sources) == 2 and {device.process_index for device in sources} <= having


def test_a_host_that_lost_its_disk_continues_from_copies(tmp_path):
    """Two processes, data-parallel; nothing is in run_dir when one dies after step 7 and its local folder is wiped."""
    run, local = tmp_path / "run", tmp_path / "local"
    words = ["steps=8", "mesh=2x2x2", "checkpoint.every=100", "eval.every=100", "checkpoint.local_every=4"]
    words = arguments(run, tmp_path, *words, f"checkpoint.local_dir={local}")
    job = Job(tmp_path, words, 2, 0, command=[sys.executable, "-c", HANGS_AFTER_7])
    assert job.wait_for(lambda: len(rows(run)) >= 7), job.output[-4000:]
    before = {row["step"]: row["loss"] for row in rows(run)}
    job.processes[1].kill()
    assert job.wait()[0] == RESTART, job.output[-4000:]
    (lost,) = local.glob("*/process_1")
    shutil.rmtree(lost)
    job = Job(tmp_path, words, 2, 1)
    assert job.wait() == [0, 0], job.output[-4000:]
    assert (
        "after step 4 from the hosts' own" in job.output and "replicas replace the shards that process 1" in job.output
    )
    after = {row["step"]: row["loss"] for row in rows(run)}
    assert list(after) == [*range(1, 9)] and {step: after[step] for step in before} == before
    assert not [*local.iterdir()], "a finished run leaves nothing on its hosts"
