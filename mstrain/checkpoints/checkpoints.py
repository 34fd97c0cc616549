"""Checkpoints independent of the mesh: canonical arrays written by Orbax, restored onto any plan.

A checkpoint holds step, parameters and optimizer moments in canonical order (`mstrain.models.parameters`)
and, beside them, a few facts about the run. Batches are a pure function of (seed, step), so no data
position is saved. Saves are asynchronous: the arrays are copied off the device, then written while training
continues; a checkpoint appears under its step by one rename, with a manifest of its files' checksums. So a
resume never reads an incomplete save and detects later damage. Each host writes and digests its own part.
"""

import contextlib
import json
import logging
import math
import os
import shutil
import tempfile
import time
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
from etils import epath

from mstrain.checkpoints import manifest
from mstrain.checkpoints.buffer import CHUNK, buffer_for
from mstrain.checkpoints.canonical import canonical_targets, differing_shapes, to_canonical
from mstrain.checkpoints.handler import DigestingHandler, Restore, Save
from mstrain.checkpoints.limits import seconds_allowed
from mstrain.job.job import ALONE, Job
from mstrain.job.save_barrier import SaveBarrier
from mstrain.models import parameters
from mstrain.models.transformer import Transformer
from mstrain.program.canonical_update import OnCanonical
from mstrain.program.offload import offloads_moments
from mstrain.program.step import State, map_copies, state_shardings

STATE, FACTS = "state", "facts"
STRAGGLER_TRIES = 50
NO_LIMIT = 10**6  # seconds, for Orbax's fixed limit; those of `mstrain.checkpoints.limits` apply


