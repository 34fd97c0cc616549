"""The README keeps its word: what it tells people to type is accepted, and what it points at exists."""

import json
import re
import shlex
from pathlib import Path

import pytest

from mstrain.commands.train import load_config
from mstrain.gemm import ALGORITHMS
from mstrain.models.zoo import FAMILIES

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
