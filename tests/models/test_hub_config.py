"""Architectures that a config.json of a Hugging Face folder describes, without a folder."""

import dataclasses

import numpy as np
import pytest

from mstrain.models.hub.config import config_of, model_of


def test_a_window_on_every_nth_layer_and_scaling_in_either_spelling():
    """Of Gemma 3; another family's keys of the same names have no effect in transformers."""
    sizes = dict(hidden_size=32, num_hidden_layers=4, vocab_size=61, sliding_window=4)
    for every, windows in ((3, "LLGL"), (1, "GGGG")):
        _, model = model_of(sizes | {"model_type": "gemma3_text", "sliding_window_pattern": every}, "x")
        assert "".join("L" if local else "G" for local in model.is_local) == windows
    assert model_of(sizes | {"model_type": "gemma2", "sliding_window_pattern": 3}, "x")[1].window_pattern == "LG"
    old = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rope_theta": 500.0}
    new = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}}}
    one, other = (model_of(sizes | {"model_type": "gemma3_text"} | keys, "x")[1] for keys in (old, new))
    with pytest.raises(ValueError, match="rope_type=linear is not supported for phi3"):
        model_of(sizes | {"model_type": "phi3", "num_attention_heads": 8} | old, "x")
    with pytest.raises(ValueError, match="type=linear is ambiguous"):
        model_of(sizes | {"model_type": "gemma3_text", "rope_scaling": {"type": "linear", "factor": 8.0}}, "x")
    assert one == other and (one.rotary_scaling, one.rotary_base, one.local_rotary_base) == ("linear:8", 500.0, 1e4)


def test_windows_of_qwen3_moe_are_on_all_layers_if_asked_for():
    sizes = dict(model_type="qwen3_moe", hidden_size=32, num_hidden_layers=4, num_attention_heads=8, vocab_size=61)
    family, model = model_of(sizes | dict(use_sliding_window=True, sliding_window=4), "x")
    assert model.window == 4 and all(model.is_local) and config_of(model, family)["use_sliding_window"]
    assert config_of(dataclasses.replace(model, window_pattern="LG"), family) is None
    assert model_of(sizes | dict(sliding_window=4, max_window_layers=48), "x")[1].window is None
    with pytest.raises(ValueError, match="max_window_layers=2 is not supported"):
        model_of(sizes | dict(use_sliding_window=True, sliding_window=4, max_window_layers=2), "x")


def test_keys_of_deepseek_mean_what_transformers_takes_them_for():
    sizes = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, vocab_size=61)
    scaling = dict(rope_type="linear", factor=2.0, mscale_all_dim=1.0)
    model = model_of(sizes | dict(model_type="deepseek_v3", rope_parameters=scaling), "x")[1]
    assert model.attention_scale == pytest.approx(192**-0.5 * (0.1 * np.log(2) + 1) ** 2)
    with pytest.raises(ValueError, match="rope_interleave=False is not supported for deepseek_v2"):
        model_of(sizes | dict(model_type="deepseek_v2", num_experts_per_tok=2, rope_interleave=False), "x")


def test_rope_parameters_that_are_null_are_those_of_the_family():
    sizes = dict(model_type="gpt_oss", hidden_size=32, num_hidden_layers=4, num_attention_heads=8, vocab_size=61)
    sizes |= dict(num_local_experts=4, intermediate_size=48)
    assert model_of(sizes | {"rope_parameters": None}, "x")[1] == model_of(sizes, "x")[1]
    assert model_of(sizes | {"rope_parameters": {}}, "x")[1].rotary_scaling is None


SCALED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("model_type, changes, message", [
    ("llama", {"rope_scaling": {"type": ["linear"]}}, "rope_type=.* is not supported"),
    ("llama", {"rope_scaling": SCALED | {"original_max_position_embeddings": 0}}, "two values|yarn:4:32:1:0"),
    ("gemma3_text", {"rope_parameters": {"full_attention": [1]}}, "full_attention=.* is not of type dict"),
    ("gemma3_text", {"rope_parameters": {"sliding_attention": {"rope_theta": "a"}, "full_attention": {}}},
     "rope_theta='a' is not a number"),
    ("deepseek_v3", {"routed_scaling_factor": None}, "routed_scaling_factor is missing"),
    ("deepseek_v3", {"topk_group": None}, "topk_group is missing"),
    ("deepseek_v2", {"topk_method": "noaux_tc", "num_experts_per_tok": 2}, "topk_method=noaux_tc is not supported"),
])  # fmt: skip
def test_a_value_without_meaning_is_refused_by_its_name(model_type, changes, message):
    sizes = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8, vocab_size=61)
    with pytest.raises(ValueError, match=message):
        model_of(sizes | {"model_type": model_type, "intermediate_size": 48} | changes, "x")


def test_deepseek_without_shared_experts_or_with_a_scaling_of_one():
    sizes = dict(model_type="deepseek_v3", hidden_size=32, num_hidden_layers=4, num_attention_heads=8, vocab_size=61)
    sizes |= dict(num_key_value_heads=8, rope_scaling=SCALED | dict(mscale_all_dim=1.0))
    family, model = model_of(sizes | {"n_shared_experts": None}, "x")
    assert model.shared_experts == 0
    assert config_of(dataclasses.replace(model, rotary_scaling="yarn:1:32:1:16:1.2"), family) is None
