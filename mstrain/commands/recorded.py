"""What the commands that read a run have in common: its configuration comes from the record in run_dir."""

import dataclasses
from pathlib import Path

from mstrain.cli import compose
from mstrain.training.config import RunConfig
from mstrain.training.record import RUN, read, recorded_overrides


def run_config(run_dir: str, given: list[str]) -> RunConfig:
    """The recorded configuration of `run_dir` with the keys of train that are `given` instead.

    Raises ValueError when there is no record, or when a key is not one of train.
    """
    if read(Path(run_dir)) is None:
        raise ValueError(f"run_dir={run_dir} has no {RUN}: no run has saved there. Type the run_dir of a run.")
    keys = {argument.partition("=")[0] for argument in given}
    other_data = "data" in keys or any(key.startswith("data.") for key in keys)
    recorded = recorded_overrides([f"run_dir={run_dir}"])
    kept = [r for r in recorded if (key := r.partition("=")[0]) not in keys and not (other_data and _is_data(key))]
    config = compose(RunConfig, "config", [f"run_dir='{run_dir}'", *given, *kept])
    config = dataclasses.replace(config, optimizer=config.optimizer.for_width(config.model.width))
    return dataclasses.replace(config, allow=f"{config.allow or ''} data".strip()) if other_data else config


def _is_data(key: str) -> bool:
    return key.startswith("data.")
