"""Compares the configuration of a resumed run with its record. Every key has a class.

A change of a KEPT key changes the model, the schedule or the batches; it is refused unless `allow=` names the key. A
CONTENT key is the location of data or a tokenizer; digests of the contents are compared instead. A FREE key may change
between attempts; the change is printed. A LOCAL key belongs to one process or one command.
"""

import dataclasses
import difflib
import json
import re
from typing import Any

KEPT, CONTENT, FREE, LOCAL = "kept", "content", "free", "local"
# A key has the class of its own entry, or else of its group. Other keys are KEPT.
CLASSES = {
    **dict.fromkeys(("model", "optimizer", "steps", "batch", "seq", "seed", "dtype", "init", "init_from"), KEPT),
    **dict.fromkeys(("precision", "travel"), KEPT),
    **dict.fromkeys(("data.source", "data.field", "data.name", "data.split", "data.num_tokens"), KEPT),
    **dict.fromkeys(("data.validation_fraction", "data.mixture", "data.window", "data.token_dtype", "pack"), KEPT),
    **dict.fromkeys(("data.bos", "data.eos"), KEPT),
    **dict.fromkeys(("data.validation", "data.template"), CONTENT),
    **dict.fromkeys(("data.path", "data.revision", "data.max_skipped", "tokenizer", "vocab_size"), CONTENT),
    **dict.fromkeys(("mesh", "parallel", "plan", "tune", "remat", "offload", "shard", "accumulate", "pipeline"), FREE),
    **dict.fromkeys(("compile_cache", "calibration", "wandb"), FREE),
    **dict.fromkeys(("checkpoint", "eval", "profile", "sample", "log_every", "model.name"), FREE),
    **dict.fromkeys(("guard", "watchdog", "check_replicas", "hosts", "data.cache_dir"), FREE),
    **dict.fromkeys(("run_dir", "allow", "target", "check", "coordinator", "processes", "process"), LOCAL),
}
ORIGINS = ("init", "init_from")  # what a new run starts from; a resume may omit them
DIGESTS = ("data", "tokenizer")  # compared by content
OPTIMIZER = "optimizer.name"  # allow= cannot permit another one: checkpoints hold the moments of one optimizer
NO_RECORD, LOST_STEPS = "no_record", "lost_steps"


@dataclasses.dataclass(frozen=True)
class Record:
    """The resolved configuration of a run by key, and the digests of its data and tokenizer."""

    config: dict[str, Any]
    digests: dict[str, str | None]


@dataclasses.dataclass(frozen=True)
class Difference:
    """A key whose value differs from the record."""

    name: str
    before: Any
    now: Any
    free: bool

    @property
    def group(self) -> str:
        return self.name.partition(".")[0]

    @property
    def covered_by(self) -> set[str]:
        """The names in `allow=` that permit it: the key or its group; none for OPTIMIZER."""
        return set() if self.name == OPTIMIZER else {self.name, self.group}

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.before)} recorded, {_shown(self.now)} now"


def class_of(key: str) -> str:
    """KEPT, CONTENT, FREE or LOCAL."""
    group = key.partition(".")[0]
    return CLASSES.get(key) or CLASSES.get(group) or KEPT


def flat(config, prefix: str = "") -> dict[str, Any]:
    """The keys of a config dataclass with their plain values; nested ones as `group.key`."""
    values = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            values |= flat(value, f"{prefix}{field.name}.")
        else:
            values[prefix + field.name] = list(value) if isinstance(value, tuple) else value
    return values


def recorded_keys(config) -> dict[str, Any]:
    """The keys of a RunConfig that a record holds, with the number that a null `model.attention_scale` means."""
    values = {key: value for key, value in flat(config).items() if class_of(key) != LOCAL}
    return {key: _automatic(key, values) if key == _SCALE and value is None else value for key, value in values.items()}


def differences(before: Record, now: Record, defaults: dict[str, Any]) -> list[Difference]:
    """The keys that differ between `before` and `now`. A key that an old record lacks has its default.

    Keys that `now` lacks are not known yet and not compared, and neither are keys that a resume may omit.
    """
    found = []
    for key in sorted(before.config.keys() | now.config.keys()):
        if key not in now.config and key in defaults:
            continue
        old, new = before.config.get(key, defaults.get(key)), now.config.get(key)
        if old != new and class_of(key) != LOCAL and not _follows(key, before, now):
            free = class_of(key) in (FREE, CONTENT) or _without_effect(key, before, now)
            found.append(Difference(key, old, new, free))
    for name in DIGESTS:
        old, new = before.digests.get(name), now.digests.get(name)
        if old != new and new is not None:
            found.append(Difference(name, old, new, free=False))
    return found


