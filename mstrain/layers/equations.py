"""Runs a traced function equation by equation."""

from collections.abc import Callable, Iterable

from jax.core import eval_jaxpr
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

CALLS = ("jit", "pjit")  # primitives whose equations are run one by one, too


def evaluate(
    jaxpr: Jaxpr, consts, values: Iterable, calls: tuple[str, ...] = CALLS, rule: Callable | None = None
) -> list:
    """The results of `jaxpr` for `values`, with the equations of `calls` in place of calls.

    `rule(equation, read)` returns the results of an equation, or None where it has none of its own; `read` has the
    values of all variables so far.
    """
    known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *values), strict=True))

    def read(atom):
        return atom.val if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        if equation.primitive.name in calls:
            inner = equation.params["jaxpr"]
            inner, constants = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
            made = evaluate(inner, constants, map(read, equation.invars), calls, rule)
        else:
            made = (rule and rule(equation, read)) or _alone(jaxpr, equation, read)
        known.update(zip(equation.outvars, made, strict=True))
    return [*map(read, jaxpr.outvars)]


def _alone(jaxpr: Jaxpr, equation: JaxprEqn, read: Callable) -> list:
    inputs = [*dict.fromkeys(atom for atom in equation.invars if isinstance(atom, Var))]
    alone = jaxpr.replace(constvars=[], invars=inputs, eqns=[equation], outvars=equation.outvars)
    return eval_jaxpr(alone, (), *map(read, inputs))
