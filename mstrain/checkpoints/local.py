"""Frequent saves to a local disk (or memory, such as /dev/shm) of every host, in addition to those in the run
directory.

Every host writes the shards of its own devices, with a manifest. A restart uses the newest step of which every shard is
found, on its own host or as a data-parallel replica on another one, if it is newer than the newest checkpoint of the
run directory. A host that lost its disk receives its shards from replicas by a collective. On another mesh, or when a
lost shard has no replica, the run directory's checkpoint is used.

Orbax's emergency checkpoint manager is not used (tried with two CPU processes and Orbax 0.12.8): the first replica
never saves locally, so on mesh 2x2x2 losing the disk of the second host lost every local step although the first host
was intact; without replicas (mesh 1x2x4) nothing is saved locally; and its local files carry no digests of their
contents. Its peer-to-peer manager is not in Orbax 0.11.
"""

import concurrent.futures
import contextlib
import hashlib
import json
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import optax
from etils import epath

from mstrain.checkpoints import manifest, shards
from mstrain.job.job import Job
from mstrain.layers.parameter import is_stored
from mstrain.models.parameters import abstract_parameters
from mstrain.models.transformer import Transformer
from mstrain.program.step import State, abstract_state

IDENTITY, SAVE = "local_checkpoints.json", "save.json"


