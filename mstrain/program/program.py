"""What is compiled: a function with abstract arguments, for the devices that their shardings name, present or absent.

Training, benchmarks, `check=true` and the tuner all compile these programs, so what is measured or predicted is what
runs: the same inputs, shardings and compiler options.
"""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.gemm.scheduling import without_groups
from mstrain.hardware import chip_for, compiler_options
from mstrain.layers.parameter import is_stored

FAILING_PASS = "while-loop-all-reduce-code-motion"
"""Of XLA: it fails on some gradients that are summed over microbatches (a check of libtpu 0.0.42)."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and what it is compiled for.

    Attributes:
      name: for messages and files.
      function: to be compiled; it may be jitted already.
      arguments: trees of arrays or `jax.ShapeDtypeStruct`s with `NamedSharding`s on one mesh.
      algorithm: of all its products; None where there are several or none.
    """

    name: str
    function: Callable
    arguments: tuple
    algorithm: str | None = None

    @property
    def mesh(self) -> Mesh:
        return jax.tree.leaves(self.arguments)[0].sharding.mesh

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """The XLA options of the mesh's chip and the algorithm (`mstrain.hardware`); none for an unknown chip."""
        return compiler_options(chip_for(self.mesh.devices.flat[0].device_kind), self.algorithm)

    def compile(self, options: Mapping[str, bool | int | str] | None = None) -> jax.stages.Compiled:
        """Compiles with the chip's options, or with `options` instead.

        What XLA fails on is left out: a pass (`FAILING_PASS`), or scheduling groups, with a warning.
        """
        jitted = self.function if hasattr(self.function, "lower") else jax.jit(self.function)
        # Typed Any, because JAX also takes integers but does not annotate them.
        chosen: Any = self.compiler_options if options is None else dict(options)
        lowered = jitted.lower(*self.arguments)
        try:
            return lowered.compile(compiler_options=chosen)
        except jax.errors.JaxRuntimeError as error:
            if "annotation" in str(error) and "RESOURCE_EXHAUSTED" not in str(error):
                text = f"XLA cannot schedule the groups of {self.name}; it is compiled without them: {error}"
                warnings.warn(text, stacklevel=2)
                jax.clear_caches()  # of traces with groups
                with without_groups():
                    lowered = jitted.lower(*self.arguments)
            elif FAILING_PASS.replace("-", "_") in str(error):
                passes = filter(None, (chosen.get("xla_disable_hlo_passes"), FAILING_PASS))
                chosen = chosen | {"xla_disable_hlo_passes": ",".join(passes)}
            else:
                raise
        return lowered.compile(compiler_options=chosen)

    def random_arguments(self) -> tuple:
        """Normal numbers for every argument, created on its devices."""
        leaves, tree = jax.tree.flatten(self.arguments)

        def create():
            keys = jax.random.split(jax.random.key(0, impl="rbg"), len(leaves))  # compiles fast
            pairs = zip(keys, leaves, strict=True)
            return [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in pairs]

        return jax.tree.unflatten(tree, jax.jit(create, out_shardings=[leaf.sharding for leaf in leaves])())


def text_of(compiled: jax.stages.Compiled) -> str:
    """The HLO text of a compiled program."""
    text = compiled.as_text()
    assert text is not None, "this backend has no text of its programs"  # those of CPU, GPU and TPU have
    return text


def abstract(shape: tuple[int, ...], dtype: jnp.dtype, mesh: Mesh | AbstractMesh, spec: P) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def abstract_layer_parameters(module: nn.Module, mesh: Mesh, *inputs):
    """Abstract parameters of a layer, sharded by their partition specs; abstract inputs come before static ones."""
    arrays = [x for x in inputs if isinstance(x, jax.ShapeDtypeStruct)]
    rest = inputs[len(arrays) :]
    boxed = jax.eval_shape(lambda *xs: module.init(jax.random.key(0), *xs, *rest), *arrays).get("params", {})
    return jax.tree.map(
        lambda box: abstract(box.value.shape, box.value.dtype, mesh, box.spec), boxed, is_leaf=is_stored
    )


def with_pullback(forward: Callable) -> Callable:
    """(y, *gradients) from the arguments of `forward` and dy: weight gradients too, so that no part is dead code."""

    def forward_and_backward(*arguments):
        *inputs, dy = arguments
        y, pullback = jax.vjp(forward, *inputs)
        return y, *pullback(dy)

    return forward_and_backward
