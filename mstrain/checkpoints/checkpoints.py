"""Checkpoints that know nothing of the mesh: canonical arrays by Orbax, restored onto any plan.

A checkpoint holds step, parameters and optimizer moments in canonical order (`mstrain.models.parameters`)
and, beside them, a few facts about the run. Batches are a pure function of (seed, step), so there is no data
position to save. Saves are asynchronous: the arrays are copied off the device, then written while training
goes on; a checkpoint appears under its step by one rename, with a manifest of its files' checksums, so a
killed save leaves nothing that a resume would read and damage done later is noticed.
"""

import contextlib
import functools
import logging
import shutil
import tempfile
import time
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp

from mstrain.checkpoints import manifest
from mstrain.job.job import ALONE, Job
from mstrain.job.save_barrier import SaveBarrier
from mstrain.models import parameters
from mstrain.models.transformer import Transformer
from mstrain.program.step import State, map_copies, shard_copies

STATE, FACTS = "state", "facts"
STRAGGLER_TRIES = 50
BUFFER = 2**29  # bytes per host, beside the state itself, while a checkpoint is read
SAVE_SECONDS = 600  # that a host waits for the others' parts of a save


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, keep: int | None, job: Job = ALONE, keep_every: int | None = None):
        for name in ("absl", "asyncio"):  # Orbax tells of every save, and of a failed one in every thread
            logging.getLogger(name).setLevel(logging.CRITICAL)
        self._directory, self._saving = directory.absolute(), 0
        self._job, self._agreement = job, SaveBarrier(job)
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep,
            keep_period=keep_every,
            enable_async_checkpointing=True,
            cleanup_tmp_directories=True,
            async_options=ocp.AsyncOptions(
                timeout_secs=SAVE_SECONDS,
                post_finalization_callback=self._write_manifest,
                barrier_sync_fn=self._agreement.wait if job.processes > 1 else None,
            ),
        )
        handlers = {
            # Numbers of 32 bits compress by 8 %, which costs twice the time of reading them.
            STATE: ocp.PyTreeCheckpointHandler(use_compression=False, restore_concurrent_gb=BUFFER / 10**9),
            FACTS: ocp.JsonCheckpointHandler(),
        }
        self._manager = ocp.CheckpointManager(self._directory, options=options, item_handlers=handlers)

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
        self._check_folder()
        args = ocp.args.Composite(
            **{STATE: ocp.args.PyTreeSave(_to_canonical(module, optimizer)(state)), FACTS: ocp.args.JsonSave(facts)}
        )
        self._saving = step
        self._agreement.begin()
        with self._telling():
            self._manager.save(step, args=args)

    def give_up_save(self) -> None:
        """After a save that raised: removes what it wrote, so that the next one finds the space."""
        for _ in range(STRAGGLER_TRIES if jax.process_index() == 0 else 0):
            for folder in self._unfinished():
                shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.1)  # writers that have not failed yet may put a file back
            if not self._unfinished():
                break
        self._manager.reload()

    def damage(self, step: int, part: int = 0, parts: int = 1) -> list[str]:
        """What is wrong with the files of a checkpoint; of `parts` hosts each reads its share."""
        return manifest.problems(self._directory / str(step), part, parts)

    def set_aside(self, step: int) -> Path:
        """Moves a damaged checkpoint, so that it is neither read again nor in the way; returns its place."""
        target = self._directory.parent / "damaged" / str(step)
        while target.exists():
            target = target.with_name(target.name + "-again")
        if jax.process_index() == 0:
            target.parent.mkdir(exist_ok=True)
            (self._directory / str(step)).rename(target)
        return target

    def reload(self) -> None:
        """Reads the folder again after `set_aside` on process 0."""
        self._manager.reload()

    def facts(self, step: int) -> dict:
        """What the run that saved `step` said of itself."""
        return self._manager.restore(step, args=ocp.args.Composite(**{FACTS: ocp.args.JsonRestore()}))[FACTS]

    def restore(self, step: int, module: Transformer, optimizer: optax.GradientTransformation) -> State:
        """The state saved as `step`, laid out for `module`.

        Raises ValueError with the differing shapes when it belongs to another model.
        """
        canonical = self._read(step, _canonical_targets(module, optimizer))
        return map_copies(lambda tree: parameters.store_in_turn(module, tree), canonical, optimizer)

    def restore_parameters(self, step: int, module: Transformer):
        """The parameters alone of the state saved as `step`, laid out for `module`; moments are not read."""
        canonical = self._read(step, _canonical_targets(module))
        return parameters.store_in_turn(module, canonical["params"])

    def wait(self) -> None:
        """Returns when every save is on disk; raises whatever made one fail, on one process or on all."""
        with self._telling():
            self._manager.wait_until_finished()

    def close(self) -> None:
        with contextlib.suppress(Exception):  # a failed save has been reported by then
            self._manager.close()

    def _check_folder(self) -> None:
        """Whether every process can write at all; what Orbax does before it writes cannot be broken off."""
        try:
            with tempfile.TemporaryFile(dir=self._directory) as file:
                file.write(b"x")
            problem = ""
        except OSError as error:
            problem = f"{self._job.name(self._job.process)}: {error.strerror or error}"
        if problems := [text for text in self._job.gather("save", problem) if text]:
            raise OSError("; ".join(problems))

    @contextlib.contextmanager
    def _telling(self):
        """The other processes learn of what goes wrong inside."""
        try:
            yield
        except Exception as error:
            self._agreement.fail(f"{type(error).__name__}: {error}")
            raise

    def _unfinished(self) -> list[Path]:
        return [path for path in self._directory.iterdir() if ".orbax-checkpoint-tmp" in path.name]

    def _write_manifest(self) -> None:
        """Called when all files are written and before the folder gets its final name."""
        for folder in self._unfinished():
            if folder.name.startswith(f"{self._saving}."):
                manifest.write(folder)

    def _read(self, step: int, target: State) -> State:
        """The canonical arrays that `target` names, sharded as it says."""
        self._check_shapes(step, target)
        shardings = ocp.checkpoint_utils.construct_restore_args(target)
        args = ocp.args.PyTreeRestore(target, restore_args=shardings, partial_restore=True)
        return self._manager.restore(step, args=ocp.args.Composite(**{STATE: args}))[STATE]

    def _check_shapes(self, step: int, target: State) -> None:
        with ocp.PyTreeCheckpointer() as reader:
            tree = reader.metadata(self._directory / str(step) / STATE).item_metadata.tree
        saved, wanted = _shapes(tree["params"]), _shapes(target["params"])
        differing = [
            f"  {name}: checkpoint {saved.get(name, 'absent')}, model {wanted.get(name, 'absent')}"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if differing:
            raise ValueError(
                f"The checkpoint of step {step} in {self._directory} belongs to another model:\n"
                + "\n".join(differing)
                + "\nType the model= it was trained with, or another run_dir= to begin anew."
            )


@functools.lru_cache(maxsize=2)
def _to_canonical(module: Transformer, optimizer: optax.GradientTransformation):
    """The compiled conversion of a state to canonical form, kept because every save needs it."""

    def convert(state):
        canonical = map_copies(lambda tree: parameters.restore(module, tree), state, optimizer)
        shardings = shard_copies(parameters.canonical_shardings(module), canonical, optimizer)
        return jax.lax.with_sharding_constraint(canonical, shardings)

    return jax.jit(convert)


def _canonical_targets(module: Transformer, optimizer: optax.GradientTransformation | None = None):
    """Abstract canonical state, spread over the devices; without an optimizer, its parameters alone."""
    state: State = {"params": parameters.canonical_shapes(module)}
    if optimizer:
        state["step"] = jax.ShapeDtypeStruct((), "int32")
        state["optimizer"] = jax.eval_shape(optimizer.init, state["params"])
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shard_copies(parameters.canonical_shardings(module), state, optimizer),
    )


def _shapes(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(str(getattr(part, "key", part)) for part in path): tuple(leaf.shape) for path, leaf in leaves
    }
