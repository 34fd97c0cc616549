"""Every mistake in a configuration is one message with its fix and exit code 2; nothing is written."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from mstrain.__main__ import main as module_main
from mstrain.benchmarks.config import load as load_benchmark
from mstrain.cli import Command, build, known_keys, run_command
from mstrain.cli.compose import CONF
from mstrain.commands import COMMANDS, command_named
from mstrain.commands.train import COMMAND, load_config
from mstrain.gemm import ALGORITHMS
from mstrain.mesh import parse_mesh
from mstrain.models.parallel import ParallelConfig, layer_algorithms, parse_slices
from mstrain.training import answers
from mstrain.training.config import RunConfig
from tests.typed import SMALL, exit_code

# Arguments, and words that the message must contain: what is wrong and what to type instead.
MISTAKES = {
    "unknown key": (["modle=tiny"], ["'modle'", "Did you mean model?"]),
    "misspelt nested key": (["parallel.slcies=2"], ["Did you mean parallel.slices?"]),
    "whole group": (["optimizer={}"], ["'optimizer'", "optimizer."]),
    "no value": (["batch"], ["'batch'", "key=value"]),
    "given twice": (["seed=1", "seed=2"], ["seed is given twice"]),
    "misspelt model": (["model=tinny"], ["Did you mean model=tiny?"]),
    "misspelt algorithm": (["parallel=meshslise"], ["Did you mean parallel=meshslice?"]),
    "misspelt half": (["parallel.attention=megatrn"], ["Did you mean megatron?"]),
    "misspelt corpus": (["data=stdlb"], ["Did you mean data=stdlib?"]),
    "misspelt dtype": (["dtype=b16"], ["Did you mean dtype=bf16?"]),
    "misspelt remat": (["remat=ful"], ["Did you mean remat=full?"]),
    "misspelt position": (["model.position=learnd"], ["learned, rotary, alibi, none"]),
    "misspelt dataflow": (["parallel.dataflow=is"], ["auto, os, ls or rs"]),
    "text for a number": (["batch=many"], ["batch='many'", "whole number"]),
    "fraction": (["steps=1.5"], ["steps=1.5", "whole number"]),
    "true for a number": (["seed=true"], ["seed=True", "whole number"]),
    "null": (["seq=null"], ["seq=None", "whole number"]),
    "list": (["model.layers=[1]"], ["model.layers=[1]", "whole number"]),
    "unreadable": (["run_dir='a"], ["Cannot read the command line", "run_dir='a"]),
    "added": (["++steps=3"], ["every key has a default", "Type steps=3"]),
    "removed": (["~data"], ["cannot be removed", "Type data=VALUE"]),
    "interpolation": (["tokenizer=${nothing}"], ["nothing"]),
    "seed too large": (["seed=9223372036854775808"], ["too large", "Type a seed below 2**63"]),
    "epsilon below 0": (["model.norm_epsilon=-1"], ["model.norm_epsilon=-1.0 must be above 0."]),
    "cap of 0": (["model.logit_soft_cap=0"], ["model.logit_soft_cap=0.0", "Type model.logit_soft_cap=null for none"]),
    "window of 0": (["model.window=0"], ["model.window=0", "Type model.window=null for none"]),
    "rotary without rotary": (["model.rotary_base=5000"], ["has no effect", "type model.position=rotary"]),
    "pattern without a window": (["model.window_pattern=LLG"], ["has no effect", "type model.window=N"]),
    "prompt without a sample": (["sample.tokens=0", "sample.prompt=x"], ["prompt=x has no effect", "tokens=100"]),
    "sample of no text": (["sample.tokens=9"], ["sample.tokens=9 has no effect", "type data="]),
    "sample of stages": (["data=stdlib", "mesh=stage2-row1-col2", "sample.tokens=9"], ["mesh= without stages"]),
    "no rollbacks": (["guard.max_rollbacks=5"], ["has no effect", "guard.rollback=true"]),
    "sums of one microbatch": (["optimizer.gradients=bf16"], ["=bf16 has no effect", "type accumulate=2"]),
    "travel on one device": (["travel=int8", "mesh=4x1x1"], ["travel=int8 has no effect", "mesh=2x2"]),
    "replicas of one device": (["check_replicas.every=5", "mesh=1x1"], ["check_replicas.every=5 has no effect"]),
    "halves of no layer": (["parallel.mlp=wang", "parallel.layers=0-:mlp:fsdp"], ["parallel.mlp=wang has no effect"]),
    "bias of an rmsnorm": (["model.norm=rmsnorm", "model.norm_bias=true"], ["has no effect", "model.norm=layernorm"]),
    "axis that is none": (["mesh=model4-row2"], ["'model4-row2'", "replica, stage, data, expert, context, row, col"]),
    "too small": (["steps=0"], ["Type steps=1 or more"]),
    "negative rate": (["optimizer.learning_rate=-1"], ["optimizer.learning_rate=-1.0", "above 0"]),
    "empty run_dir": (["run_dir="], ["run_dir is empty", "Type run_dir="]),
    "mesh": (["mesh=2by4"], ["'2by4'", "mesh=2x4"]),
    "mesh of nothing": (["mesh=0x4"], ["'0x4'", "mesh=2x4"]),
    "mesh too large": (["mesh=8x16"], ["128 devices and 16 are present", "Type mesh=row4-col4"]),
    "mesh leaves devices idle": (["mesh=3x3"], ["9 of 16 devices", "Type mesh=row4-col4"]),
    "experts of a dense model": (["mesh=data2-expert4-row2-col1"], ["axis expert has no effect", "Type data8 instead"]),
    "experts that do not divide": (
        ["mesh=expert4-row2-col1", "model.experts=6", "model.bias=none"],
        ["model.experts=6 do not divide into 4", "a size out of [2, 3, 6]"],
    ),
    "slices of no exchange": (
        ["mesh=2x4", "parallel.expert_slices=2"], ["parallel.expert_slices=2 has no effect", "no axis expert"],
    ),
    "slices of the exchange": (
        ["mesh=expert4-row2-col1", "model.experts=4", "model.bias=none", "parallel.expert_slices=3"],
        ["parallel.expert_slices=3 does not divide", "Type parallel.expert_slices="],
    ),
    "a factor that is none": (["model.init_scale=nan"], ["model.init_scale=nan is not a finite number"]),
    "no layer with experts": (
        ["model.experts=4", "model.bias=none", "model.dense_layers=2", "model.dense_mlp_dim=64"],
        ["model.dense_layers=2 leaves no layer with experts", "Type model.layers=3 or more"],
    ),
    "stages without layers": (["mesh=stage4-row1-col2"], ["model.layers=2", "4 stages", "up to 2 stages"]),
    "stages without microbatches": (
        ["mesh=stage2-row1-col2", "pipeline.schedule=interleaved", "model.layers=4", "accumulate=3", "batch=6"],
        ["accumulate=3", "Type accumulate=2 or accumulate=4"],
    ),
    "schedule without stages": (["mesh=2x4", "pipeline.schedule=gpipe"], ["pipeline.schedule=gpipe has no effect"]),
    "layers": (["parallel.layers=0:mlp"], ["Unknown algorithm 'mlp'", "Choose one of meshslice"]),
    "layers unreadable": (["parallel.layers=all"], ["cannot read 'all'", "parallel.layers=\"0-3:megatron"]),
    "layers outside": (["parallel.layers=1-7:fsdp"], ["'1-7:fsdp'", "outside 0-1"]),
    "heads in width": (["model.heads=5"], ["model.width=64", "Set model.heads to a divisor"]),
    "heads on columns": (["model.heads=2", "mesh=2x4"], ["model.heads=2", "4 columns", "[1, 2]"]),
    "num_kv_heads in heads": (["model.num_kv_heads=3"], ["model.num_kv_heads=3", "Choose one of [1, 2, 4, 8]"]),
    "features": (["model.mlp_dim=5", "mesh=2x4"], ["model.mlp_dim=5", "38% would be padding", "Choose another mesh="]),
    "batch on copies": (
        ["batch=5", "mesh=2x2x4", "parallel.rows=sequences"], ["5 sequences", "row2-col4", "multiple of 4"],
    ),
    "batch on rows": (
        ["batch=4", "mesh=8x2", "parallel.rows=sequences"], ["4 sequences", "row8-col2", "multiple of 8"],
    ),
    "chunks of sequences": (
        ["mesh=context4-row2-col2", "seq=20"], ["8 chunks", "Type seq=16, or axis context of size 1"],
    ),
    "exchange of whole sequences": (["mesh=4x4", "parallel.context=ring"], ["no effect", "parallel.rows=context"]),
    "rows of megatron": (["mesh=4x4", "parallel=megatron", "parallel.rows=context"], ["one row", "mesh=context2"]),
    "accumulate": (["batch=16", "accumulate=5"], ["accumulate=5", "Type accumulate=4"]),
    "square": (["parallel=cannon", "mesh=2x8"], ["square mesh", "2x8", "parallel.algorithm=collective"]),
    "slice count": (["parallel.slices=5", "mesh=2x2x4"], ["slice count 5", "Type parallel.slices=2 or 4"]),
    "slice count zero": (["parallel.slices=0"], ["'0'", "Type a whole number such as 4"]),
    "slices without meshslice": (["parallel=megatron", "parallel.slices=2"],
                                 ["no effect", "parallel=meshslice"]),
    "dataflow without choice": (["parallel=fsdp", "parallel.dataflow=ls"],
                                ["no effect on fsdp", "meshslice"]),
    "path without files": (["data=stdlib", "data.path=x"], ["no effect with data=stdlib", "data=text"]),
    "no path": (["data=text"], ["add data.path="]),
    "profile without steps": (["profile.start=3"], ["Type profile.start=10 profile.steps=3"]),
    "profile after the end": (["profile.start=9", "profile.steps=1"], ["profile.start=9", "up to 2"]),
    "sequence beyond positions": (["seq=512"], ["256 learned positions", "Type seq=256 or model.context=512"]),
    "sequence beyond corpus": (["seq=300", "model.context=300", "data.num_tokens=1024"], ["seq="]),
    "tokenizer outgrows model": (["model.vocab_size=100"], ["=100 is less than the 256", "model.vocab_size=null"]),
    "vocabulary of bytes": (["data=stdlib", "vocab_size=300"], ["=300 has no effect", "tokenizer=bpe"]),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def sixteen_devices():
    """Makes the emulated devices before a mesh asks for more of them."""
    assert jax.device_count() == 16


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("corpora")


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_message_with_its_fix(mistake, cache, tmp_path, monkeypatch, capsys):
    arguments, words = MISTAKES[mistake]
    monkeypatch.chdir(tmp_path)
    given_keys = {argument.partition("=")[0] for argument in arguments}
    usual = [*SMALL, f"data.cache_dir={cache}", f"run_dir={tmp_path / 'run'}"]
    if any(argument.startswith("data=") for argument in arguments):
        usual.remove("data.num_tokens=4096")
    usual = [argument for argument in usual if argument.partition("=")[0] not in given_keys]
    assert exit_code(COMMAND, *usual, *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("train: ") and "Traceback" not in error
    assert all(word in error for word in words), error
    assert not [*tmp_path.iterdir()]


def test_a_bug_is_a_traceback(monkeypatch):
    def broken(_):
        raise AssertionError("ours")

    with pytest.raises(AssertionError):
        run_command(Command("train", broken), [])


def test_the_defaults_are_those_on_record():
    golden = Path(__file__).parent / "golden" / "default_config.yaml"
    assert OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(load_config([])))) == golden.read_text(), (
        "A default has changed. If that is intended, put the new value into tests/golden/default_config.yaml."
    )


def test_a_written_configuration_reads_back_equal(tmp_path):
    arguments = [
        *SMALL,
        'parallel.layers="0:fsdp 1:mlp:wang"',
        "optimizer.learning_rate=1e-4",
        "mesh=2x2x4",
        "seed=7",
    ]
    config = load_config(arguments)
    path = tmp_path / "config.yaml"
    path.write_text(OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config))))
    again = build(RunConfig, OmegaConf.to_container(OmegaConf.load(path)))
    assert again == config
    assert (again.parallel.layers, again.optimizer.learning_rate, again.seed) == (
        "0:fsdp 1:mlp:wang",
        1e-4,
        7,
    )


near_misses = st.text(st.sampled_from("0123456789x-: autmlpfsdwngé²٣\t"), max_size=12)
rules = st.builds(
    lambda layers, half, algorithm: f"{layers}:{half}{algorithm}",
    st.from_regex(r"\d{1,3}(-\d{0,3})?", fullmatch=True),
    st.sampled_from(["", "mlp:", "attention:"]),
    st.sampled_from([*ALGORITHMS, "nothing"]),
)
PARSERS = [parse_mesh, parse_slices, lambda text: layer_algorithms(ParallelConfig(layers=text), 4)]


@pytest.mark.parametrize("parse", PARSERS, ids=["mesh", "slices", "layers"])
@settings(max_examples=150, deadline=None)
@given(text=st.one_of(st.text(max_size=20), near_misses, st.lists(rules, max_size=3).map(" ".join)))
def test_any_text_is_read_or_refused_with_a_reason(parse, text):
    try:
        parse(text)
    except ValueError as error:
        assert len(str(error)) > 20


@settings(max_examples=12, deadline=None)
@given(
    key=st.sampled_from(["mesh", "parallel.layers", "parallel.slices", "batch", "dtype"]),
    value=st.text(max_size=12),
)
def test_any_argument_is_read_or_refused_with_a_reason(key, value):
    try:
        load_config([*(a for a in SMALL if not a.startswith(key + "=")), f"{key}={value}"])
    except ValueError as error:
        assert str(error)


FOREIGN = {
    "lr=3e-4": "Type optimizer.learning_rate=3e-4.",
    "optimizer.lr=1": "Type optimizer.learning_rate=1.",
    "block_size=64": "Type seq=64.",
    "max_steps=5": "Type steps=5.",
    "per_device_batch_size=4": "batch=N",
    "wandb=true": "Type wandb=PROJECT",
    "report_to=wandb": "Type wandb=PROJECT",
    "resume=true": "resumed without a key",
    "steps=1e4": "Type steps=10000.",
    "mesh=2,4": "Type mesh=2x4",
    "pipeline.layers=1,1": 'Type pipeline.layers="1 1"',
    "remat=true": "Type remat=full",
    "optim=lion": "Type optimizer.name=lion.",
    "optimizer.betas=0.9": "Type optimizer.b1=",
    "lr_scheduler=cosine": "Type optimizer.schedule=cosine.",
    "zero_stage=2": "shard=gradients for ZeRO 2",
    "mixed_precision=fp16": "Type dtype=bf16",
    "dataset=c4": "data.path=FILE",
    "pp=2": "mesh=stage4-row2-col4",
    "context_parallel=2": "mesh=context2-row2-col4",
    "ep=4": "mesh=expert4-row2-col4",
    "seed=1,2": "Type -m",
}


@pytest.mark.parametrize("argument", FOREIGN)
def test_keys_and_values_of_other_frameworks_are_answered(argument):
    with pytest.raises(ValueError) as raised:
        load_config([argument])
    assert FOREIGN[argument] in str(raised.value)


@pytest.mark.parametrize("argument", ["model.qk_norm_whole=false", "model.norm_bias=false", "model.rotary_base=10000"])
def test_typed_values_without_an_effect_that_are_off_are_accepted(argument):
    assert load_config([*SMALL, "model.norm=rmsnorm", argument]).model.norm == "rmsnorm"


def test_answers_name_keys_that_exist():
    advice = " ".join([*(f"Type {key}=X." for key in answers._TYPE), *answers._SENTENCES.values()])
    named = set(re.findall(r"([a-z][a-z_0-9.]*)=", advice)) - {"data"}  # a group of keys
    assert {"optimizer.name", "data.path", "shard"} <= named <= set(known_keys(RunConfig))


def test_benchmark_answers_with_its_own_keys():
    with pytest.raises(ValueError, match="Type seq=64"):
        load_benchmark(["block_size=64"])
    with pytest.raises(ValueError, match="--help lists the keys"):
        load_benchmark(["lr=1"])  # train.py's answer would name a key that benchmark.py does not have


def test_help_explains_every_key(capsys):
    """Nested ones, too: type, default and a sentence."""
    assert exit_code(COMMAND, "--help") == 0
    shown = capsys.readouterr().out
    for key in known_keys(RunConfig):
        if key != "parallel":  # short for parallel.algorithm
            assert re.search(rf"^  {re.escape(key)}=.*\n      \([a-z| ]+\) [A-Z`]", shown, re.MULTILINE), key


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_what_can_be_typed(name, capsys):
    """The command itself, the keys of train where it takes them, and experiments where it composes them."""
    with pytest.raises(SystemExit) as left:
        run_command(command_named(name), ["--help"])
    shown = capsys.readouterr().out
    assert left.value.code == 0 and f"mstrain {name} [key=value ...], or python -m mstrain {name} " in shown
    assert ("mstrain train --help" in shown) == (name in ("evaluate", "sample", "export", "supervise"))
    assert ("\n  experiment=NAME" in shown) == (name == "train")


@pytest.mark.parametrize("option", [["--help"], ["--cfg", "job"]], ids=" ".join)
def test_a_listing_whose_reader_is_gone_ends_without_a_traceback(option):
    """As in `mstrain train --help | head`."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run([sys.executable, "-m", "mstrain", "train", *option], stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_cfg_job_prints_what_builds_the_same_configuration(capsys):
    assert exit_code(COMMAND, "--cfg", "job", "model=tiny", "parallel=wang") == 0
    printed = build(RunConfig, OmegaConf.to_container(OmegaConf.create(capsys.readouterr().out)))
    assert printed == load_config(["model=tiny", "parallel=wang"])


