"""remat= by names: a layer keeps exactly the values that are named, and remat=auto compiles few candidates."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mstrain.mesh import make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.parameters import parameter_shapes
from mstrain.models.plan import ParallelConfig, make_plan
from mstrain.models.remat import (
    LADDER,
    NAMES,
    POLICIES,
    cheapest_that_fits,
    check_remat,
    offloaded_names,
    planned,
    saved_names,
)
from mstrain.models.transformer import Transformer
from mstrain.program.offload import HOST, check_offload, on_host

LAYERS, SEQ, SEQUENCES = 3, 8, 8
MODEL = ModelConfig(
    layers=LAYERS, width=16, heads=4, num_kv_heads=2, head_dim=8, mlp_dim=24, vocab_size=40, gated=True,
    position="rotary", norm="rmsnorm", norm_bias=False, bias="none",
)  # fmt: skip


def kept(remat, offload=None):
    """Features per token and layer among the residuals of the loss; nothing is compiled."""
    mesh = make_mesh(parse_mesh("2x4"))
    plan = make_plan(ParallelConfig("collective"), MODEL, mesh, SEQUENCES, SEQ)
    module = Transformer(MODEL, plan, SEQ, remat=remat, offload=offload)
    tokens = jax.ShapeDtypeStruct((SEQUENCES * SEQ,), jnp.int32)

    def residuals(params, tokens):
        return jax.vjp(lambda p: module.apply({"params": p}, tokens, tokens, method="loss"), params)[1]

    weights = {leaf.shape for leaf in jax.tree.leaves(parameter_shapes(module))}
    leaves = jax.tree.leaves(jax.eval_shape(residuals, parameter_shapes(module), tokens))
    stacked = [leaf.size for leaf in leaves if leaf.ndim > 2 and leaf.shape[0] == LAYERS and leaf.shape not in weights]
    return sum(stacked) / (LAYERS * tokens.size)


def kept_features(model, remat, offload=None):
    """Features per token and layer that a layer keeps on the device with `remat` other than `none`, its input too."""
    heads, keys = model.heads * model.head_dim, model.num_kv_heads * model.head_dim
    hidden = model.mlp_dim * (model.experts_per_token if model.experts else 1)
    widths = dict.fromkeys(NAMES, model.width) | {
        "attention-in": heads + 2 * keys, "attention": heads, "mlp-in": hidden * (2 if model.gated else 1),
    }  # fmt: skip
    kept = {"layer-input", *(saved_names(remat) or ())} - set(offloaded_names(offload))
    if not model.post_norm:  # what is only added to the residual stream is not needed again
        kept -= {"mlp-out", *(["attention-out"] if model.parallel_block else [])}
    return sum(widths[name] for name in kept)


@pytest.mark.parametrize("remat", [*POLICIES, *NAMES[1:], "attention-norm+mlp-out", "attention, mlp-in"])
def test_a_layer_keeps_its_input_and_what_is_named(remat):
    assert kept(remat) == kept_features(MODEL, remat)


def test_offloaded_values_replace_those_on_the_device():
    assert kept("full", "layer-input+mlp-in") == kept("full") + 48  # in host memory, the input no second time
    assert kept_features(MODEL, "full", "layer-input") == 0
    assert kept("none") > kept("dots") > kept("dots-but-mlp-in") > kept("attention") > kept("full")


@pytest.mark.parametrize("limit", range(len(LADDER) + 1))
def test_auto_takes_the_first_that_fits_and_compiles_at_most_four(limit):
    tried = []

    def fits(remat):
        tried.append(remat)
        return LADDER.index(remat) >= limit

    assert cheapest_that_fits(fits) == LADDER[min(limit, len(LADDER) - 1)]
    assert len(tried) <= (4 if limit else 1) and len(set(tried)) == len(tried)


@pytest.mark.parametrize(
    "remat, offload, words",
    [
        ("mlp-on", None, "Did you mean remat=mlp-in"), ("full", "moment", "Did you mean offload=moments"),
        ("none", "mlp-in", "Type remat=full"), ("", None, "Type auto, none"), ("full", "+", "names joined by"),
    ],
)  # fmt: skip
def test_unknown_names_are_answered_with_the_list(remat, offload, words):
    with pytest.raises(ValueError, match=words):
        check_remat(remat, offload)


def test_the_planner_prices_the_nearest_of_its_own():
    assert [planned(remat) for remat in LADDER] == list(LADDER)
    assert [planned(remat) for remat in ("auto", "mlp-in")] == [None, "mlp-in"]


def test_moments_wait_in_host_memory_and_counters_stay():
    mesh = make_mesh(parse_mesh("2x4"))
    found = on_host({"moment": NamedSharding(mesh, P("row", "col")), "count": NamedSharding(mesh, P())})
    assert found["moment"].memory_kind == HOST and found["count"].memory_kind != HOST


def test_offload_is_refused_where_there_is_no_host_memory():
    device = SimpleNamespace(device_kind="TPU v1", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    check_offload(None, device)
    with pytest.raises(ValueError, match="TPU v1 has no pinned_host memory, only device. Drop offload="):
        check_offload("moments", device)
