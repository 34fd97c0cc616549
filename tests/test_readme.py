"""README.md is right: its commands are accepted, its links exist, and its figures those of pages and data files."""

import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

from mstrain.commands.train import load_config
from mstrain.gemm import ALGORITHMS
from mstrain.models.zoo import FAMILIES
from tests.docs.steps import read_steps

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"`([^`\n]+)`", README.replace("```", ""))
TYPED = [code for code in CODE if re.match(r"[a-z_.]+=\S", code) and code != "model=list"]


@pytest.mark.parametrize("code", TYPED)
def test_what_the_tables_say_to_type_is_accepted(code, tmp_path, monkeypatch):
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
    (tmp_path / "FOLDER").mkdir()
    (tmp_path / "FOLDER" / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    (tmp_path / "FOLDER" / "tokenizer.json").touch()
    monkeypatch.chdir(tmp_path)
    assert (load_config(shlex.split(code)) == load_config([])) == (code == "mesh=auto")  # the default


@pytest.mark.parametrize("line", re.findall(r"train\.py +([^`'#\n]*=[^`'#\n]*)", README))
def test_command_lines_are_accepted(line):
    assert load_config(shlex.split(line)) != load_config([])


def test_links_and_files_exist():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    files = [code for code in CODE if re.fullmatch(r"[\w/]+\.(py|ipynb|md|sh)", code)]
    assert links and files
    for name in (*links, *files):
        assert (ROOT / name).exists(), name


def test_tables_are_complete():
    concepts = (ROOT / "docs" / "concepts.md").read_text().split("## Algorithms")[1]
    rows = re.findall(r"^\| `(\w+)` \|", concepts, re.MULTILINE)
    assert sorted(rows) == sorted(ALGORITHMS)
    for family in FAMILIES.values():
        assert re.sub(r" \d$", "", family) in README


def row(start: str) -> str:
    """The line of a table in README.md that begins with this text."""
    (found,) = [line for line in README.splitlines() if line.startswith(f"| {start}")]
    return found


def fastest(target: str, batch: int, remat: str) -> dict[str, tuple[float, float]]:
    """{algorithm: (seconds, MFU in percent)} of the fastest compiled step of GPT-3 175B with each algorithm."""
    wanted = (target, "gpt3_175b", str(batch), remat)
    found: dict[str, tuple[float, float]] = {}
    for step in read_steps():
        if (step["target"], step["model"], step["batch"], step["remat"]) == wanted:
            time = float(step["ms"]) / 1e3, float(step["mfu_percent"])
            found[step["algorithm"]] = min(time, found.get(step["algorithm"], time))
    return found


def longer(steps: dict[str, tuple[float, float]], name: str, than: str) -> str:
    return f"{100 * (steps[name][0] / steps[than][0] - 1):.1f} %"


def test_compiled_steps_are_those_of_the_data_file():
    """docs/data/steps.csv; `megatron` with `shard=parameters` is FSDP with tensor parallelism."""
    steps = fastest("v5p-512", 128, "none")
    assert min(steps, key=lambda name: steps[name]) == "meshslice"
    seconds, mfu = steps["meshslice"]
    others = f"without slices (Collective) it takes {longer(steps, 'collective', 'meshslice')} longer, with FSDP and"
    last = f"tensor parallelism {longer(steps, 'megatron', 'meshslice')} |"
    assert f"MeshSlice {seconds:.2f} s ({mfu:.1f} % MFU); {others} {last}" in row(
        "one step of GPT-3 175B, 128 sequences of 2,048 tokens on 256 v5p chips "
    )
    for start, target in (("the same with 256 sequences ", "v5p-512"), ("the same on 256 v6e chips ", "v6e-256")):
        steps = fastest(target, 256, "full")
        assert min(steps, key=lambda name: steps[name]) == "fsdp"
        times = f"FSDP {steps['fsdp'][0]:.2f} s; MeshSlice {steps['meshslice'][0]:.2f} s, "
        assert f"{times}{longer(steps, 'meshslice', 'fsdp')} longer |" in row(start)


def test_predictions_of_published_runs_are_those_of_the_planning_page():
    """tests/planner/published/test_published.py derives the figures of that page."""
    page = (ROOT / "docs" / "planning.md").read_text()
    errors = [abs(float(ratio) - 1) for ratio in re.findall(r" \| (\d\.\d{3}) \| \d+ % \| ", page)]
    first = f"median error {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %"
    (more,) = re.findall(r"Median error ([\d.]+) %, largest ([\d.]+) %; (\d+) of (\d+) are within 15 %", page)
    median, largest, inside, number = more
    line = row(f"throughput of {len(errors)} published training runs; of {number} further ones ")
    assert f"| {first}; median {median} %, largest {largest} %, {inside} of {number} within 15 % |" in line
