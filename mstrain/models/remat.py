"""What a layer keeps for its backward pass: `remat=` and `offload=` by names of values.

A layer names its values with `jax.ad_checkpoint.checkpoint_name`; all others are recomputed from those that are kept.
"""

import difflib
import re
from collections.abc import Callable

import jax

DOTS = ("attention-in", "attention", "attention-out", "mlp-in", "mlp-out")
NAMES = ("layer-input", "attention-norm", "mlp-norm", *DOTS)
"""Input of a layer, results of the norms before its halves, of the products into and out of them, of attention."""
CHOICES = "router"  # the experts of every token, always kept: computed again, they might differ
MOMENTS = "moments"  # of the optimizer, which offload= also takes
POLICIES = {
    "dots": DOTS,
    "dots-but-mlp-in": tuple(name for name in DOTS if name != "mlp-in"),
    "attention": ("attention",),
    "full": (),
}  # from most to least memory
AUTO = "auto"
LADDER = ("none", *POLICIES)  # what remat=auto chooses from, fastest first


def saved_names(remat: str) -> tuple[str, ...] | None:
    """Names of the values that `remat` keeps; None for all (`none`, and `auto` until it is resolved).

    Raises ValueError, with the names there are, for others.
    """
    if remat in ("none", AUTO):
        return None
    return POLICIES[remat] if remat in POLICIES else _names("remat", remat, NAMES, (AUTO, *LADDER))


def offloaded_names(offload: str | None) -> tuple[str, ...]:
    """Names in `offload`, none for None; raises ValueError, with the names there are, for others."""
    return () if offload is None else _names("offload", offload, (*NAMES, MOMENTS), ())


def check_remat(remat: str, offload: str | None) -> None:
    """Raises ValueError if either has an unknown name, or if nothing is recomputed where values are offloaded."""
    saved, offloaded = () if remat == AUTO else saved_names(remat), offloaded_names(offload)
    if saved is None and set(offloaded) - {MOMENTS}:
        raise ValueError(f"offload={offload} has no effect with remat=none, which keeps every value. Type remat=full.")


def policy_of(remat: str, offload: str | None):
    """The policy for `jax.checkpoint`; None without recomputation."""
    saved = saved_names(remat)
    if saved is None:
        return None
    offloaded = [name for name in offloaded_names(offload) if name != MOMENTS]
    saved, policies = (*saved, CHOICES), jax.checkpoint_policies
    if not offloaded:
        return policies.save_only_these_names(*saved)
    return policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[name for name in saved if name not in offloaded],
        names_which_can_be_offloaded=offloaded, offload_src="device", offload_dst="pinned_host",
    )  # fmt: skip


def planned(remat: str, offload: str | None = None) -> str | None:
    """Both for the planner, which recomputes norms; None, which leaves remat to the planner, for `auto`."""
    if remat == AUTO:
        return None
    kept, moved = (
        "+".join(name for name in names or () if name != MOMENTS and not name.endswith("-norm"))
        for names in (saved_names(remat), offloaded_names(offload))
    )
    kept = remat if remat in LADDER else kept or "full"
    return f"{kept} offload: {moved}" if moved else kept


def cheapest_that_fits(fits: Callable[[str], bool]) -> str:
    """The first of `LADDER` for which `fits(remat)`, by bisection; the last where none does."""
    low, high = -1, len(LADDER) - 1
    while high - low > 1:
        middle = 0 if low < 0 else (low + high) // 2  # most steps fit without recomputation
        low, high = (low, middle) if fits(LADDER[middle]) else (middle, high)
    return LADDER[high]


def _names(key: str, text: str, known: tuple[str, ...], alone: tuple[str, ...]) -> tuple[str, ...]:
    """The names in `text`; `alone` are the values that are not a list."""
    names = tuple(filter(None, re.split(r"[\s,+]+", text)))
    for name in (name for name in names or (text,) if name not in known):
        near = difflib.get_close_matches(name, (*known, *(alone if name == text else ())), 1)
        hint = f"Did you mean {key}={text.replace(name, near[0])}? " if near else ""
        values = f"{', '.join(alone)}, or " if alone else ""
        raise ValueError(
            f"{key}={text}: {name!r} is unknown. {hint}Type {values}names joined by + out of {', '.join(known)}."
        )
    return names
