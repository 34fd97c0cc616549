"""Model FLOPs per token: the numerator of MFU.

Counts matrix products only, with two FLOPs per multiply-add. Recomputation (remat), norms, activations and the
embedding lookup are not counted. L layers, D width, N query and K key-value heads of
width H, F MLP width, V vocabulary, T tokens per sequence. Forward, per token:

    products   2 * (L * (D * (N + 2 K) * H + N * H * D + m * D * F) + D * V)   m = 3 for a gated MLP, else 2;
                                                                               of experts, those of a token
                                                                               and the router, D * experts;
                                                                               latent attention: its kernels
    attention  4 * L * N * H * T   convention `full`: all T x T scores (PaLM paper, appendix B)
               2 * L * N * H * T   convention `causal`: the half that the mask keeps

A layer that predicts a further token has the products of a last layer, 2 * D * D of features and embedding, and
D * V.

The backward pass computes two products per forward product, so training needs three times as many FLOPs: 6 per
parameter of a product and, with `full`, PaLM's 12 * L * N * H * T. For a layer with a window of W < T tokens, T becomes
W * (2 - W / T), because the mask keeps a band of the scores.
"""

from mstrain.models.config import ModelConfig

ATTENTION_CONVENTIONS = {"full": 1.0, "causal": 0.5}  # share of the T x T scores that is counted


def matmul_parameters(model: ModelConfig) -> int:
    """Number of parameters of a token's matrix products: all kernels and the output projection, tied or not. Of
    experts, those that compute the token count.

    Raises ValueError if the vocabulary is left to the tokenizer.
    """
    mlp, dense = (mlp_parameters(model, hidden) for hidden in (model.mlp_dim, model.dense_mlp_dim or 0))
    if model.experts:
        mlp = (model.experts_per_token + model.shared_experts) * mlp + model.width * model.experts
    attention, head = _attention_parameters(model), model.width * model.known_vocab_size
    mlps = model.dense_layers * dense + (model.layers - model.dense_layers) * mlp
    further = model.mtp_layers * (attention + mlp + 2 * model.width**2 + head)
    return model.layers * attention + mlps + head + further


def mlp_parameters(model: ModelConfig, hidden: int) -> int:
    """Number of parameters of the products of one MLP, or of one expert, with `hidden` hidden features."""
    return (3 if model.gated else 2) * model.width * hidden


def _attention_parameters(model: ModelConfig) -> int:
    heads, latent = model.heads * model.head_dim, model.latent
    if not latent.key_rank:
        return model.width * 2 * (heads + model.num_kv_heads * model.head_dim)
    queries = latent.query_rank * (model.width + heads) if latent.query_rank else model.width * heads
    keys = model.width * (latent.key_rank + latent.rotary_dim)
    values = model.heads * latent.value_dim
    projected = model.heads * (model.head_dim - latent.rotary_dim) + values
    return queries + keys + latent.key_rank * projected + values * model.width


def forward_flops_per_token(model: ModelConfig, seq: int, attention: str = "full") -> float:
    """FLOPs of a forward pass per token of sequences of `seq` tokens.

    Args:
      attention: `full` or `causal`; published MFU figures use either, so a report must name its convention.

    Raises:
      ValueError: the convention is unknown, or the vocabulary is left to the tokenizer.
    """
    if attention not in ATTENTION_CONVENTIONS:
        raise ValueError(f"Unknown attention convention {attention!r}. Choose {' or '.join(ATTENTION_CONVENTIONS)}.")
    scores = 2 * model.heads * (model.head_dim + model.value_dim) * _tokens_attended(model, seq)
    return 2 * matmul_parameters(model) + ATTENTION_CONVENTIONS[attention] * scores


def training_flops_per_token(model: ModelConfig, seq: int, attention: str = "full") -> float:
    """FLOPs of a forward and a backward pass per token; arguments and errors as `forward_flops_per_token`."""
    return 3 * forward_flops_per_token(model, seq, attention)


def flops_formula(model: ModelConfig, seq: int) -> str:
    """The formula of `training_flops_per_token` with `full`, as text."""
    windowed, layers = _windowed_layers(model, seq), "(layers + mtp_layers)" if model.mtp_layers else "layers"
    if model.latent.key_rank and not windowed:
        return f"6 x multiplying parameters + 6 x {layers} x heads x (head_dim + value_dim) x seq"
    if not windowed:
        return f"6 x multiplying parameters + 12 x {layers} x heads x head_dim x seq"
    attended = (
        f"{model.layers + model.mtp_layers - windowed} layers x seq + {windowed} layers x window x (2 - window / seq)"
    )
    return f"6 x multiplying parameters + 12 x heads x head_dim x ({attended})"


def _windowed_layers(model: ModelConfig, seq: int) -> int:
    """Number of layers whose window is shorter than the sequence; those of further tokens are as the last one."""
    of_layers = (*model.is_local, *(model.is_local[-1],) * model.mtp_layers)
    return sum(of_layers) if model.window and model.window < seq else 0


def _tokens_attended(model: ModelConfig, seq: int) -> float:
    """Sum over layers of T, or of the mean width of the band in layers with a window."""
    windowed = _windowed_layers(model, seq)
    band = model.window * (2 - model.window / seq) if windowed and model.window else 0.0
    return (model.layers + model.mtp_layers - windowed) * seq + windowed * band