class LocalCheckpoints:
    """The local checkpoints of a run. All processes call its methods together.

    Args:
      directory: a folder of this host; processes that share a host share it.
      run_dir: the run directory; without its file IDENTITY, local checkpoints of an earlier run are not found.
      module, optimizer: define the state and how it is sharded.
      job: the processes.
      warn: called with one line when this host cannot save; training continues.
    """

    def __init__(self, directory: Path, run_dir: Path, module: Transformer, optimizer: optax.GradientTransformation,
                 job: Job, warn: Callable[[str], None]):  # fmt: skip
        self._job, self._warn = job, warn
        self._leaves, self._structure = jax.tree.flatten(abstract_state(module, optimizer))
        self._layout = _layout(module, self._leaves, self._structure)
        identity = _identity(run_dir, str(directory)) if job.leads else ""
        run, self._attempt = json.loads(job.all_gather("local run", json.dumps([identity, secrets.token_hex(8)]))[0])
        self._folder = directory.expanduser() / run / f"process_{job.process}"
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "local save")
        self._writing: tuple[int, concurrent.futures.Future] | None = None
        for unfinished in self._folder.glob("*.tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def save(self, step: int, state: State, facts: dict) -> None:
        """Starts saving state and facts (JSON); returns when the arrays may be overwritten. Never raises for this
        host's disk.
        """
        self._settle()
        own = self._saves()
        newest = self._job.all_gather("local save", str(max(own, default=0)))
        for old in own.keys() - {min(map(int, newest)), max(own, default=0)}:  # the newest of all hosts and of this one
            shutil.rmtree(self._folder / str(old), ignore_errors=True)
        host = shards.to_host(jax.tree.leaves(state))
        self._writing = step, self._thread.submit(self._write, step, host, facts)

    def resume(self, above: int) -> tuple[State, int, list[int]] | None:
        """The newest restorable state, its step, and the processes whose shards came from replicas.

        None without one after step `above`.
        """
        own = {str(step): save for step, save in self._saves().items() if step > above and self._complete(step)}
        found = [json.loads(text) for text in self._job.all_gather("local steps", json.dumps(own))]
        saves = {(int(step), save) for of_process in found for step, save in of_process.items()}
        for step, save in sorted(saves, reverse=True):
            having = {process for process, of_process in enumerate(found) if of_process.get(str(step)) == save}
            if self._covers(having):
                having &= self._undamaged(step, self._job.process in having)
                if self._covers(having):
                    return self._restore(step, having), step, sorted(set(range(self._job.processes)) - having)
        return None

    def facts(self, step: int) -> dict:
        """What the hosts saved beside the state of `step`."""
        try:
            text = (self._folder / str(step) / SAVE).read_text()
        except OSError:
            text = ""  # this host has lost its disk
        found = next(filter(None, self._job.all_gather("local facts", text)), "{}")
        return json.loads(found).get("facts", {})

    def steps(self) -> set[int]:
        """Steps that every host has saved."""
        texts = self._job.all_gather("local steps of all", json.dumps([*self._saves()]))
        return set.intersection(*(set(json.loads(text)) for text in texts))

    def drop_after(self, step: int) -> None:
        """Removes what was saved after `step`, from which the run resumes, on this mesh or another."""
        self._settle()
        for folder in self._folder.glob("*"):
            if folder.name.isdecimal() and int(folder.name) > step:
                shutil.rmtree(folder, ignore_errors=True)

    def finish(self, done: bool) -> None:
        """Waits for the last save. Removes all local files of the run on this host when it is `done`."""
        self._settle()
        if done:
            shutil.rmtree(self._folder.parent, ignore_errors=True)
        self._thread.shutdown()

    def _settle(self) -> None:
        if self._writing:
            step, writing = self._writing
            self._writing = None
            try:
                writing.result()
            except OSError as error:
                shutil.rmtree(self._folder / f"{step}.tmp", ignore_errors=True)
                self._warn(f"local save of step {step} failed: {error}; a restart uses an older checkpoint")

    def _write(self, step: int, host: dict[str, np.ndarray], facts: dict) -> None:
        folder, final = self._folder / f"{step}.tmp", self._folder / str(step)
        for rest in (folder, final):
            shutil.rmtree(rest, ignore_errors=True)
        folder.mkdir(parents=True)
        for name, shard in host.items():
            shard.tofile(folder / name)
        content = {"save": f"{self._attempt}-{step}", "layout": self._layout, "facts": facts}
        (folder / SAVE).write_text(json.dumps(content))
        manifest.write(epath.Path(folder))
        folder.rename(final)

    def _saves(self) -> dict[int, str]:
        """Steps on this host's disk, each with the name of its save, which is the same on all hosts."""
        saves = {}
        for folder in self._folder.glob("*"):
            try:
                content = json.loads((folder / SAVE).read_text())
                if folder.name.isdecimal() and content["layout"] == self._layout:
                    saves[int(folder.name)] = str(content["save"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return saves

    def _complete(self, step: int) -> bool:
        """Whether this host has a file for every shard that its devices hold now."""
        names = {path.name for path in (self._folder / str(step)).iterdir()}
        return shards.names_of(self._job.process, self._leaves) <= names

    def _covers(self, having: set[int]) -> bool:
        """Whether these processes have every shard."""
        return all(shards.choose_sources(leaf, having) for leaf in self._leaves)

    def _undamaged(self, step: int, here: bool) -> set[int]:
        """Processes whose files of `step` have the digests of their manifest; `here`: this one has such files."""
        damage = manifest.problems(epath.Path(self._folder / str(step))) if here else []
        if damage:
            self._warn(f"local checkpoint {step} is damaged: {'; '.join(damage[:3])}")
        texts = self._job.all_gather("local damage", "; ".join(damage))
        return {process for process, text in enumerate(texts) if not text}

    def _restore(self, step: int, having: set[int]) -> State:
        senders = having if len(having) < self._job.processes else None
        folder = self._folder / str(step)
        arrays = [shards.from_files(folder, i, leaf, senders) for i, leaf in enumerate(self._leaves)]
        return jax.tree.unflatten(self._structure, arrays)


def _layout(module: Transformer, leaves: list, structure) -> str:
    """A digest of what a shard's bytes mean: shapes and dtypes of the arrays, the order of layers and features."""
    storages = [box.storage for box in jax.tree.leaves(abstract_parameters(module), is_leaf=is_stored)]
    meaning = repr([str(structure), [(leaf.shape, str(leaf.dtype)) for leaf in leaves], storages, module.plan.rows])
    return hashlib.sha256(meaning.encode()).hexdigest()


def forget(run_dir: Path) -> None:
    """Local checkpoints until now are not found any more: the run continues without saving to `local_dir`, and would
    later go back to them."""
    with contextlib.suppress(OSError):
        (run_dir / IDENTITY).unlink()


def _identity(run_dir: Path, local_dir: str) -> str:
    """A name of the run in `run_dir`, made at its first start with `local_dir`; a copy of the folder elsewhere is
    another run.

    When it cannot be written, no later attempt finds the local checkpoints of this one.
    """
    path, place = run_dir / IDENTITY, str(run_dir.absolute())
    try:
        content = json.loads(path.read_text())
        same = content["run_dir"] == place and content.get("local_dir", local_dir) == local_dir
        if same and str(content["name"]).isalnum():
            return content["name"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    name = secrets.token_hex(8)
    with contextlib.suppress(OSError):
        path.write_text(json.dumps({"name": name, "run_dir": place, "local_dir": local_dir}) + "\n")
    return name
