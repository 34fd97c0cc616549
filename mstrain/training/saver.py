"""Saves as a hook, and keeps training when a save fails."""

from collections.abc import Callable

from mstrain.checkpoints.checkpoints import Checkpoints
from mstrain.checkpoints.local import LocalCheckpoints
from mstrain.models.parameters import compile_from_canonical
from mstrain.program.step import State
from mstrain.training.guard import Guard
from mstrain.training.resume import facts
from mstrain.training.run import Run
from mstrain.training.stopped import Stopped


class Saver:
    """A hook that starts a save. A failed save is reported at once, at the next save, or by `finish`."""

    def __init__(
        self,
        run: Run,
        checkpoints: Checkpoints,
        check_lock: Callable[[], None],
        guard: Guard,
        tokens_seen: Callable[[int], int],
        local: LocalCheckpoints | None = None,
    ):
        self._run, self._checkpoints, self._check_lock, self._guard = run, checkpoints, check_lock, guard
        self._tokens_seen = tokens_seen
        self._max_failures = run.config.checkpoint.max_failures
        self._failures, self._pending, self._local = 0, None, local

    def __call__(self, step: int, state: State) -> None:
        """Raises DamagedTokens when the tokens of the finished steps do not match their digest."""
        if step > 0:  # step 0 uses no tokens
            self._run.corpus.verification.wait()
        self._settle()
        self._check_lock()
        run, kept = self._run, self._facts(step)
        first = 0 < step < run.config.steps and self._checkpoints.latest == 0
        self._attempt(step, lambda: self._checkpoints.save(step, state, run.module, run.optimizer, kept))
        if first and run.config.compile_cache:  # so that a restart compiles nothing; a short run needs none
            compile_from_canonical(run.module)

    def save_locally(self, step: int, state: State) -> None:
        """Saves to the local disk of this host. A failure is logged and does not stop the run."""
        assert self._local, "the schedule has no local saves without local_dir"
        self._run.corpus.verification.wait()
        self._check_lock()
        self._local.save(step, state, self._facts(step))

    def finish(self, step: int, state: State) -> None:
        """Ensures that the last `step` is saved. Raises Stopped when it cannot be saved."""
        self.ensure(step, state)
        if self._local:
            self._local.finish(done=step == self._run.config.steps)

    def ensure(self, step: int, state: State) -> None:
        """Waits until `step` is saved. Raises Stopped when it cannot be saved."""
        for _ in range(2):  # the hook's save may have failed, and its files are removed now
            if self._checkpoints.latest != step or self._pending is not None:
                if self._pending is None:
                    self(step, state)
                self._settle()
        if self._checkpoints.latest != step:
            newest = self._checkpoints.latest
            kept = "nothing is saved" if newest is None else f"the newest checkpoint is that of step {newest}"
            raise Stopped(
                f"Step {step} could not be saved; {kept}. Free some space or repair the folder, and type "
                "the same command."
            )

    def _facts(self, step: int) -> dict:
        """The facts that the checkpoint of `step` stores beside the state."""
        history, skipped = self._guard.history(), self._guard.order.skipped
        return {**facts(self._run), "guard": history, "skipped": skipped, "tokens_seen": self._tokens_seen(step)}

    def _settle(self) -> None:
        """Waits for the save in flight."""
        if self._pending is not None:
            step, self._pending = self._pending, None
            if self._attempt(step, self._checkpoints.wait, waiting=True):
                self._failures = 0
                if step > 0:  # a later step replaces step 0; see `mstrain.training.previous`
                    self._checkpoints.delete(0)

    def _attempt(self, step: int, action, waiting: bool = False) -> bool:
        try:
            action()
        except (OSError, RuntimeError, ValueError) as error:  # what Orbax and TensorStore raise for storage
            self._failures += 1
            self._checkpoints.give_up_save()
            reason = " ".join(str(error).split())[:300]
            self._run.job.log(
                f"saving step {step} failed ({self._failures} in a row): {type(error).__name__}: {reason}"
            )
            if self._failures >= self._max_failures:
                raise Stopped(
                    f"Stopped: {self._failures} saves in a row failed, the last that of step {step}. Look at "
                    f"the disk that holds {self._run.config.run_dir} (full? read-only?), then type the same "
                    "command."
                ) from error
            return False
        if not waiting:
            self._pending = step
        return True
