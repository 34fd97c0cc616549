"""A transformer of Flax's own layers on one device, as one writes it without mstrain."""

import functools
from collections.abc import Callable
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from mstrain.benchmarks.peers.own import carried, random_tokens
from mstrain.benchmarks.peers.task import CLIP, LEARNING_RATE, WEIGHT_DECAY, Peer, Task
from mstrain.models.config import ModelConfig
from mstrain.program.dtype import dtype_on


class Block(nn.Module):
    model: ModelConfig
    dtype: jnp.dtype
    kernel: Literal["cudnn", "xla"]

    @nn.compact
    def __call__(self, x_BxTxD):
        m, dense = self.model, functools.partial(nn.DenseGeneral, dtype=self.dtype, use_bias=self.model.bias == "all")
        h = _norm(m, self.dtype)(x_BxTxD)
        q = dense((m.heads, m.head_dim), name="query")(h)
        k, v = (dense((m.num_kv_heads, m.head_dim), name=name)(h) for name in ("key", "value"))
        if m.position == "rotary":
            q, k = _rotate(q, m.rotary_base), _rotate(k, m.rotary_base)
        h = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.kernel)
        x_BxTxD += dense(m.width, axis=(-2, -1), name="out")(h)
        h = _norm(m, self.dtype)(x_BxTxD)
        if m.gated:
            h = nn.silu(dense(m.mlp_dim, name="gate")(h)) * dense(m.mlp_dim, name="up")(h)
        else:
            h = nn.gelu(dense(m.mlp_dim, name="up")(h), approximate=True)
        return x_BxTxD + dense(m.width, name="down")(h)


class Model(nn.Module):
    model: ModelConfig
    dtype: jnp.dtype
    kernel: Literal["cudnn", "xla"]

    @nn.compact
    def __call__(self, ids_BxT):
        m = self.model
        table = nn.Embed(m.known_vocab_size, m.width, dtype=self.dtype, name="table")
        x = table(ids_BxT)
        if m.position == "learned":
            x += nn.Embed(m.context, m.width, dtype=self.dtype, name="positions")(jnp.arange(ids_BxT.shape[1]))
        for _ in range(m.layers):
            x = Block(m, self.dtype, self.kernel)(x)
        x = _norm(m, self.dtype)(x)
        return table.attend(x) if m.tied else nn.Dense(m.known_vocab_size, use_bias=False, dtype=self.dtype)(x)


def make(task: Task) -> Peer:
    """The peer; raises ValueError for an architecture that it does not have."""
    device = jax.devices()[0]
    start, step, how = build(task, device.platform)
    ids = random_tokens(task)
    state = jax.jit(start)(ids)
    return carried(lambda: step.lower(state, ids).compile(), state, [ids], how, device)


def build(task: Task, platform: str) -> tuple[Callable, Any, str]:
    """`start(ids) -> state`, the jitted `step(state, ids) -> (state, metrics)`, which donates its state, and dtype and
    attention in words; ids are int32 [batch, seq + 1]. Raises ValueError as `make`."""
    check(task.model)
    dtype = jnp.dtype(dtype_on(platform, task.dtype))
    module = Model(task.model, dtype, "cudnn" if platform == "gpu" and dtype != jnp.float32 else "xla")
    adam = optax.adamw(LEARNING_RATE, b2=0.95, weight_decay=WEIGHT_DECAY, mask=_is_decayed)
    optimizer = optax.chain(optax.clip_by_global_norm(CLIP), adam)

    def loss(params, ids):
        logits: Any = module.apply({"params": params}, ids[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), ids[:, 1:]).mean()

    def start(ids):
        params = module.init(jax.random.key(task.seed), ids[:1, :-1])["params"]
        return params, optimizer.init(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, ids):
        params, moments = state
        value, gradients = jax.value_and_grad(loss)(params, ids)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), {"loss": value}

    return start, step, f"{dtype.name}, attention {module.kernel}"


def check(model: ModelConfig) -> None:
    """Raises ValueError for an architecture that the peers written here do not have."""
    kind = (model.norm, model.activation, model.gated, model.bias)
    known = {("layernorm", "gelu_tanh", False, "all"), ("rmsnorm", "silu", True, "none")}
    extra = (
        model.qk_norm or model.qk_norm_whole or model.parallel_block or model.post_norm or model.window
        or model.scaled_embedding or model.attention_soft_cap or model.logit_soft_cap or model.rotary_scaling
        or model.unit_offset_norm or model.attention_scale or model.experts
        or model.position not in ("learned", "rotary")
    )  # fmt: skip
    if kind not in known or extra:
        raise ValueError(f"{model.name} is neither a GPT nor a Llama, which bench=peers compares. Type models=gpt2.")


def _is_decayed(params):
    """True for matrices by Flax's names, `mstrain.program.optimizer.decay_mask` is by those of mstrain."""
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key in ("kernel", "embedding"), params)


def _norm(model: ModelConfig, dtype):
    kind = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
    return kind(epsilon=model.norm_epsilon, dtype=dtype)


def _rotate(x_BxTxNxH, base: float):
    half = x_BxTxNxH.shape[-1] // 2
    angles = jnp.outer(jnp.arange(x_BxTxNxH.shape[1]), base ** (-jnp.arange(half) / half))[:, None]
    one, two = jnp.split(x_BxTxNxH.astype(jnp.float32), 2, -1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([one * cos - two * sin, two * cos + one * sin], -1).astype(x_BxTxNxH.dtype)
