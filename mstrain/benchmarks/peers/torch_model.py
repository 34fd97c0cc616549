"""A GPT or Llama in plain PyTorch: fused query-key-value products, scaled_dot_product_attention, tied tables."""

import functools

import torch
import torch.nn.functional as F
from torch import nn

from mstrain.models.config import ModelConfig


class Attention(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.model, bias = model, model.bias == "all"
        features = (model.heads + 2 * model.num_kv_heads) * model.head_dim
        self.qkv = nn.Linear(model.width, features, bias=bias)
        self.out = nn.Linear(model.heads * model.head_dim, model.width, bias=bias)

    def forward(self, x_BxTxD, rotary):
        m = self.model
        heads = self.qkv(x_BxTxD).unflatten(-1, (-1, m.head_dim)).transpose(1, 2)
        q, k, v = heads.split((m.heads, m.num_kv_heads, m.num_kv_heads), 1)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        grouped = m.heads != m.num_kv_heads
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(h.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.gated, bias = model.gated, model.bias == "all"
        self.up = nn.Linear(model.width, (1 + model.gated) * model.mlp_dim, bias=bias)
        self.down = nn.Linear(model.mlp_dim, model.width, bias=bias)

    def forward(self, x):
        h = self.up(x)
        if self.gated:
            gate, h = h.chunk(2, -1)
            return self.down(F.silu(gate) * h)
        return self.down(F.gelu(h, approximate="tanh"))


class Block(nn.Module):
    def __init__(self, model: ModelConfig):
        super().__init__()
        self.first, self.second = norm(model), norm(model)
        self.attention, self.mlp = Attention(model), MLP(model)

    def forward(self, x, rotary):
        x = x + self.attention(self.first(x), rotary)
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """`forward(ids [B, T], targets [B, T])` returns the mean loss in nats."""

    def __init__(self, model: ModelConfig, seq: int):
        super().__init__()
        self.model, vocab_size = model, model.known_vocab_size
        padded = -(-vocab_size // 64) * 64  # tensor cores need a multiple; the rows beyond are never targets
        self.table = nn.Embedding(padded, model.width)
        self.positions = nn.Embedding(model.context, model.width) if model.position == "learned" else None
        self.blocks = nn.ModuleList(Block(model) for _ in range(model.layers))
        self.norm, self.head = norm(model), nn.Linear(model.width, padded, bias=False)
        self.apply(functools.partial(_initialize, deviation=model.init_scale))
        if model.tied:
            self.head.weight = self.table.weight
        half = model.head_dim // 2
        angles = torch.outer(torch.arange(seq), model.rotary_base ** (-torch.arange(half) / half))
        self.register_buffer("sin", angles.sin())
        self.register_buffer("cos", angles.cos())

    def forward(self, ids, targets):
        x = self.table(ids)
        if self.positions is not None:
            x = x + self.positions.weight[: ids.shape[1]]
        rotary = (self.sin, self.cos) if self.model.position == "rotary" else None
        for block in self.blocks:
            x = block(x, rotary)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def norm(model: ModelConfig) -> nn.Module:
    kind = nn.LayerNorm if model.norm == "layernorm" else nn.RMSNorm
    return kind(model.width, eps=model.norm_epsilon)


def rotate(x_BxNxTxH, sin_TxH, cos_TxH):
    one, two = x_BxNxTxH.float().chunk(2, -1)
    return torch.cat([one * cos_TxH - two * sin_TxH, two * cos_TxH + one * sin_TxH], -1).to(x_BxNxTxH.dtype)


def _initialize(module: nn.Module, deviation: float) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=deviation)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
