"""What a transformer does beside products, in numpy, on the shard of one device: forward and backward.

Sums over features that are sharded come in from outside, as the program has them.
"""

import numpy as np

from mstrain.models.config import ModelConfig


def moments(model: ModelConfig, sums):
    """(mean, reciprocal deviation), (tokens, 1) each, from `norm_sums`; an RMSNorm has no mean."""
    mean = sums[1] / model.width if model.norm == "layernorm" else 0.0 * sums[1]
    return mean[:, None], 1 / np.sqrt(sums[0] / model.width - mean**2 + model.norm_epsilon)[:, None]


def norm(model: ModelConfig, x, sums):
    mean, rate = moments(model, sums)
    return (x - mean) * rate


def norm_gradient(model: ModelConfig, x, g, sums):
    mean, rate = moments(model, sums)
    mean_g = (sums[2] / model.width if model.norm == "layernorm" else 0.0 * sums[2])[:, None]
    mean_gx = sums[3][:, None] / model.width * rate - mean * mean_g * rate
    return rate * (g - mean_g - (x - mean) * rate * mean_gx)


def norm_sums(values):
    """Of one matrix: squares and values; of two: also the second's values and their product."""
    x = values[0]
    sums = [(x * x).sum(axis=1), x.sum(axis=1)]
    if len(values) > 1:
        sums += [values[1].sum(axis=1), (values[1] * x).sum(axis=1)]
    return np.stack(sums)


def activation(u, gated):
    """SiLU, of the first half times the second where the MLP is gated."""
    gate, up = np.split(u, 2, axis=1) if gated else (u, 1.0)
    return gate / (1 + np.exp(-gate)) * up


def activation_gradient(u, g, gated):
    gate, up = np.split(u, 2, axis=1) if gated else (u, 1.0)
    sigmoid = 1 / (1 + np.exp(-gate))
    slope = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    return np.concatenate([slope, g * gate * sigmoid], axis=1) if gated else slope


def attention(model: ModelConfig, seq: int, columns: int, qkv, gradient=None):
    """Causal attention of whole sequences and the heads of one of `columns` devices, or its gradient."""
    heads, kv, width = model.heads // columns, model.num_kv_heads // columns, model.head_dim
    q, k, v = np.split(qkv, [heads * width, (heads + kv) * width], axis=1)
    q = q.reshape(-1, seq, kv, heads // kv, width)
    k, v = (part.reshape(-1, seq, kv, width) for part in (k, v))
    scale = model.attention_scale or width**-0.5
    scores = np.einsum("btkgh,bskh->bkgts", q, k) * scale
    scores = np.where(np.tri(seq, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    if gradient is None:
        return np.einsum("bkgts,bskh->btkgh", weights, v).reshape(len(qkv), -1)
    do = gradient.reshape(q.shape)
    dv = np.einsum("bkgts,btkgh->bskh", weights, do)
    dw = np.einsum("btkgh,bskh->bkgts", do, v)
    ds = weights * (dw - (weights * dw).sum(axis=-1, keepdims=True)) * scale
    dq, dk = np.einsum("bkgts,bskh->btkgh", ds, k), np.einsum("bkgts,btkgh->bskh", ds, q)
    return np.concatenate([part.reshape(len(qkv), -1) for part in (dq, dk, dv)], axis=1)
