"""Presets against published totals, to the last parameter; and what a wrong name or a wrong file is told.

A preset whose total is right to the last digit has its layers, widths, key-value heads, vocabulary, biases
and tying right. What no total shows (heads that share a width, constants) is held to published configurations.
"""

import dataclasses
import io

import jax
import pytest
from rich.console import Console

from mstrain.models import zoo
from mstrain.models.config import ModelConfig
from mstrain.models.size import count_parameters
from mstrain.models.zoo import load_preset, preset_names, zoo_table

EXACT = {  # totals of the published weights
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama_1_1b": 1_100_048_384,
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma2_27b": 27_227_128_320,
    "mixtral_8x7b": 46_702_792_704,
    "mixtral_8x22b": 140_620_634_112,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
    "olmoe_7b": 6_919_161_856,
    "gpt_oss_20b": 20_914_757_184,
    "gpt_oss_120b": 116_829_156_672,
    "deepseek_v2_lite": 15_706_484_224,
    "deepseek_v3": 671_026_404_352,
}
PRINTED = {  # totals as papers print them, and how far the print may be from the truth
    "gpt3_125m": (125e6, 0.5e6),
    "gpt3_350m": (350e6, 6e6),  # 356 million; the paper rounds down
    "gpt3_760m": (760e6, 0.5e6),
    "gpt3_1_3b": (1.3e9, 0.05e9),
    "gpt3_2_7b": (2.7e9, 0.05e9),
    "gpt3_6_7b": (6.7e9, 0.05e9),
    "gpt3_13b": (13.0e9, 0.15e9),  # 12.85 billion at width 5120; the paper prints 5140, which makes 12.95
    "gpt3_175b": (175e9, 0.5e9),
    "megatron_nlg_530b": (530e9, 0.5e9),
    "seed_160m": (0.16e9, 0.005e9),
    "seed_2_8b": (2.83e9, 0.005e9),
    "seed_6_9b": (6.86e9, 0.006e9),  # 6.855 billion
}
HEADS = {  # heads and their width, as published
    "gpt2": (12, 64), "gpt2_medium": (16, 64), "gpt2_large": (20, 64), "gpt2_xl": (25, 64),
    "gpt3_125m": (12, 64), "gpt3_350m": (16, 64), "gpt3_760m": (16, 96), "gpt3_1_3b": (16, 128),
    "gpt3_2_7b": (32, 80), "gpt3_6_7b": (32, 128), "gpt3_13b": (40, 128), "gpt3_175b": (96, 128),
    "megatron_nlg_530b": (128, 160), "seed_160m": (12, 64), "seed_2_8b": (16, 256), "seed_6_9b": (16, 256),
    "llama2_7b": (32, 128), "llama2_13b": (40, 128), "llama2_70b": (64, 128),
    "llama3_8b": (32, 128), "llama3_70b": (64, 128), "llama3_405b": (128, 128),
    "qwen3_0_6b": (16, 128), "qwen3_1_7b": (16, 128), "qwen3_4b": (32, 128),
    "qwen3_8b": (32, 128), "qwen3_14b": (40, 128), "qwen3_32b": (64, 128),
    "gemma2_2b": (8, 256), "gemma2_9b": (16, 256), "gemma2_27b": (32, 128),
    "mixtral_8x7b": (32, 128), "mixtral_8x22b": (48, 128), "qwen3_30b_a3b": (32, 128), "qwen3_235b_a22b": (64, 128),
    "olmoe_7b": (16, 128), "gpt_oss_20b": (64, 64), "gpt_oss_120b": (64, 64),
    "deepseek_v2_lite": (16, 192), "deepseek_v3": (128, 192),
}  # fmt: skip
# norm, position, activation; epsilon, context, rotary base, window; qk norm, post norm, parallel block
CHOICES = {
    "gpt2": ("layernorm", "learned", "gelu_tanh", 1e-5, 1024, None, None, False, False, False),
    "gpt3": ("layernorm", "learned", "gelu_tanh", 1e-5, 2048, None, None, False, False, False),
    "megatron": ("layernorm", "learned", "gelu_tanh", 1e-5, 2048, None, None, False, False, False),
    "seed": ("layernorm", "alibi", "gelu_tanh", 1e-6, 1024, None, None, False, False, True),
    "llama2": ("rmsnorm", "rotary", "silu", 1e-5, 4096, 1e4, None, False, False, False),
    "llama3": ("rmsnorm", "rotary", "silu", 1e-5, 8192, 5e5, None, False, False, False),
    "qwen3": ("rmsnorm", "rotary", "silu", 1e-6, 32768, 1e6, None, True, False, False),
    "gemma2": ("rmsnorm", "rotary", "gelu_tanh", 1e-6, 8192, 1e4, 4096, False, True, False),
    "mixtral_8x7b": ("rmsnorm", "rotary", "silu", 1e-5, 32768, 1e6, None, False, False, False),
    "mixtral_8x22b": ("rmsnorm", "rotary", "silu", 1e-5, 65536, 1e6, None, False, False, False),
    "olmoe": ("rmsnorm", "rotary", "silu", 1e-5, 4096, 1e4, None, True, False, False),
    "deepseek": ("rmsnorm", "rotary", "silu", 1e-6, 163840, 1e4, None, False, False, False),
    "gpt_oss": ("rmsnorm", "rotary", "clamped_swiglu", 1e-5, 131072, 1.5e5, 128, False, False, False),
}
WITHOUT_VOCABULARY = {"small", "small_moe", "tiny"}


