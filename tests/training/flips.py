"""Why moments in bf16 differ between meshes: the elements that round to another neighbor.

`python -m tests.training.flips` makes twenty steps on one device and on 2x4 with both roundings, and prints how many
moments differ after 1, 2, 5 and 20 steps, and by how much loss and gradient norm do. Then the one device makes the same
steps from weights that differ by one part in ten million: what float32 sums in another order do, without a mesh.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mstrain.models.plan import ParallelConfig
from mstrain.program.rounding import ROUNDINGS
from tests.training.cases import OPTIMIZER, Case
from tests.training.parity import STEPS, batches, compiled, initial

NUDGE = 1e-7


def moments(program, steps: int) -> list[np.ndarray]:
    """The moments in bf16 after so many steps."""
    _, state = program(initial(), batches(), np.int32(steps))
    return [x for x in jax.tree.leaves(jax.device_get(state["optimizer"])) if x.dtype == jnp.bfloat16]


def curve(program, params) -> np.ndarray:
    """Loss and gradient norm of every step."""
    return np.asarray(program(params, batches(), np.int32(STEPS))[0], np.float64)


def nudged(params, seed: int = 1):
    """`params`, each element with a relative error of about NUDGE."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: (x * (1 + NUDGE * draw.standard_normal(x.shape))).astype(np.float32), params)


def main() -> None:
    print("| rounding | moments that differ after 1, 2, 5, 20 steps | 2x4 | nudged |\n|" + " --- |" * 4)
    for rounding in (None, *ROUNDINGS):
        bf16 = {"moments": "bf16", "rounding": rounding} if rounding else {}
        case = Case("2x4", ParallelConfig(slices="2"), optimizer=dataclasses.replace(OPTIMIZER, **bf16))
        one, mesh = compiled(case.reference), compiled(case)
        differ = [
            sum(int(np.sum(x != y)) for x, y in zip(moments(one, steps), moments(mesh, steps), strict=True))
            for steps in (1, 2, 5, STEPS)
        ]
        size, expected = sum(x.size for x in moments(one, 1)), curve(one, initial())
        errors = [
            " and ".join(f"{x:.1e}" for x in np.max(np.abs(found / expected - 1), axis=0))
            for found in (curve(mesh, initial()), curve(one, nudged(initial())))
        ]
        counts = f"{', '.join(map(str, differ))} of {size}" if rounding else "float32"
        print(f"| {rounding or 'none'} | {counts} | {' | '.join(errors)} |", flush=True)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_default_matmul_precision", "highest")
    main()
