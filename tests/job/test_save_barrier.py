"""Barriers of a save among threads that stand for processes: all come, one fails, one never comes."""

import concurrent.futures

import pytest

from mstrain.job.save_barrier import SaveBarrier

PROCESSES = 3
LONG, SHORT = 10_000, 200  # milliseconds


class Member:
    """What an agreement needs of a job; messages arrive at once."""

    processes = PROCESSES

    def __init__(self, process: int, members: list):
        self.process, self.leads = process, process == 0
        self._members, self._handlers = members, {}
        members.append(self)

    def on(self, kind, handler):
        self._handlers[kind] = handler

    def send(self, kind, **values):
        for member in self._members[1:] if self.leads else self._members[:1]:
            member._handlers[kind](self.process, {"kind": kind, **values})

    def name(self, process):
        return f"process {process} (host)"


@pytest.fixture
def agreements():
    members = []
    found = [SaveBarrier(Member(process, members)) for process in range(PROCESSES)]
    for agreement in found:
        agreement.begin()
    return found


def outcome(agreement, key="written", timeout_ms=LONG) -> str:
    try:
        agreement.wait(key=key, timeout_ms=timeout_ms)
        return "passed"
    except OSError as error:
        return str(error)


def outcomes(agreements, **arguments) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        return list(pool.map(lambda agreement: outcome(agreement, **arguments), agreements))


def test_all_pass_when_all_have_come(agreements):
    for key in ("written", "renamed"):
        assert outcomes(agreements, key=key) == ["passed"] * PROCESSES


@pytest.mark.parametrize("failing", range(PROCESSES))
def test_the_failure_of_one_breaks_the_barrier_for_all(failing, agreements):
    waiting = [agreement for i, agreement in enumerate(agreements) if i != failing]
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        first = pool.submit(outcome, waiting[0])
        agreements[failing].fail("disk full")
        assert first.result() == f"process {failing} (host): disk full"
    assert outcome(waiting[1]) == f"process {failing} (host): disk full"  # it came after the failure
    assert "disk full" in outcome(agreements[failing])


def test_who_comes_while_a_failure_is_on_its_way_has_failed(agreements):
    with pytest.raises(OSError, match="process 1 .*: RuntimeError: torn"):
        try:
            raise RuntimeError("torn")
        finally:
            agreements[1].wait(key="last", timeout_ms=LONG)
    assert outcome(agreements[0]) == outcome(agreements[2]) == "process 1 (host): RuntimeError: torn"


def test_the_next_save_knows_nothing_of_a_failure(agreements):
    agreements[2].fail("disk full")
    for agreement in agreements:
        agreement.begin()
    assert outcomes(agreements) == ["passed"] * PROCESSES


def test_time_is_up_for_one_that_never_comes(agreements):
    assert "not every process arrived" in outcome(agreements[1], timeout_ms=SHORT)
