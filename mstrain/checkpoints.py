"""Checkpoints that know nothing of the mesh: canonical arrays by Orbax, restored onto any plan.

A checkpoint holds step, parameters and optimizer moments in canonical order (`mstrain.models.parameters`) and, beside
them, a few facts about the run. Batches are a pure function of (seed, step), so there is no data position to save. Saves are
asynchronous: the arrays are copied off the device, then written while training goes on; a checkpoint appears under
its step by one rename, so a killed save leaves nothing that a resume would read.
"""

import functools
import logging
from pathlib import Path

import jax
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.models import parameters
from mstrain.models.transformer import Transformer
from mstrain.training.step import State, map_parameter_trees, state_shardings

STATE, FACTS = "state", "facts"


class Checkpoints:
    """The checkpoints of one run directory."""

    def __init__(self, directory: Path, keep: int):
        logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax tells of every save at length
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: State, module: Transformer, facts: dict) -> None:
        """Starts saving `state` as step `step`; returns when the arrays may be overwritten."""
        if step == self.latest:
            return
        args = ocp.args.Composite(
            **{STATE: ocp.args.StandardSave(_to_canonical(module)(state)), FACTS: ocp.args.JsonSave(facts)}
        )
        self._manager.save(step, args=args)

    def facts(self, step: int) -> dict:
        """What the run that saved `step` said of itself."""
        return self._manager.restore(step, args=ocp.args.Composite(**{FACTS: ocp.args.JsonRestore()}))[FACTS]

    def restore(self, step: int, module: Transformer, optimizer: optax.GradientTransformation) -> State:
        """The state saved as `step`, laid out for `module`.

        Raises ValueError with the differing shapes when it belongs to another model.
        """
        target = _canonical_targets(module, optimizer)
        self._check_shapes(step, target)
        args = ocp.args.Composite(**{STATE: ocp.args.StandardRestore(target)})
        canonical = self._manager.restore(step, args=args)[STATE]

        def to_stored(state):
            moments = map_parameter_trees(
                lambda tree: parameters.store(module, tree), state["optimizer"], state["params"]
            )
            params = parameters.store(module, state["params"])
            return {"step": state["step"], "params": params, "optimizer": moments}

        shardings = state_shardings(module, optimizer)
        return jax.jit(to_stored, out_shardings=shardings, donate_argnums=0)(canonical)

    def wait(self) -> None:
        """Returns when every save is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()

    def _saved_tree(self, step):
        with ocp.StandardCheckpointer() as reader:
            return reader.metadata(self._manager.directory / str(step) / STATE).item_metadata.tree

    def _check_shapes(self, step, target) -> None:
        saved = _shapes(self._saved_tree(step)["params"])
        wanted = _shapes(target["params"])
        differing = [
            f"  {name}: checkpoint {saved.get(name, 'absent')}, model {wanted.get(name, 'absent')}"
            for name in sorted(saved.keys() | wanted.keys())
            if saved.get(name) != wanted.get(name)
        ]
        if differing:
            raise ValueError(
                f"The checkpoint of step {step} in {self._manager.directory} belongs to another model:\n"
                + "\n".join(differing)
                + "\nType the model= it was trained with, or another run_dir= to begin anew."
            )


@functools.lru_cache(maxsize=2)
def _to_canonical(module: Transformer):
    """The compiled conversion of a state to canonical form, kept because every save needs it."""

    def convert(state):
        moments = map_parameter_trees(
            lambda tree: parameters.restore(module, tree), state["optimizer"], state["params"]
        )
        canonical = {**state, "params": parameters.restore(module, state["params"]), "optimizer": moments}
        return jax.lax.with_sharding_constraint(canonical, _canonical_shardings(module, canonical))

    return jax.jit(convert)


def _canonical_targets(module: Transformer, optimizer: optax.GradientTransformation):
    """Abstract canonical state, spread over the devices that will read it."""
    params = parameters.canonical_shapes(module)
    step = jax.ShapeDtypeStruct((), "int32")
    state = {"step": step, "params": params, "optimizer": jax.eval_shape(optimizer.init, params)}
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        _canonical_shardings(module, state),
    )


def _canonical_shardings(module: Transformer, state: State) -> State:
    shardings = parameters.canonical_shardings(module)
    replicated = NamedSharding(module.plan.mesh, P())
    return map_parameter_trees(lambda _: shardings, state, state["params"], lambda _: replicated)


def _shapes(tree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {
        ".".join(str(getattr(part, "key", part)) for part in path): tuple(leaf.shape) for path, leaf in leaves
    }
