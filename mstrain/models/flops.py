"""Floating-point operations a model needs per token: the numerator of MFU.

Only matrix products count, a multiply-add as two, and each once: recomputation (remat) is no progress. Norms,
activations and the embedding lookup multiply no matrices. L layers, D width, N query and K key-value heads of
width H, F MLP width, V vocabulary, T tokens per sequence. Forward, per token:

    products   2 * (L * (D * (N + 2 K) * H + N * H * D + m * D * F) + D * V)   m = 3 for a gated MLP, else 2
    attention  4 * L * N * H * T   convention `full`: the whole square of scores (PaLM paper, appendix B)
               2 * L * N * H * T   convention `causal`: half of it, the part that is seen

A backward pass computes two products for each one forward, so training costs three times as much: 6 FLOPs per
parameter that multiplies and, under `full`, PaLM's 12 * L * N * H * T. A layer that sees a window of W < T
tokens has W * (2 - W / T) in the place of T: the seen half of the square shrinks to a band by that factor.
"""

from mstrain.models.config import ModelConfig

ATTENTION_CONVENTIONS = {"full": 1.0, "causal": 0.5}  # share of the square of scores that counts


def matmul_parameters(model: ModelConfig) -> int:
    """Number of parameters that multiply every token: all kernels and the output projection, tied or not.

    Raises ValueError when the vocabulary is left to the tokenizer.
    """
    if model.vocab_size is None:
        raise ValueError(
            f"model {model.name} takes its vocabulary from the tokenizer, so its FLOPs are not known yet. "
            "Set model.vocab_size."
        )
    heads, kv = model.heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.width * (heads + 2 * kv) + heads * model.width
    mlp = (3 if model.gated else 2) * model.width * model.mlp_dim
    return model.layers * (attention + mlp) + model.width * model.vocab_size


def forward_flops_per_token(model: ModelConfig, seq: int, attention: str = "full") -> float:
    """FLOPs of a forward pass per token of sequences of `seq` tokens.

    Args:
      attention: `full` or `causal`; published MFU figures use both, so name yours.

    Raises:
      ValueError: unknown convention, or a vocabulary left to the tokenizer.
    """
    if attention not in ATTENTION_CONVENTIONS:
        raise ValueError(
            f"There is no attention convention {attention!r}. Choose {' or '.join(ATTENTION_CONVENTIONS)}."
        )
    scores = 4 * model.heads * model.head_dim * _tokens_attended(model, seq)
    return 2 * matmul_parameters(model) + ATTENTION_CONVENTIONS[attention] * scores


def training_flops_per_token(model: ModelConfig, seq: int, attention: str = "full") -> float:
    """FLOPs of a forward and a backward pass per token; arguments and errors as `forward_flops_per_token`."""
    return 3 * forward_flops_per_token(model, seq, attention)


def flops_formula(model: ModelConfig, seq: int) -> str:
    """`training_flops_per_token` under `full`, in words."""
    windowed = _windowed_layers(model, seq)
    if not windowed:
        return "6 x multiplying parameters + 12 x layers x heads x head_dim x seq"
    attended = f"{model.layers - windowed} layers x seq + {windowed} layers x window x (2 - window / seq)"
    return f"6 x multiplying parameters + 12 x heads x head_dim x ({attended})"


def _windowed_layers(model: ModelConfig, seq: int) -> int:
    """Layers whose window is shorter than the sequence: every second one, from the first."""
    return (model.layers + 1) // 2 if model.window and model.window < seq else 0


def _tokens_attended(model: ModelConfig, seq: int) -> float:
    """Sum over layers of T, or of the width of the band where a window is shorter."""
    windowed = _windowed_layers(model, seq)
    band = model.window * (2 - model.window / seq) if windowed else 0.0
    return (model.layers - windowed) * seq + windowed * band
