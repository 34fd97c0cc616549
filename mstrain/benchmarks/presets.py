"""Predictions of published comparisons: python benchmark.py preset=v2 (or v3).

transformer_shmap's README has two rows, derived from effective TFLOP/s: 2.8 B parameters on a
v2-32 at 454 TFLOP/s, 63 % of 16 chips x 45 TFLOP/s, and 6.9 B on a v3-32 at 867 TFLOP/s, 44 % of 16 chips x
123. Its benchmark feeds 32 sequences of 1024 tokens per host (four hosts) in 32 microbatches, recomputes
whole blocks, and splits tensors over one axis of the mesh, data over the other. Replicated moments do not
fit next to the activations, hence shard=optimizer.
"""

_COMMON = {
    "meshes": "4x1x8 2x2x8 1x4x8",
    "algorithms": "megatron collective meshslice",
    "batch": "128",
    "seq": "1024",
    "accumulate": "32",
    "remat": "full",
    "shard": "optimizer",
}
PRESETS = {
    "v2": {"models": "seed_2_8b", "target": "v2-32", **_COMMON},
    "v3": {"models": "seed_6_9b", "target": "v3-32", **_COMMON},
}
# bench=peers: whom it times, and the models that others have timed.
PEERS: tuple[str, ...] = ("mstrain", "flax", "torch", "transformers")
PEER_MODELS = "gpt3_1_3b gpt2 llama_1_1b"
# Model, FLOP/s of the whole TPU slice and MFU, as published.
PUBLISHED = {"v2": ("seed_2_8b", 454e12, 0.63), "v3": ("seed_6_9b", 867e12, 0.44)}


def preset_arguments(name: str) -> dict[str, str]:
    """The keys and values of a preset; raises ValueError, with all presets, for an unknown name."""
    if name not in PRESETS:
        raise ValueError(f"Unknown preset {name!r}. Type preset={' or preset='.join(PRESETS)}.")
    return PRESETS[name]
