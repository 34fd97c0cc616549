"""A backward pass in two halves: the gradients that the previous layer needs, and the rest, which is computed later.

The equations of the pass are divided. The first half has those that its results need. The second half has the others,
and reads the values that both need: the first half returns them, unless they follow without a product from values that
the forward pass saved. For the gradients of kernels these are the gradients of all products' results, and those inputs
of products that `remat=` recomputed with products; so no product is computed in both halves.

An equation that makes results for both halves, such as a product's `shard_map`, is in both; the compiler removes what a
half does not use.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import jax
from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Var

from mstrain.layers import equations
from mstrain.layers.equations import evaluate

PRODUCTS = ("dot_general", "ragged_dot_general", "pallas_call")
CALLS = ("checkpoint", "remat2", *equations.CALLS)  # primitives whose equations are divided, too


class Halves(NamedTuple):
    """The halves of a function: `early(known, x)` -> (early result, rest), `late(known, rest)` -> late result."""

    early: Callable
    late: Callable


def halve(function: Callable, known, x) -> Halves:
    """Divides `function(known, x) -> (early result, late result)`; the arguments give the shapes."""
    closed, results = jax.make_jaxpr(_inlined(function), return_shape=True)(known, x)
    jaxpr, trees = closed.jaxpr, [jax.tree.structure(result) for result in results]
    given = {*jaxpr.constvars, *jaxpr.invars[: len(jax.tree.leaves(known))]}
    first, second = jaxpr.outvars[: trees[0].num_leaves], jaxpr.outvars[trees[0].num_leaves :]
    early_equations, early = _needed(jaxpr.eqns, first, given)
    handed = early & _not_cheap(early_equations, {*jaxpr.invars} - given)
    late_equations, late = _needed(jaxpr.eqns, second, given | handed)
    rest = [variable for variable in _variables(jaxpr) if variable in late & handed]

    def run(inputs: list, equations, outputs: list, values) -> list:
        part = jaxpr.replace(invars=inputs, eqns=equations, outvars=outputs)
        return eval_jaxpr(part, closed.consts, *values)

    def run_early(known, x):
        values = run(jaxpr.invars, early_equations, [*first, *rest], jax.tree.leaves((known, x)))
        return jax.tree.unflatten(trees[0], values[: len(first)]), values[len(first) :]

    def run_late(known, rest_values):
        inputs = [*jaxpr.invars[: len(jax.tree.leaves(known))], *rest]
        values = run(inputs, late_equations, second, [*jax.tree.leaves(known), *rest_values])
        return jax.tree.unflatten(trees[1], values)

    return Halves(run_early, run_late)


def _inlined(function: Callable) -> Callable:
    """`function` without calls, so that an equation is one operation."""

    def inlined(*arguments):
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        values = evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(arguments), CALLS)
        return jax.tree.unflatten(jax.tree.structure(shapes), values)

    return inlined


def _variables(jaxpr: Jaxpr) -> list[Var]:
    """All in the order in which they get values."""
    return [*jaxpr.invars, *(variable for equation in jaxpr.eqns for variable in equation.outvars)]


def _needed(equations: Iterable[JaxprEqn], results, given: set[Var]) -> tuple[list[JaxprEqn], set[Var]]:
    """(the equations that make `results` from what is `given`, the variables that they and the results read)."""
    needed = {atom for atom in results if isinstance(atom, Var)}
    kept = []
    for equation in reversed([*equations]):
        if (needed - given).intersection(equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if isinstance(atom, Var))
    return kept[::-1], needed


def _not_cheap(equations: Iterable[JaxprEqn], inputs: set[Var]) -> set[Var]:
    """`inputs`, the results of products and kernels, and all that depends on either."""
    found = set(inputs)
    for equation in equations:
        if _multiplies(equation) or not found.isdisjoint(atom for atom in equation.invars if isinstance(atom, Var)):
            found.update(equation.outvars)
    return found


def _multiplies(equation: JaxprEqn) -> bool:
    inner = [value for value in equation.params.values() if isinstance(value, (Jaxpr, ClosedJaxpr))]
    return equation.primitive.name in PRODUCTS or any(_multiplies(each) for jaxpr in inner for each in jaxpr.eqns)