class Checkpoints:
    """The checkpoints of one run directory: the newest `keep`, and all multiples of `keep_every` steps.

    With keep=None they are only read: those of another run, which may be saving at this moment.

    Attributes:
      directory: their absolute path; each checkpoint is a folder named by its step.
    """

    def __init__(self, directory: Path, keep: int | None, job: Job = ALONE, keep_every: int | None = None):
        for name in ("absl", "asyncio"):  # Orbax logs every save, and a failed one in every thread
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self.directory, self._saving = directory.absolute(), 0
        self._job, self._save_barrier = job, SaveBarrier(job)
        self._handler = DigestingHandler()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=keep is not None,
            async_options=ocp.AsyncOptions(
                timeout_secs=NO_LIMIT,
                post_finalization_callback=self._write_manifest,
                barrier_sync_fn=self._wait_for_all if job.processes > 1 else None,
            ),
        )
        handlers = {STATE: self._handler, FACTS: ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=handlers)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    @property
    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, the newest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def save(
        self, step: int, state: State, module: Transformer, optimizer: optax.GradientTransformation, facts: dict
    ) -> None:
        """Starts saving `state` as step `step`; returns when the arrays may be overwritten.

        Raises OSError on all processes when one of them cannot write.
        """
        if step == self.latest:
            return
        self._prepare(state)
        canonical = to_canonical(module, optimizer)(state)
        chunks = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK), canonical)
        args = ocp.args.Composite(**{STATE: Save(canonical, chunks), FACTS: ocp.args.JsonSave(facts)})
        self._saving = step
        self._save_barrier.begin()
        with self._reporting_failure():
            self._manager.save(step, args=args)

    def give_up_save(self) -> None:
        """After a save that raised: removes what it wrote, so that the next one finds the space."""
        for _ in range(STRAGGLER_TRIES if jax.process_index() == 0 else 0):
            self._remove_unfinished()
            time.sleep(0.1)  # writers that have not failed yet may put a file back
            if not self._unfinished():
                break
        self._manager.reload()

    def set_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint, so that it is not read again; returns its place.

        Raises ValueError when `damaged` is not a folder of the run directory.
        """
        damaged = self.directory.parent / "damaged"
        if damaged.is_symlink() or (damaged.exists() and not damaged.is_dir()):
            kind = "a link" if damaged.is_symlink() else "not a folder"
            raise ValueError(f"Checkpoint {step} is damaged. It cannot be moved to {damaged}, {kind}. Remove that.")
        target = damaged / str(step)
        while os.path.lexists(target):
            target = target.with_name(target.name + "-again")
        if jax.process_index() == 0:
            damaged.mkdir(exist_ok=True)
            (self.directory / str(step)).rename(target)
        return target

    def delete(self, step: int) -> None:
        """Removes the checkpoint of `step`, if there is one; called by all processes. Raises OSError."""
        if step in self._manager.all_steps():
            self._manager.delete(step)

    def reload(self) -> None:
        """Reads the folder again after `set_aside` on process 0."""
        self._manager.reload()

    def facts(self, step: int) -> dict:
        """The facts saved with `step`."""
        return self._manager.restore(step, args=ocp.args.Composite(**{FACTS: ocp.args.JsonRestore()}))[FACTS]

    def restore(self, step: int, module: Transformer, optimizer: optax.GradientTransformation) -> State:
        """The state saved as `step`, in the layout of `module`.

        Raises ValueError with the differing shapes when it belongs to another model.
        """
        canonical = self._read(step, canonical_targets(module, optimizer))
        state = map_copies(lambda tree: parameters.from_canonical_in_turn(module, tree), canonical, optimizer)
        if offloads_moments(module) or isinstance(optimizer, OnCanonical):
            state["optimizer"] = jax.device_put(state["optimizer"], state_shardings(module, optimizer)["optimizer"])
        return state

    def restore_parameters(self, step: int, module: Transformer):
        """Only the parameters of the state saved as `step`, in the layout of `module`; moments are not read."""
        canonical = self._read(step, canonical_targets(module))
        return parameters.from_canonical_in_turn(module, canonical["params"])

    def wait(self) -> None:
        """Waits until every save is on disk. Raises the error of a failed save, which may be that of another
        process."""
        with self._reporting_failure():
            self._manager.wait_until_finished()
        self._remove_unfinished()  # what late writers of a failed save put back after it was given up

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a failed save is reported by then
            self._manager.close()

    def _prepare(self, state: State) -> None:
        """Sets the same time limit on all processes and checks that each of them can write, because Orbax's work before
        writing cannot be interrupted.
        """
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(b"x")
            problem = ""
        except OSError as error:
            problem = f"{self._job.name(self._job.process)}: {error.strerror or error}"
        texts = self._job.all_gather("save", json.dumps([problem, self._handler.speed]))
        answers = [json.loads(text) for text in texts]
        if problems := [problem for problem, _ in answers if problem]:
            raise OSError("; ".join(problems))
        share = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) / self._job.processes
        self._handler.limit = seconds_allowed(share, min((speed for _, speed in answers if speed), default=None))

    @contextlib.contextmanager
    def _reporting_failure(self):
        """Reports an error inside to the other processes."""
        try:
            yield
        except Exception as error:
            self._save_barrier.fail(f"{type(error).__name__}: {error}")
            raise

    def _wait_for_all(self, *, key: str, timeout_ms: int) -> None:
        del timeout_ms  # Orbax's limit does not depend on the size
        self._save_barrier.wait(key=key, timeout_ms=math.ceil(1000 * self._handler.limit))

    def _unfinished(self) -> list[Path]:
        return [*self.directory.glob("*.orbax-checkpoint-tmp*")]  # none when the folder was removed

    def _remove_unfinished(self) -> None:
        """While no save is in flight: what is unfinished is of failed ones."""
        for folder in self._unfinished() if jax.process_index() == 0 else ():
            shutil.rmtree(folder, ignore_errors=True)

    def _write_manifest(self) -> None:
        """Called when all files are written and before the folder gets its final name."""
        for folder in self._unfinished():
            if folder.name.startswith(f"{self._saving}."):
                manifest.join(epath.Path(folder), STATE, self._job.processes)

    def _read(self, step: int, target: State) -> State:
        """The canonical arrays that `target` names, with its shardings."""
        folder = self.directory / str(step) / STATE
        with ocp.PyTreeCheckpointer() as reader:
            saved = reader.metadata(folder).item_metadata.tree["params"]
        self._check_shapes(step, saved, target["params"])
        shardings = ocp.checkpoint_utils.construct_restore_args(target)
        with ocp.Checkpointer(DigestingHandler(buffer_for(saved, target))) as reader:
            return reader.restore(folder, args=Restore(target, restore_args=shardings, partial_restore=True))

    def _check_shapes(self, step: int, saved, wanted) -> None:
        differing = differing_shapes(saved, wanted)
        if differing:
            raise ValueError(
                f"The checkpoint of step {step} in {self.directory} belongs to another model:\n"
                + "\n".join(differing)
                + "\nType the model= it was trained with, or another run_dir= to start a new run."
            )
