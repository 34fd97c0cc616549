"""The record of a lock's holder, and whether a holder on this machine is alive."""

import dataclasses
import datetime
import json
import os
import socket
import uuid
from pathlib import Path

LONGEST = 8192  # bytes of a record


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds the folder.

    Attributes:
      token: different for every holder.
      machine: boot id and process namespace. Process ids are comparable where both are equal; empty when unknown.
      started: start time of the process in clock ticks since boot; empty when unknown.
      path: of the lock's folder, as the holder sees it.
      job, attempt: SLURM's job id, empty outside of SLURM, and how often SLURM has restarted it.
      since: UTC, for people.
    """

    token: str
    host: str
    machine: str
    pid: int
    started: str
    path: str
    job: str
    attempt: int
    since: str

    @classmethod
    def of_this_process(cls, folder: Path) -> "Holder":
        """A new holder: this process."""
        return cls(
            token=uuid.uuid4().hex, host=socket.gethostname(), machine=_machine(), pid=os.getpid(),
            started=_process(os.getpid())[1], path=str(folder.resolve()), job=os.environ.get("SLURM_JOB_ID", ""),
            attempt=int(os.environ.get("SLURM_RESTART_COUNT", "0") or 0),
            since=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        )  # fmt: skip

    def content(self, beats: int, released: bool = False) -> bytes:
        """The record of this holder; its length depends on neither argument."""
        state = {"state": f"{'released' if released else 'held':<8}", "beat": f"{beats:012}"}
        return json.dumps(state | dataclasses.asdict(self)).encode() + b"\n"

    def __str__(self) -> str:
        job = f" (SLURM job {self.job})" if self.job else ""
        return f"process {self.pid} on {self.host}{job} since {self.since}"


@dataclasses.dataclass(frozen=True)
class Record:
    """What a record file holds. `raw` changes with every heartbeat; `holder` is None when it cannot be read."""

    raw: bytes
    holder: Holder | None = None
    released: bool = False

    @classmethod
    def read(cls, path: Path) -> "Record | None":
        """The record at `path`; None if it is missing."""
        try:
            with open(path, "rb") as file:
                return cls.parse(file.read(LONGEST))
        except FileNotFoundError:
            return None

    @classmethod
    def parse(cls, raw: bytes) -> "Record":
        try:
            values = json.loads(raw)
            released, _ = values.pop("state").strip() == "released", values.pop("beat")
            holder = Holder(**values)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return cls(raw)
        typed = all(type(getattr(holder, field.name)) is field.type for field in dataclasses.fields(holder))
        return cls(raw, holder, released) if typed and 0 < holder.pid < 2**31 else cls(raw)


def _machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def runs(holder: Holder) -> bool:
    """Whether the process of a holder on this machine is alive."""
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # a process of another user
    state, started = _process(holder.pid)
    return state not in ("Z", "X") and started in ("", holder.started)


def _process(pid: int) -> tuple[str, str]:
    """State and start time of a process; empty when they cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""
