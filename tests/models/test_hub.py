"""Hugging Face folders: parity of imported models, round trips, and damaged folders."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mstrain.commands import evaluate, export, sample, train
from mstrain.commands.train import load_config
from mstrain.data.tokenizers import ByteTokenizer
from mstrain.models.hub.config import config_of, differing_fields, family_for
from mstrain.models.hub.families import FAMILIES, NEUTRAL
from mstrain.models.hub.folder import Folder
from mstrain.models.hub.tensors import parameters_of
from mstrain.models.hub.tokenizer import byte_tokenizer
from mstrain.models.hub.write import new_folder
from mstrain.models.zoo import load_preset
from tests.models.hub_models import CONFIGS, save
from tests.models.hub_parity import measure


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of every family, written by transformers."""
    place = tmp_path_factory.mktemp("hub")
    for name in CONFIGS:
        save(name, place / name)
    return place


# The whole table is `python -m tests.models.hub_parity`.
@pytest.mark.parametrize("name, mesh, algorithm", [
    ("gpt_oss", "2x4", "meshslice"), ("deepseek_v3", "4x2", "megatron"), ("gpt2", "1x1", "megatron"),
    ("gemma2", "1x1", "megatron"),
])  # fmt: skip
def test_an_imported_model_computes_what_transformers_computes(name, mesh, algorithm):
    found = measure(name, mesh, algorithm)
    assert found.logits < 1e-4 and found.gradients < 1e-3 and found.tokens and found.identical, found


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tables_of_a_family_fit_its_folder_in_both_directions(name, folders):
    """Every tensor is known with its shape, and config.json survives a round trip through ours and transformers."""
    folder = Folder(folders / name)
    folder.check()
    written = config_of(folder.model, folder.family)
    assert written is not None
    loaded = transformers.AutoConfig.for_model(**written, pad_token_id=None).to_dict()
    for document in (written, json.loads(json.dumps(loaded))):
        (folders / "again").mkdir(exist_ok=True)
        (folders / "again" / "config.json").write_text(json.dumps(document))
        again = Folder(folders / "again")
        assert again.family == folder.family and not differing_fields(again.model, folder.model)


@pytest.mark.parametrize("name", ["small", "gpt2_xl", "gpt3_175b", "llama2_70b", "qwen3_4b", "gemma2_27b"])
def test_presets_have_an_architecture_of_transformers(name):
    family, config = family_for(load_preset(name).resized(vocab_size=512))
    assert family.model_type in FAMILIES and config["vocab_size"] == 512
    with pytest.raises(ValueError, match="alibi"):
        family_for(load_preset("seed_160m"))


def test_the_byte_tokenizer_is_a_tokenizer_json():
    text = "naïve 日本 \x00\n\tdef f(): ..."
    inner = byte_tokenizer(ByteTokenizer.eod)
    assert inner.encode(text).ids == ByteTokenizer().encode(text).tolist()
    assert inner.decode(inner.encode(text).ids) == text
    assert inner.get_vocab_size() == 256 and inner.token_to_id("<|endoftext|>") == 255


def test_an_exported_folder_loads_in_transformers_without_options(folders, tmp_path):
    out = tmp_path / "out"
    assert export.main([f"init={folders / 'qwen2'}", f"out={out}", "shard_gb=0.00003"]) == 0
    assert len(list(out.glob("*.safetensors"))) > 1 and [path.name for path in tmp_path.iterdir()] == ["out"]
    given, back = (
        transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (folders / "qwen2", out)
    )
    assert given.keys() == back.keys() and all(given[name].equal(back[name]) for name in given)