def test_every_preset_is_held_to_a_published_total():
    assert set(preset_names()) == set(EXACT) | set(PRINTED) | WITHOUT_VOCABULARY


@pytest.mark.parametrize("name", EXACT)
def test_exact_total(name):
    assert count_parameters(load_preset(name)) == EXACT[name]


@pytest.mark.parametrize("name", PRINTED)
def test_printed_total(name):
    total, rounding = PRINTED[name]
    assert count_parameters(load_preset(name)) == pytest.approx(total, abs=rounding)


@pytest.mark.parametrize("name", [n for n in PRINTED if n.startswith(("gpt3", "megatron"))])
def test_printed_totals_follow_the_closed_form_of_gpt(name):
    """12 L D^2 weights and 13 L D norms and biases in blocks, two tables, and the last norm."""
    m = load_preset(name)
    blocks = m.layers * (12 * m.width**2 + 13 * m.width)
    assert count_parameters(m) == blocks + (m.vocab_size + m.context) * m.width + 2 * m.width


@pytest.mark.parametrize("name", HEADS)
def test_heads_and_their_width(name):
    model = load_preset(name)
    assert (model.heads, model.head_dim) == HEADS[name]


@pytest.mark.parametrize("prefix", CHOICES)
def test_choices_that_no_total_shows(prefix):
    for name in preset_names():
        if name.startswith(prefix):
            m = load_preset(name)
            rotary_base = m.rotary_base if m.position == "rotary" else None
            numbers = (m.norm_epsilon, m.context, rotary_base, m.window)
            flags = (m.qk_norm, m.post_norm, m.parallel_block)
            assert (m.norm, m.position, m.activation, *numbers, *flags) == CHOICES[prefix], name


def test_gemma_scales_its_scores_by_the_head_width_but_for_the_largest():
    scales = {size: load_preset(f"gemma2_{size}").attention_scale for size in ("2b", "9b", "27b")}
    assert scales == {"2b": None, "9b": None, "27b": pytest.approx(144**-0.5)}


def test_counting_allocates_nothing():
    """530 billion parameters would not fit."""
    fresh = dataclasses.replace(load_preset("megatron_nlg_530b"), name="not counted before")
    before = sum(array.nbytes for array in jax.live_arrays())
    assert count_parameters(fresh) > 5e11
    assert sum(array.nbytes for array in jax.live_arrays()) == before


@pytest.mark.parametrize("name", preset_names())
def test_preset_states_where_its_sizes_come_from(name):
    assert (zoo.PRESETS / f"{name}.yaml").read_text().startswith("# ")


def test_presets_of_our_own_take_the_vocabulary_of_the_tokenizer():
    for name in WITHOUT_VOCABULARY:
        model = load_preset(name)
        with pytest.raises(ValueError, match="Set model.vocab_size"):
            count_parameters(model)
        assert count_parameters(dataclasses.replace(model, vocab_size=256)) > 0


@pytest.mark.parametrize(
    "wrong, right", [("gpt3_175", "gpt3_175b"), ("Qwen3-0.6B", "qwen3_0_6b"), ("lama2_7b", "llama2_7b")]
)
def test_unknown_name_is_told_the_nearest(wrong, right):
    with pytest.raises(ValueError, match=f"Did you mean {right}\\?"):
        load_preset(wrong)


@pytest.mark.parametrize("wrong", ["../config", "", "zzzzzzzz"])
def test_unknown_name_far_from_all_is_told_the_choice(wrong):
    with pytest.raises(ValueError, match="Choose one of deepseek_v2_lite, .*, tiny"):
        load_preset(wrong)


@pytest.mark.parametrize(
    "text, told",
    [
        ("name: mine\nwidht: 64", "widht"),
        ("name: mine\nwidth: wide", "could not be converted"),
        ("name: yours", "Write name: mine"),
        ("name: mine\nwidth: 65", "does not divide into 8 heads"),
    ],
)
def test_wrong_file_is_named(tmp_path, monkeypatch, text, told):
    monkeypatch.setattr(zoo, "PRESETS", tmp_path)
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ValueError, match=told):
        load_preset("mine")


def test_numbers_with_exponents_are_numbers():
    """A YAML reader of its own mind would take 1e-6 for a word."""
    model = load_preset("qwen3_8b")
    assert (model.norm_epsilon, model.rotary_base) == (1e-6, 1e6)


def test_table_shows_every_preset_and_its_exact_count():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(zoo_table())
    rows = [line.split() for line in console.export_text().splitlines()]
    lines = {row[0]: row for row in rows if row and row[0] in preset_names()}
    assert set(lines) == set(preset_names())
    for name, total in EXACT.items():
        assert lines[name][-1] == f"{total:,}"
    assert "64/8" in lines["llama2_70b"]
    assert "256*" in lines["small"]


@pytest.mark.parametrize(
    "fields, told",
    [
        (dict(norm="batchnorm"), "layernorm, rmsnorm"),
        (dict(width=65), "divisor"),
        (dict(heads=8, num_kv_heads=3), r"\[1, 2, 4, 8\]"),
        (dict(head_dim=7, position="rotary"), "even"),
        (dict(layers=0), "at least 1"),
    ],
)
def test_impossible_model_is_told_what_to_type(fields, told):
    with pytest.raises(ValueError, match=told):
        ModelConfig(**fields)
