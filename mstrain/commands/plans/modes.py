"""Chooses the mode of plan.py from the arguments."""

import importlib

from mstrain.checks import one_of
from mstrain.cli import compose, describe_keys

# Key that chooses the mode -> value -> (module, configuration, configuration file). A mode's module is
# imported when it is chosen, and has a function `run_<value>` that takes the configuration.
MODES = {
    "planner": {
        "pod": ("mstrain.commands.plans.pod", "PodConfig", "plan"),
        "optimal": ("mstrain.commands.plans.mixed", "OptimalConfig", "planner/optimal"),
        "metis": ("research.metis.command", "MetisConfig", "planner/metis"),
        "homogeneous": ("research.metis.command", "MetisConfig", "planner/homogeneous"),
    },
    "experiment": {
        "distir_mlp": ("research.distir.command", "DistirConfig", "planner/distir_mlp"),
        "metis_inputs": ("research.metis.command", "InputsConfig", "planner/metis_inputs"),
    },
}
# Key that chooses a mode and carries a value of it -> (its key, module, configuration, configuration file). The
# module has a function `run_<its key>`.
VALUES = {
    "profile": ("model", "mstrain.commands.plans.profile", "ProfileConfig", "planner/profile"),
    "published": ("file", "mstrain.commands.plans.published", "PublishedConfig", "planner/published"),
}

ABOUT = {
    "planner=pod": "best plans of a model on TPU slices or GPUs (default)",
    "planner=optimal": "optimal plan of a cluster of unequal devices (default with hostfile=)",
    "planner=metis": "search of Metis for a cluster of unequal devices, reproduced",
    "planner=homogeneous": "planner of Metis for devices of one type, reproduced",
    "experiment=distir_mlp": "experiments of DistIR's notebook, reproduced",
    "experiment=metis_inputs": "synthetic inputs of planner=optimal and planner=metis",
    "profile=MODEL": "measures the profiles of a model that planner=optimal and planner=metis read",
    "published=FILE": "predictions of published runs, compared with their measurements",
}


def choose(arguments: list[str]) -> tuple[str, str, list[str]]:
    """(key, value, other arguments) of the mode that the arguments choose.

    Without a mode: planner=optimal if a host file is given, else planner=pod. profile=MODEL and published=FILE are
    modes, too. Raises ValueError for an unknown mode or several modes.
    """
    given = [argument.partition("=")[::2] for argument in arguments]
    chosen = [(key, value) for key, value in given if key in MODES or key in VALUES]
    if len(chosen) > 1:
        both = " and ".join(f"{key}={value}" for key, value in chosen)
        raise ValueError(f"{both} are different modes. Type one of them.")
    if not chosen:
        return "planner", "optimal" if any(key == "hostfile" for key, _ in given) else "pod", arguments
    key, value = chosen[0]
    rest = [argument for argument, (name, _) in zip(arguments, given) if name != key]
    if key in VALUES:
        name = VALUES[key][0]
        if value in ("", "null"):
            raise ValueError(f"{key}={value} names no {name}. Type {key}={name.upper()}.")
        return key, name, [f"{name}={value}", *rest]
    one_of(key, value, list(MODES[key]))
    return key, value, rest


def load(arguments: list[str]):
    """(function, its configuration) of the mode asked for; raises ValueError with the fix."""
    key, value, rest = choose(arguments)
    module, kind, file = mode(key, value)
    return getattr(module, f"run_{value}"), compose(kind, file, rest)


def mode(key: str, value: str):
    module, kind, file = VALUES[key][1:] if key in VALUES else MODES[key][value]
    module = importlib.import_module(module)
    return module, getattr(module, kind), file


def run(arguments: list[str]) -> int:
    """Runs plan.py; returns its exit code. Raises ValueError with what to type instead."""
    function, config = load(arguments)
    return function(config)


def help_lines(arguments: list[str]) -> list[str]:
    """The modes, and the keys of the one that `arguments` choose."""
    lines = ["Modes; type one of them. `mstrain plan MODE --help` lists its keys:"]
    lines += [*(f"  {name:26}{about}" for name, about in ABOUT.items()), ""]
    key, value, _ = choose(arguments)
    _, kind, file = mode(key, value)
    return [*lines, f"Keys of {key}={value}:", *describe_keys(kind, file, experiments=False)]