def test_groups_of_ones_own_come_from_config_dir(tmp_path, monkeypatch, capsys):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: mine\nlayers: 7\n")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "sevens.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: mine\nsteps: 77\n"
    )
    arguments = ["--config-dir", str(tmp_path), "--cfg", "job", "+experiment=sevens", "seed=5"]
    assert exit_code(COMMAND, *arguments) == 0
    printed = OmegaConf.create(capsys.readouterr().out)
    assert (printed.model.layers, printed.steps, printed.seed) == (7, 77, 5)
    assert exit_code(COMMAND, "model=mine") == 2  # without the folder


@pytest.mark.parametrize("path", sorted((CONF / "experiment").glob("*.yaml")), ids=lambda path: path.stem)
def test_experiments_state_command_hardware_and_result_and_compose(path):
    text = path.read_text()
    assert all(f"# {word}: " in text for word in ("Command", "Hardware", "Expected"))
    assert load_config([f"experiment={path.stem}"])


@pytest.mark.parametrize("words, code, shown", [
    (["--version"], 0, "mstrain "), (["train", "--version"], 0, "mstrain "), ([], 0, "benchmark"),
    (["trian"], 2, "Did you mean train?"), (["train", "--bar"], 2, "Unknown option --bar"),
])  # fmt: skip
def test_the_module_runs_the_commands(words, code, shown, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["mstrain", *words])
    with pytest.raises(SystemExit) as left:
        module_main()
    assert left.value.code == code and shown in "".join(capsys.readouterr())
