"""Mixtral 8x7B on 256 chips: the published figures of MaxText, predictions of the same plan, and the best plan.

    python -m tests.planner.mixtral [SEQUENCES]

The plan of MaxText is FSDP over all chips with full recomputation. It is predicted with the tiles of grouped products
of MaxText and of mstrain. MaxText does not state its batch; SEQUENCES is the number of sequences of 4096 tokens per
chip, by default 8. The best plan is that of all plans without pipeline stages.
"""

import dataclasses
import sys

from mstrain.models.zoo import load_preset
from mstrain.planner.execution import style_named
from mstrain.planner.search import search
from mstrain.planner.trainer import spelled, train_keys
from tests.planner.plans import ask

PUBLISHED = {"v5p-512": (52.6, 2909), "v6e-256": (35.2, 3899)}  # MFU in %, tokens/s per chip
CHIPS, SEQ = 256, 4096
THEIRS = {
    "algorithm": "fsdp", "replicas": "1", "tensor": "256", "pipeline": "1", "context": "1", "shard": "none",
    "remat": "full", "accumulate": "1",
}  # fmt: skip


def line(target: str, sequences: int) -> str:
    asked = {"cluster": target, "batch": CHIPS * sequences, "seq": SEQ}
    model, tile = load_preset("mixtral_8x7b"), style_named("maxtext").expert_tile
    published, rate = PUBLISHED[target]
    cells = [f"{published} %, {rate:,}"]
    best = ask(model, **asked, pipeline="1", context="1")
    for request in (ask(model, **asked, **THEIRS), best):
        for expert_tile in (tile, None) if request is not best else (None,):
            style = dataclasses.replace(style_named("mstrain"), expert_tile=expert_tile)
            found = search(dataclasses.replace(request, stated_style=style), best_only=True).trainable[0]
            share = 100 * (request.utilization(found.seconds) or 0)
            cells.append(
                f"{share:.1f} %, {request.tokens / found.seconds / CHIPS:,.0f} ({100 * (share / published - 1):+.0f} %)"
            )
    keys = spelled(train_keys(found.plan))
    return f"| {target} | {' | '.join(cells)} | `{keys}` |"


if __name__ == "__main__":
    print(
        "| target | published | predicted, tiles of MaxText | predicted, tiles of mstrain | best plan | its "
        "keys |\n|" + " --- |" * 6
    )
    for target in PUBLISHED:
        print(line(target, int([*sys.argv[1:], "8"][0])), flush=True)
