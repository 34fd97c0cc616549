"""train.py as real processes: one or several that form a job on this machine."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.quick import QUICK_FLAGS

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    "model=tiny", "model.layers=1", "model.width=32", "model.mlp_dim=64", "data=synthetic",
    "data.num_tokens=8192", "vocab_size=61", "seq=16", "batch=16", "dtype=f32", "parallel.slices=2",
    "optimizer.warmup=2", "eval.batches=1", "sample.tokens=0",
]  # fmt: skip


class Job:
    """The processes of one attempt of a run; output of process i is in `folder/attempt-N.i.txt`."""

    def __init__(
        self, folder: Path, arguments: list[str], processes: int = 1, attempt: int = 0, present=None, command=(),
        port=None,
    ):  # fmt: skip
        environment = {
            **{name: value for name, value in os.environ.items() if name != "NPROC"},
            "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1", "XLA_FLAGS": QUICK_FLAGS,
        }  # fmt: skip
        command = list(command) or [sys.executable, str(ROOT / "train.py")]
        self.outputs, self.processes = [], []
        self.port = port or free_port()
        place = [f"coordinator=127.0.0.1:{self.port}", f"processes={processes}"] if processes > 1 else []
        for i in range(processes) if present is None else present:
            own = [*place, f"process={i}"] if place else []
            self.outputs.append(folder / f"attempt-{attempt}.{i}.txt")
            with open(self.outputs[-1], "w") as output:
                self.processes.append(subprocess.Popen(
                    [*command, *arguments, *own], cwd=ROOT, env=environment,
                    stdout=output, stderr=subprocess.STDOUT,
                ))  # fmt: skip

    @property
    def output(self) -> str:
        return "\n".join(path.read_text() for path in self.outputs)

    def wait(self, seconds: float = 240) -> list[int]:
        """Exit codes; fails with the output when the job has not ended in time."""
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"The job did not end within {seconds} s:\n{self.output[-4000:]}") from None

    def wait_for(self, condition, seconds: float = 240) -> bool:
        """Whether `condition()` came true while all processes ran."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if condition():
                return True
            if any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.005)
        return False

    def send(self, number: signal.Signals, index: int = 0) -> None:
        self.processes[index].send_signal(number)

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def arguments(run_dir: Path, cache: Path, *more: str) -> list[str]:
    """A small run in `run_dir`; corpus and compiled programs lie in `cache`."""
    keys = {argument.partition("=")[0] for argument in more}
    usual = [argument for argument in SMALL if argument.partition("=")[0] not in keys]
    return [
        *usual,
        f"run_dir={run_dir}",
        f"data.cache_dir={cache}",
        f"compile_cache={cache / 'compiled'}",
        *more,
    ]
