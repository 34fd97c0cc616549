"""Starts one process per host, restarts them after a failure, and continues without hosts that are lost.

The supervisor runs outside of the job: on a login node, or on any host that reaches the others. Before every attempt it
runs `true` on each host. It leaves out a host that does not answer, until it answers again, and a host on which the
process died by itself in several consecutive attempts. The exit codes of an attempt decide whether it restarts
(`mstrain.job.exit_codes`).
"""

import contextlib
import dataclasses
import math
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from mstrain.job.exit_codes import FINISHED, RESTART, STOPPED, restartable
from mstrain.job.signals import handled

PROBE_SECONDS = 20
POLL_SECONDS = 0.1
MAX_DEATHS = 2  # consecutive deaths of a host's own process after which the host is left out


@dataclasses.dataclass(frozen=True)
class SuperviseConfig:
    """The hosts of a job and how to start a process on them. All other keys are those of `mstrain train`."""

    hosts: str
    """Names or addresses of all hosts, separated by commas. The first usable one is the coordinator."""
    launch: str
    """Command prefix that runs a shell command line on {host}, such as `ssh -tt {host}`."""
    port: int = 8476
    """TCP port of the coordinator, from 1 to 65535."""
    max_failures: int = 5
    """Number of consecutive failed attempts without a new checkpoint after which supervise ends with 75."""
    wait_seconds: float = 10.0
    """Seconds between attempts. Doubles after each consecutive failure, up to 32 times the value."""
    end_seconds: float = 180.0
    """Seconds from the end of the first process until the other processes are killed."""

    def __post_init__(self):
        if "{host}" not in self.launch:
            raise ValueError(f"launch={self.launch!r} does not contain {{host}}. Type launch='ssh -tt {{host}}'.")
        if len(set(self.names)) != len(self.names) or not all(self.names):
            raise ValueError(f"hosts={self.hosts!r} is not a list of different hosts. Type hosts=a,b,c.")
        for name, least in (("port", 1), ("max_failures", 1), ("wait_seconds", 0), ("end_seconds", 1)):
            if not least <= getattr(self, name) < (65536 if name == "port" else math.inf):
                raise ValueError(f"{name}={getattr(self, name)} is out of range. Type a number from {least} on.")

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.hosts.split(",")]

    def words(self, host: str, line: str) -> list[str]:
        """The command that runs the shell command `line` on `host`."""
        return [*(word.replace("{host}", host) for word in shlex.split(self.launch)), line]


class Supervisor:
    """Runs attempts until the job finishes, is refused or fails too often.

    Args:
      config: hosts and limits.
      lines: hosts in use to the shell command line of each; raises ValueError when they cannot run the job.
      newest: step of the newest checkpoint, which shows progress.
      log: called with messages.
    """

    def __init__(
        self, config: SuperviseConfig, lines: Callable[[list[str]], list[str]], newest: Callable[[], int | None],
        log: Callable[[str], None],
    ):  # fmt: skip
        self._config, self._lines, self._newest, self._log = config, lines, newest, log
        self._deaths = dict.fromkeys(config.names, 0)
        self._running: dict[str, subprocess.Popen] = {}
        self._signaled = threading.Event()

    def run(self) -> int:
        """Returns the exit code of the job."""
        failures = 0
        with self._forwarding():
            while True:
                saved = self._newest()
                codes = self._attempt()
                final = self._final(codes)
                if final is not None:
                    return final
                if self._newest() != saved:
                    failures, self._deaths = 0, dict.fromkeys(self._deaths, 0)
                elif STOPPED not in codes.values():
                    failures += 1
                if failures >= self._config.max_failures:
                    self._log(f"{failures} attempts in a row failed without a new checkpoint. Stopping.")
                    return RESTART
                self._signaled.wait(self._config.wait_seconds * 2 ** min(failures, 5))

    def _attempt(self) -> dict[str, int]:
        """Runs the job once; the exit code of each process by host. Empty when no host answers."""
        hosts = self._usable()
        if not hosts or self._signaled.is_set():
            return {}
        lines = self._lines(hosts)
        self._running = {
            host: subprocess.Popen(self._config.words(host, line), stdin=subprocess.DEVNULL, start_new_session=True)
            for host, line in zip(hosts, lines, strict=False)
        }
        if self._signaled.is_set():  # while they were being started
            self._send(signal.SIGTERM)
        deadline = math.inf
        while any(process.poll() is None for process in self._running.values()):
            if deadline == math.inf and any(process.poll() is not None for process in self._running.values()):
                deadline = time.monotonic() + self._config.end_seconds
            if time.monotonic() > deadline:
                self._send(signal.SIGKILL)
            time.sleep(POLL_SECONDS)
        codes = {host: process.returncode for host, process in self._running.items()}
        self._log("ended: " + ", ".join(f"{host} with {code}" for host, code in codes.items()))
        for host, code in codes.items():
            died = restartable(code) and code not in (RESTART, STOPPED)
            self._deaths[host] = self._deaths[host] + 1 if died else 0
        return codes

    def _final(self, codes: dict[str, int]) -> int | None:
        """The exit code of the job when nothing has to be restarted."""
        for code in codes.values():
            if code != FINISHED and not restartable(code):
                return code
        if codes and set(codes.values()) == {FINISHED}:
            return FINISHED
        if self._signaled.is_set():
            return STOPPED if set(codes.values()) <= {FINISHED, STOPPED} else RESTART
        return None

    def _usable(self) -> list[str]:
        names = self._config.names
        with ThreadPoolExecutor(min(len(names), 64)) as pool:
            answers = dict(zip(names, pool.map(self._answers, names), strict=True))
        usable = [host for host in names if answers[host] and self._deaths[host] < MAX_DEATHS]
        for host in names:
            if host not in usable:
                self._log(f"{host} {'fails repeatedly' if answers[host] else 'does not answer'} and is left out")
        return usable or [host for host in names if answers[host]]

    def _answers(self, host: str) -> bool:
        try:
            return not subprocess.run(
                self._config.words(host, "true"), stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_SECONDS,
                start_new_session=True,
            ).returncode  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return False

    @contextlib.contextmanager
    def _forwarding(self):
        """Inside, a signal ends the job: it is sent to every process as SIGTERM."""

        def forward(number: signal.Signals) -> None:
            self._log(f"{number.name}: the job saves and stops")
            self._signaled.set()
            self._send(signal.SIGTERM)

        with handled(forward):
            yield

    def _send(self, number: signal.Signals) -> None:
        for process in self._running.values():
            if process.poll() is None:
                with contextlib.suppress(OSError):
                    process.send_signal(number)