def test_what_a_killed_export_left_is_removed_by_the_next_one(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left, running = (tmp_path / f".out.tmp-{socket.gethostname()}-{pid}" for pid in (ended.pid, os.getppid()))
    for folder in (left, running):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    with new_folder(tmp_path / "out", leads=True):
        assert running.is_dir() and not left.exists()


@pytest.mark.parametrize("wrapper", ["language_model.", "model.language_model."])
def test_the_language_model_of_a_model_with_a_vision_tower(wrapper, folders, tmp_path):
    folder = shutil.copytree(folders / "gemma3", tmp_path / "vision")
    inner = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": inner}))

    def wrap(tensors):
        for name in list(tensors):
            tensors[wrapper + name.removeprefix("model." if wrapper.startswith("model.") else "")] = tensors.pop(name)
        tensors[wrapper.replace("language_model", "vision_tower") + "weight"] = np.zeros(3, np.float32)

    _retensor(folder, wrap)
    Folder(folder).check()
    assert Folder(folder).model.resized(name="gemma3") == Folder(folders / "gemma3").model


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _retensor(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def _in_float8(folder, name, block, counts=None):
    """Stores a kernel in float8 with random scales, or `counts` of them; returns (values, scales) as float32."""
    draw, made = np.random.default_rng(0), []
    _edit(folder, quantization_config={"quant_method": "fp8", "weight_block_size": list(block)})

    def change(tensors):
        shape = tensors[name].shape
        values = draw.normal(0, 9, shape).astype(ml_dtypes.float8_e4m3fn)
        counts_of = counts or [-(-n // size) for n, size in zip(shape, block, strict=True)]
        scales = draw.normal(1, 1, counts_of).astype(np.float32)
        tensors |= {name: values, f"{name}_scale_inv": scales}
        made.extend((values.astype(np.float32), scales))

    _retensor(folder, change)
    return made


def _truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])


def _lose_a_shard(folder):
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    weights = {"model.norm.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


def _repeat_in_another_shard(folder):
    tensors, places = load_file(folder / "model.safetensors"), {}
    for number in (1, 2):
        save_file(tensors, folder / f"{number}.safetensors")
        places |= dict.fromkeys(tensors, f"{number}.safetensors")
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {**places, "lm_head.weight": "1.safetensors"}})
    )


def _point_outside(folder):
    (folder / "model.safetensors").rename(folder / "w")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "../w"}}')


LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
DOWN = "model.layers.1.mlp.down_proj.weight"
DAMAGE = {
    "truncated": (_truncate, "model.safetensors is truncated"),
    "shard": (_lose_a_shard, "model-00002-of-00002.safetensors is missing"),
    "pickled": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "save_pretrained"),
    "index": (_point_outside, "../w is not the name of a file"),
    "twice": (_repeat_in_another_shard, "2.safetensors: tensor lm_head.weight is in 1.safetensors, too"),
    "null": (lambda f: _edit(f, rms_norm_eps=None), "rms_norm_eps is missing"),
    "not a number": (lambda f: _edit(f, rms_norm_eps=float("nan")), "rms_norm_eps=nan is not a number"),
    "depth": (lambda f: _edit(f, num_hidden_layers=10**9), "describes 1000000000 layers"),
    "adapter": (lambda f: (f / "adapter_config.json").write_text("{}"), "merge_and_unload"),
    "architecture": (lambda f: _edit(f, model_type="mamba"), "model_type=mamba"),
    "vocabulary": (lambda f: _edit(f, vocab_size=60), "model.embed_tokens.weight has shape [61, 32]"),
    "shape": (lambda f: _edit(f, intermediate_size=40), "mlp.down_proj.weight has shape [32, 48]"),
    "missing": (lambda f: _retensor(f, lambda t: t.pop("model.norm.weight")), "model.norm.weight is missing"),
    "extra": (lambda f: _retensor(f, lambda t: t.update(odd=np.zeros(3, np.float32))), "odd is not part of a llama"),
    "dtype": (lambda f: _retensor(f, lambda t: t.update({"model.norm.weight": np.zeros(32, np.int8)})), "dtype I8"),
    "rope": (lambda f: _edit(f, rope_parameters={"rope_type": "longrope"}), "rope_type=longrope"),
    "activation": (lambda f: _edit(f, hidden_act="xielu"), "hidden_act=xielu"),
    "type": (lambda f: _edit(f, num_hidden_layers="4"), "num_hidden_layers='4'"),
    "quantized": (lambda f: _edit(f, quantization_config={"bits": 4}), "quantization_config"),
    "fp8": (lambda f: _edit(f, quantization_config={"quant_method": "fp8"}), "Convert them to bf16 first"),
    "scales": (lambda f: _in_float8(f, DOWN, (16, 16), (2, 2)), "blocks of [16, 16] in [32, 48] need [2, 3]"),
    "json": (lambda f: (f / "config.json").write_text("{"), "config.json: line 1"),
    "tied": (lambda f: _edit(f, tie_word_embeddings=True), "lm_head.weight is not part"),
    "layers": (lambda f: _edit(f, per_layer_config={"1": {"hidden_act": "relu"}}), "per_layer_config="),
    "mask": (lambda f: _edit(f, is_causal=False), "is_causal=False"),
    "soft cap": (lambda f: _edit(f, final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
    "multiplier": (lambda f: _edit(f, logits_scaling=8.0), "logits_scaling=8.0"),
    "windows": (lambda f: _edit(f, layer_types=["sliding_attention"] * 4), "layer_types is not supported for llama"),
    "epsilon": (lambda f: _edit(f, rms_norm_eps=None), "rms_norm_eps is missing"),
    "rotated": (lambda f: _edit(f, partial_rotary_factor=0.0), "partial_rotary_factor=0"),
    "ropes": (lambda f: _edit(f, rope_parameters={"full_attention": {}}), "of each layer type are not supported"),
    "padding": (lambda f: _edit(f, pad_token_id=61), "pad_token_id=61 is not one of the 61 tokens"),
    "negative": (lambda f: _edit(f, rms_norm_eps=-1e-6), "rms_norm_eps=-1e-06 is negative"),
    "base": (lambda f: _edit(f, rope_parameters={"rope_theta": 0.0}), "rope_theta=0 must be above 0"),
    "lengths": (lambda f: _edit(f, rope_parameters=LLAMA3, original_max_position_embeddings=8), "two values, 32 and 8"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_named(damage, folders, tmp_path):
    folder = shutil.copytree(folders / "llama2", tmp_path / "copy")
    spoil, message = DAMAGE[damage]
    spoil(folder)
    with pytest.raises(ValueError) as error:
        Folder(folder).check()
    assert message in str(error.value) and str(folder) in str(error.value)


def test_weights_of_four_bits_are_read_as_transformers_reads_them(folders, tmp_path):
    folder, draw = shutil.copytree(folders / "gpt_oss", tmp_path / "copy"), np.random.default_rng(0)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks = draw.integers(0, 256, (8, 96, 1, 16), np.uint8)
    scales = draw.integers(120, 131, (8, 96, 1), np.uint8)
    _retensor(folder, lambda t: (t.pop(name), t.update({f"{name}_blocks": blocks, f"{name}_scales": scales})))
    alone = shutil.copytree(folder, tmp_path / "alone")
    _retensor(alone, lambda tensors: tensors.pop(f"{name}_scales"))
    with pytest.raises(ValueError, match="gate_up_proj is missing"):
        Folder(alone).check()
    _edit(folder, quantization_config={"quant_method": "mxfp4"})
    read = Folder(folder)
    read.check()
    want = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    assert len(np.unique(want)) > 50 and "quantization_config" not in read.config
    (parameter,) = [p for p in parameters_of(read.model, read.family) if p.path == ("blocks_0", "mlp", "up", "kernel")]
    for index in ((slice(0, 8), slice(0, 32), slice(0, 96)), (slice(1, 3), slice(5, 20), slice(40, 70))):
        found = read._read(parameter.layers[1], parameter.shape, index)
        np.testing.assert_array_equal(found, np.concatenate([want[..., ::2], want[..., 1::2]], -1)[index])


def test_weights_of_float8_are_multiplied_by_the_scales_of_their_blocks(folders, tmp_path):
    """The last blocks are smaller, one is read in parts, and an export has the dtype of the rest."""
    folder = shutil.copytree(folders / "deepseek_v3", tmp_path / "copy")
    values, scales = _in_float8(folder, DOWN, (12, 20))
    want = (values * np.kron(scales, np.ones((12, 20), np.float32))[:32, :48]).T
    read = Folder(folder)
    read.check()
    assert read.dtype_of(DOWN) == "bfloat16" and "quantization_config" not in read.config
    (parameter,) = [p for p in parameters_of(read.model, read.family) if p.path == ("dense_0", "mlp", "down", "kernel")]
    for index in ((slice(0, 48), slice(0, 32)), (slice(17, 41), slice(11, 13))):
        np.testing.assert_array_equal(read._read(parameter.layers[1], parameter.shape, index), want[index])


def test_layers_that_predict_further_tokens_are_read_if_asked_for(folders, tmp_path):
    folder = shutil.copytree(folders / "deepseek_v3", tmp_path / "copy")
    plain, further = Folder(folder), Folder(folder, 1)
    plain.check()
    further.check()
    names = {part.name for p in parameters_of(further.model, further.family) for layer in p.layers for part in layer}
    assert names == load_file(folder / "model.safetensors").keys() and further.left_out is None
    count = sum(name.startswith("model.layers.4.") for name in names)
    assert plain.left_out == (
        f"{count} tensors of multi-token prediction layers are left out; model.mtp_layers=1 reads them."
    )
    with pytest.raises(ValueError, match="has 1 multi-token prediction layers. Type model.mtp_layers=1"):
        Folder(folder, 2)
    with pytest.raises(ValueError, match="Type model.mtp_layers=0"):
        Folder(folders / "llama2", 1)
    _retensor(folder, lambda tensors: tensors.pop("model.layers.4.eh_proj.weight"))
    with pytest.raises(ValueError, match="eh_proj.weight is missing"):
        further.check()


@pytest.mark.parametrize("words, message", [
    (["init=/nowhere"], "is not a folder"),
    (["init=FOLDER", "model=tiny"], "model.width: 64 typed, 32 in the folder"),
    (["init=FOLDER", "model.heads=4"], "model.heads: 4 typed, 8 in the folder"),
    (["init=FOLDER"], "has no tokenizer.json"),
    (["init=FOLDER", "init_from=runs/a", "tokenizer=bytes"], "init_from="),
])  # fmt: skip
def test_a_mistake_is_found_before_devices_start(words, message, folders):
    with pytest.raises(ValueError, match=message):
        load_config([word.replace("FOLDER", str(folders / "llama2")) for word in words])


def test_keys_of_the_model_may_repeat_the_folder(folders):
    words = [f"init={folders / 'llama2'}", "tokenizer=bytes", "model.layers=4", "model.rotary_base=1e4"]
    assert load_config(words).model == Folder(folders / "llama2").model


# Fields of transformers' configurations that do not change what a model computes, or that _windows and _rotary read.
OTHERS = set(
    "attention_dropout attn_pdrop bos_token_id embd_pdrop embedding_dropout eos_token_id initializer_range layer_types "
    "max_window_layers original_max_position_embeddings output_router_logits pad_token_id pretraining_tp "
    "reorder_and_upcast_attn router_aux_loss_coef "
    "resid_pdrop residual_dropout rope_parameters sliding_window summary_activation summary_first_dropout "
    "summary_proj_to_labels summary_type summary_use_proj use_cache use_sliding_window".split()
)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.model_type)
def test_every_key_of_a_family_is_read_or_refused(family):
    own = transformers.AutoConfig.for_model(family.model_type)
    fields = {field.name for field in dataclasses.fields(own)}
    fields -= {field.name for field in dataclasses.fields(transformers.PretrainedConfig)} | family.aliases.keys()
    fields -= {"intermediate_size"} if family.model_type == "qwen3_moe" else set()  # of layers without experts
    fields -= {"head_dim"} if family.latent else set()  # set to qk_rope_head_dim, whatever config.json says
    assert not fields - family.read - NEUTRAL.keys() - family.required.keys() - OTHERS


def test_a_tokenizer_that_does_not_fit_is_refused_and_nothing_is_written(folders, tmp_path):
    words = [f"init={folders / 'llama2'}", "tokenizer=bytes", "data=text", f"data.path={__file__}"]
    with pytest.raises(ValueError, match="has 256 tokens, and the model .* has 61"):
        train.main([*words, "mesh=1x1", f"run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path / 'cache'}"])
    with pytest.raises(ValueError, match="has 256 tokens"):
        evaluate.main([*words, "mesh=1x1", f"data.cache_dir={tmp_path / 'cache'}"])
    with pytest.raises(ValueError, match="exists"):
        export.main([f"init={folders / 'llama2'}", f"out={tmp_path}"])
    assert not list(tmp_path.iterdir())


def test_a_sample_on_stages_is_refused_before_devices_start(folders):
    words = [f"init={folders / 'llama2'}", "tokenizer=bytes", "mesh=stage2-row1-col2"]
    with pytest.raises(ValueError, match="mesh=stage2-row1-col2: sample does not use stages. Type a mesh= without"):
        sample.main(words)


def test_an_export_that_cannot_be_written_leaves_nothing(folders, tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("no space left on device")

    monkeypatch.setattr("mstrain.models.hub.write.save_file", full)
    words = [f"init={folders / 'llama2'}", f"out={tmp_path / 'a' / 'out'}"]
    with pytest.raises(ValueError, match="no space left"):
        export.main(words)
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="and its disk has 1,000 left"):
        export.main(words)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is not a folder"):
        export.main([words[0], f"out={tmp_path / 'file' / 'out'}"])


def test_weights_that_a_dtype_cannot_hold_are_not_exported(folders, tmp_path):
    shutil.copytree(folders / "llama2", tmp_path / "in")
    file = next((tmp_path / "in").glob("*.safetensors"))
    tensors, name = load_file(file), "model.norm.weight"
    save_file(tensors | {name: tensors[name] * np.float32(1e5)}, file, metadata={"format": "pt"})
    words = [f"init={tmp_path / 'in'}", f"out={tmp_path / 'out'}"]
    with pytest.raises(ValueError, match=f"{name} has values that are not finite as float16. Type dtype=f32"):
        export.main([*words, "dtype=f16"])
    assert not (tmp_path / "out").exists()
    assert export.main([*words, "dtype=bf16"]) == 0


def test_the_exit_code_of_a_mistake_is_2(tmp_path):
    done = subprocess.run([sys.executable, "-m", "mstrain", "train", "init=/nowhere"], capture_output=True, text=True)
    assert done.returncode == 2 and "init=/nowhere" in done.stderr and "Traceback" not in done.stderr
