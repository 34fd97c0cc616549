"""remat=auto: the value that recomputes least and fits, by the memory of compiled steps."""

import dataclasses

import jax

from mstrain.models.remat import AUTO, cheapest_that_fits
from mstrain.program.exhausted import HBM, read_exhausted
from mstrain.training.run import Run


def with_remat(run: Run) -> Run:
    """`run` with the value that `remat=auto` stands for; with another `remat`, `run` itself."""
    if run.config.remat != AUTO:
        return run
    runs: dict[str, Run] = {}

    def fits(remat: str) -> bool:
        runs[remat] = dataclasses.replace(run, module=dataclasses.replace(run.module, remat=remat))
        try:
            return runs[remat].memory.fits
        except jax.errors.JaxRuntimeError as error:
            exhausted = read_exhausted(error)
            if exhausted is None or exhausted.space != HBM:
                raise
            return False

    with run.console.status("Compiling the step for remat=auto"):
        remat = cheapest_that_fits(fits)
    run.job.agree("remat", remat)
    run.console.print(f"[bold]{'Remat':7}[/]{remat}, by the memory of {len(runs)} compiled steps")
    return runs.get(remat) or dataclasses.replace(run, module=dataclasses.replace(run.module, remat=remat))
