"""Kills runs at random moments until enough have died, and compares what comes out with a run that was left
alone.

    python -m tests.soak.soak --kills 50 --seed 0 --folder /tmp/soak

Every run is one of five kinds (one or two processes; one mesh or another mesh after every kill; saves to the run
directory, or also to local folders of which one is wiped after half of the kills) and is started again until it has
made all its steps. Half of the kills (SIGKILL) come while a checkpoint is being written, the others during start-up or
between steps. At the end of each run: metrics.jsonl has every step once; losses and final parameters equal those of
the undisturbed run (to the last bit on one mesh, within rounding otherwise), so no batch was repeated or skipped; every
start resumed from the newest complete checkpoint, or from a newer local one, and all checksums hold.
"""

import argparse
import dataclasses
import json
import random
import re
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from mstrain.checkpoints import manifest
from mstrain.job.exit_codes import RESTART
from tests.job.processes import Job, arguments

STEPS, EVERY = 24, 3
MESHES = ("2x4", "4x2", "1x8", "2x2x2")
TOLERANCE = 1e-5  # f32 rounds differently on another mesh, and AdamW amplifies it over 24 steps
MOMENTS = ("start", "step", "save", "save")
KILLS_PER_RUN = 8
PATIENCE = 600  # seconds for an attempt; a loaded machine may take long


@dataclasses.dataclass(frozen=True)
class Kind:
    """Runs of `processes`; with several `meshes`, another one after every kill; `local`: with local checkpoints."""

    processes: int
    meshes: tuple[str, ...]
    local: bool = False


KINDS = [Kind(1, ("2x4",)), Kind(2, ("2x4",)), Kind(1, MESHES), Kind(2, MESHES), Kind(2, ("2x2x2",), local=True)]


@dataclasses.dataclass
class Tally:
    """What has happened so far."""

    runs: int = 0
    attempts: int = 0
    kills: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(MOMENTS, 0))
    lost_steps: int = 0
    from_local: int = 0
    meshes: set[str] = dataclasses.field(default_factory=set)
    processes: set[int] = dataclasses.field(default_factory=set)
    worst: float = 0.0
    identical: int = 0
    seconds: list[float] = dataclasses.field(default_factory=list)

    @property
    def killed(self) -> int:
        return sum(self.kills.values())

    def __str__(self) -> str:
        kills = ", ".join(f"{number} at {moment}" for moment, number in self.kills.items())
        ended = f", survivors ended within {max(self.seconds):.1f} s" if self.seconds else ""
        return (
            f"{self.killed} kills ({kills}) in {self.attempts} attempts of {self.runs} runs; "
            f"{sorted(self.processes)} processes, meshes {sorted(self.meshes)}; {self.lost_steps} steps made "
            f"again, {self.from_local} starts from local checkpoints; {self.identical} runs equal to the last bit, "
            f"largest difference of the others {self.worst:.1e}{ended}"
        )


