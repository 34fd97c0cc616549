"""A search that its time limit ends early: which plans it has evaluated, and what it computes only once."""

import dataclasses
import math

import pytest

from mstrain.models import products
from mstrain.models.parallel import ParallelConfig
from mstrain.models.zoo import load_preset
from mstrain.planner.clock import Clock, OutOfTime
from mstrain.planner.request import SCHEDULES
from mstrain.planner.search import rank_meshes, search, search_pod
from tests.planner.plans import ask


class Checks(Clock):
    """A budget of so many checks instead of seconds; counts them."""

    def __init__(self, most: float = math.inf):
        super().__init__(1.0)
        self.most, self.done = most, 0

    @property
    def seconds(self) -> float:
        return 0.0

    def check(self, operations: int = 0) -> None:
        self.done += 1
        if self.done > self.most:
            raise OutOfTime


REQUEST = ask(load_preset("olmoe_7b"), cluster="v5p-32", batch=16, seq=1024, remat="full", schedule="1f1b")
TINY = dataclasses.replace(load_preset("tiny"), vocab_size=256)


def test_a_search_that_ends_early_has_seen_the_best_layouts():
    """The best plans divide experts among all replicas; in the order of degrees they are in the middle."""
    whole = Checks()
    everything = search(REQUEST, whole)
    part = search(REQUEST, Checks(whole.done // 4))
    assert everything.finished and everything.best.plan.expert > 1
    assert not part.finished and part.costed < everything.costed / 3
    assert part.best.seconds == everything.best.seconds
    assert [c.seconds for c in search(REQUEST).ranked] == [c.seconds for c in everything.ranked]


def test_what_only_the_model_says_is_computed_once(monkeypatch):
    """Not again for each of hundreds of plans, whose memory needs it."""
    calls, compute = [], products.further_products
    monkeypatch.setattr(products, "further_products", lambda model: calls.append(model) or compute(model))
    model = dataclasses.replace(REQUEST.model, name="not in any cache")
    assert search(dataclasses.replace(REQUEST, model=model)).costed > 500
    assert calls == [model]


def test_a_plan_of_one_stage_is_the_same_for_every_schedule():
    keys = {"cluster": "v4-8", "batch": 16, "seq": 256, "accumulate": "4", "pipeline": "1"}
    found = [search(ask(TINY, **keys, schedule=name)).ranked for name in (*SCHEDULES, "auto")]
    assert all(ranked == found[0] for ranked in found) and found[0][0].plan.schedule == "1f1b"


def test_more_microbatches_than_sequences_are_an_error_and_not_a_traceback():
    request = ask(TINY, cluster="v4-8", batch=2, seq=256, accumulate="4")
    with pytest.raises(ValueError, match="batch=2 does not divide into 4 microbatches"):
        search_pod(request, Clock(60.0))


def test_a_pipeline_has_layers_that_its_stages_support():
    """Stages run one program, in which losses of routers need as many layers in every stage."""
    keys = {"cluster": "v4-16", "batch": 16, "seq": 256, "shard": "none"}
    uneven = dataclasses.replace(REQUEST.model, layers=6, balance_loss=0.01)
    found = search(ask(uneven, **keys)).ranked
    assert {(c.plan.pipeline, c.plan.chunks) for c in found if c.plan.pipeline > 1} <= {(2, 1), (2, 3)}
    with pytest.raises(ValueError, match="need as many layers in every stage, not 4 stages of 2\\+2\\+1\\+1 layers"):
        search_pod(ask(uneven, **keys, pipeline="4"))
    mixed = dataclasses.replace(ask(TINY, **keys), parallel=(ParallelConfig(layers="0:megatron"),))
    assert {costed.plan.pipeline for costed in rank_meshes(mixed)} == {1}


def test_what_is_sharded_over_one_device_is_the_reason():
    with pytest.raises(ValueError, match="shard=optimizer needs replicas or context of 2 or more.* shard=auto"):
        search_pod(ask(TINY, cluster="h100:1", batch=2, seq=256, shard="optimizer"))
