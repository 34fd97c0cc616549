"""The memory of the loss in the memory model."""

import dataclasses

import pytest

from mstrain.layers import kept_loss
from mstrain.layers.loss import LARGEST
from mstrain.models.zoo import load_preset
from mstrain.planner.memory import loss_bytes
from mstrain.planner.plan import PodPlan, Product, plan_products
from tests.planner.plans import ask, pod_plan


def head_of(plan: PodPlan, vocab_size: int, batch: int) -> Product:
    model = dataclasses.replace(load_preset("gpt3_1_3b"), layers=8, vocab_size=vocab_size)
    return plan_products(ask(model, cluster="v4-64", batch=batch, seq=1024), plan).head


def test_the_loss_holds_chunks_of_logits():
    """Four times the sequences have four times the logits, of which chunks of the same size exist at once."""
    for batch in (512, 2048):
        head = head_of(pod_plan(1, "meshslice", 8, 4, 1, 1, "full"), 256 * 1024, batch)
        layout = head.layout
        logits = 4 * layout.tokens * layout.projection.out_dim / 32
        chunk, shared = loss_bytes(head, 2)
        assert chunk == pytest.approx(6 / 4 * LARGEST, rel=0.2) and chunk < logits / 8
        assert shared == 6 * layout.projection.in_dim * min(layout.tokens // 8, layout.projection.out_dim // 4)


def test_the_loss_of_a_gpu_that_has_the_whole_head_holds_its_slopes():
    head = head_of(pod_plan(64, "meshslice", 1, 1, 1, 1, "full"), 32 * 1024, 64)
    tokens, (inside, vocabulary) = head.layout.tokens, (head.layout.projection.in_dim, head.layout.projection.out_dim)
    chunk, shared = loss_bytes(head, 2, "gpu")
    assert chunk == min(4 * tokens * vocabulary, kept_loss.CHUNK)
    assert shared == 2 * tokens * vocabulary + 6 * vocabulary * inside
    assert sum(loss_bytes(head, 2)) < chunk + shared