def refused(found: list[Difference], allowed: set[str]) -> list[Difference]:
    """The differences that change the run and that `allowed` does not name."""
    return [difference for difference in found if not difference.free and not difference.covered_by & allowed]


def refusal(place: str, found: list[Difference], allowed: set[str], instead: str) -> str | None:
    """The error message with all differences; None when none of them is refused.

    Args:
      place: the file of the record.
      instead: what to type in place of the refused values.
    """
    no = refused(found, allowed)
    if not no:
        return None
    lines = [f"{place} is the record of a different run:", *(f"  {difference}" for difference in no)]
    if others := [difference for difference in found if difference not in no]:
        lines += ["These may differ:", *(f"  {difference}" for difference in others)]
    if OPTIMIZER in (difference.name for difference in no):
        return "\n".join([*lines, f"{instead}. {_OTHER_OPTIMIZER}"])
    names = " ".join(dict.fromkeys("data" if x.group == "data" else x.name for x in no))
    return "\n".join([*lines, f'{instead}, or type allow="{names}" to change it.'])


_OTHER_OPTIMIZER = (
    f"A checkpoint holds the moments of its {OPTIMIZER}, so none is resumed with another: type init_from= with this "
    "folder and another run_dir= to begin a run with its weights."
)


def parse_allow(text: str | None, keys) -> set[str]:
    """The names in `allow=`. Raises ValueError for a name that is not in `keys` (of a configuration)."""
    groups = {key.partition(".")[0] for key in keys}
    known = {key for key in [*keys, *groups] if class_of(key) in (KEPT, CONTENT)} | {NO_RECORD, *DIGESTS}
    known -= {OPTIMIZER}
    names = set((text or "").split())
    for name in sorted(names):
        if name in known or re.fullmatch(LOST_STEPS + r":\d{1,12}", name):
            continue
        if name == OPTIMIZER:
            raise ValueError(f"allow={name} has no effect. {_OTHER_OPTIMIZER}")
        if name in keys or name in groups:
            raise ValueError(f"allow={name} has no effect: {name} may change without it. Remove it.")
        near = difflib.get_close_matches(name, sorted(known), 1)
        hint = f"Did you mean {near[0]}?" if near else f"Type a key, {NO_RECORD} or {LOST_STEPS}:N."
        raise ValueError(f"allow={name}: unknown key of a run. {hint}")
    return names


_SCALE = "model.attention_scale"


def _follows(key: str, before: Record, now: Record) -> bool:
    """Whether the difference of `key` follows from other keys: the tokenizer sets vocab_size, a resume does not need
    init or init_from, and both values are the automatic ones, such as head_dim from width and heads.
    """
    if key in ("model.vocab_size", *ORIGINS) and now.config[key] is None:
        return True
    ways = [(record.config.get(key), _automatic(key, record.config)) for record in (before, now)]
    return all(value is not None and value == automatic for value, automatic in ways)


def _automatic(key: str, config: dict[str, Any]) -> Any:
    """The automatic value of a key of the model; None for other keys and for a record without a model."""
    found = [config.get(f"model.{name}") for name in ("width", "heads", "head_dim")]
    dims = [dim for dim in found if isinstance(dim, int)]
    if len(dims) < len(found):
        return None
    width, heads, head_dim = dims
    try:
        meanings = {"num_kv_heads": heads, "head_dim": width // heads, "mlp_dim": 4 * width}
        return {**meanings, "attention_scale": head_dim**-0.5}.get(key.removeprefix("model."))
    except (TypeError, ArithmeticError):
        return None


def _without_effect(key: str, before: Record, now: Record) -> bool:
    """Whether a change of `steps` does not change the schedule: a rate that does not depend on it after the warm-up."""
    if key != "steps":
        return False
    if not all(isinstance(record.config.get("steps"), int) for record in (before, now)):
        return False
    warmup, schedule = now.config.get("optimizer.warmup"), now.config.get("optimizer.schedule", "cosine")
    constant = schedule in ("constant", "inverse_sqrt") or now.config.get("optimizer.final_fraction") == 1
    return constant and all(warmup < record.config["steps"] for record in (before, now))


def _shown(value: Any) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= 80 else text[:77] + "..."