class Soak:
    """Runs in `folder`, compared with undisturbed ones made on demand, until `kills` attempts were killed."""

    def __init__(self, folder: Path, kills: int, seed: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._kills, self._random = folder, kills, random.Random(seed)
        self.tally = Tally()

    def reference(self, kind: Kind) -> Path:
        """The run that was left alone, on the same processes and mesh when the kind has one mesh."""
        processes, mesh = (kind.processes, kind.meshes[0]) if len(kind.meshes) == 1 else (1, "2x4")
        folder = self._folder / f"reference-{processes}-{mesh}"
        if not (folder / "run" / "summary.json").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            job = self._start(folder, mesh, Kind(processes, (mesh,)), 0)
            assert set(job.wait(PATIENCE)) == {0}, job.output
        return folder / "run"

    def run(self, kind: Kind) -> None:
        """One run with all its attempts, then the comparison."""
        reference, tally = self.reference(kind), self.tally
        folder = self._folder / f"run-{tally.runs}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        tally.runs += 1
        allowed = min(tally.killed + KILLS_PER_RUN, self._kills)
        for attempt in range(1000):
            mesh = self._random.choice(kind.meshes)
            tally.attempts, tally.meshes, tally.processes = (
                tally.attempts + 1,
                tally.meshes | {mesh},
                tally.processes | {kind.processes},
            )
            newest = max(_complete(folder / "run"), default=None)
            made = _logged(folder / "run")
            job = self._start(folder, mesh, kind, attempt)
            died = tally.killed < allowed and self._kill(job, folder / "run", self._random.choice(MOMENTS))
            codes = job.wait(PATIENCE)
            began = re.search(r"(?:Resume after step|has all) (\d+)( from the hosts' own)?", job.output)
            if began or not died:
                step, is_local = (int(began[1]), bool(began[2])) if began else (None, False)
                assert step == newest or (is_local and step > (newest or 0)), (newest, job.output[-3000:])
                tally.lost_steps += max(made - (step or 0), 0)
                tally.from_local += is_local
            if not died:
                assert set(codes) == {0}, job.output[-4000:]
                break
            if kind.local and self._random.random() < 0.5:
                for lost in sorted((folder / "local").glob(f"*/process_{self._random.randrange(kind.processes)}")):
                    shutil.rmtree(lost)
        self._compare(folder / "run", reference, exact=len(kind.meshes) == 1)
        print(f"run {tally.runs} ({kind}): {tally}", flush=True)

    def _start(self, folder: Path, mesh: str, kind: Kind, attempt: int) -> Job:
        usual = [f"mesh={mesh}", f"steps={STEPS}", "eval.every=100", "hosts.join_seconds=45"]
        if kind.local:
            usual += [f"checkpoint.local_dir={folder / 'local'}", f"checkpoint.local_every={EVERY}"]
        usual.append(f"checkpoint.every={4 * EVERY if kind.local else EVERY}")
        return Job(folder, arguments(folder / "run", self._folder / "cache", *usual), kind.processes, attempt)

    def _kill(self, job: Job, run: Path, moment: str) -> bool:
        """Whether the job was killed at (or near) the moment before it finished."""
        if moment == "start":
            time.sleep(self._random.uniform(0, 8))
        elif moment == "step":
            wanted = _logged(run) + self._random.randint(1, 2 * EVERY)
            job.wait_for(lambda: _logged(run) >= wanted)
            time.sleep(self._random.uniform(0, 0.1))
        else:
            unfinished = ("run/checkpoints/*.orbax-checkpoint-tmp*", "local/*/*/*.tmp")
            job.wait_for(lambda: any(any(run.parent.glob(pattern)) for pattern in unfinished))
            time.sleep(self._random.uniform(0, 0.1))
        if any(process.poll() is not None for process in job.processes):
            return False
        victim = self._random.choice(job.processes)
        victim.kill()
        killed = time.monotonic()
        self.tally.kills[moment] += 1
        codes = job.wait(PATIENCE)
        if len(codes) > 1:
            self.tally.seconds.append(time.monotonic() - killed)
            survivors = [code for process, code in zip(job.processes, codes, strict=True) if process is not victim]
            assert set(survivors) <= {RESTART}, job.output[-4000:]
        return True

    def _compare(self, run: Path, reference: Path, exact: bool) -> None:
        rows, expected = _lines(run), _lines(reference)
        assert [row["step"] for row in rows] == [*range(1, STEPS + 1)], [row["step"] for row in rows]
        parameters, wanted = _parameters(run), _parameters(reference)
        # Softmax ignores the bias of the keys: its gradient is rounding alone, which AdamW scales to whole
        # updates.
        names = [name for name in wanted if exact or "['qkv']['bias']" not in name]
        pairs = [(parameters[name], wanted[name]) for name in names]
        pairs.append((np.array([row["loss"] for row in rows]), np.array([row["loss"] for row in expected])))
        difference = max(float(np.max(np.abs(a - b)) / np.max(np.abs(b))) for a, b in pairs)
        assert difference <= (0.0 if exact else TOLERANCE), difference
        self.tally.identical += difference == 0
        self.tally.worst = max(self.tally.worst, difference)


def _complete(run: Path) -> list[int]:
    """Steps of the whole checkpoints; the newest must be whole whatever was killed, old ones may be half
    deleted."""
    folders = {int(path.name): path for path in (run / "checkpoints").glob("*") if path.name.isdigit()}
    found = {step: manifest.problems(folder) for step, folder in folders.items()}
    assert not found or not found[max(found)], found
    return [step for step, problems in found.items() if not problems]


def _lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _logged(run: Path) -> int:
    """The last step logged."""
    path = run / "metrics.jsonl"
    steps = re.findall(rb'^\{"step": (\d+),.*\}$', path.read_bytes(), re.MULTILINE) if path.exists() else []
    return int(steps[-1]) if steps else 0


def _parameters(run: Path) -> dict[str, np.ndarray]:
    """Canonical parameters of the last checkpoint by name."""
    path = (run / "checkpoints" / str(STEPS) / "state").absolute()
    with ocp.PyTreeCheckpointer() as reader:
        tree = reader.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
        state = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))
    leaves = jax.tree_util.tree_leaves_with_path(state["params"])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/mstrain-soak"))
    options = parser.parse_args()
    soak = Soak(options.folder, options.kills, options.seed)
    while soak.tally.killed < options.kills:
        soak.run(KINDS[soak.tally.runs % len(KINDS)])
    print(soak.tally)


if __name__ == "__main__":
    main()
