"""Every command on a page of the docs: composed by the code that runs it; those that a laptop finishes in seconds, run.

Commands of other programs (tensorboard, gcloud, sbatch, kubectl, docker, pip) are listed.
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mstrain.cli.command import _options, run_command
from mstrain.cli.compose import config_dir
from mstrain.commands import COMMANDS, command_named
from mstrain.commands.train import load_config
from mstrain.training.session import train
from tests.docs import options, steps
from tests.training.runs import make

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = ("tensorboard", "gcloud", "sbatch", "kubectl", "docker", "bash", "pip", "git", "python3 -m venv")
SCRIPT = re.compile(
    r"^(?:\.venv/bin/)?(?:python3? (?:-m mstrain (?P<module>\w+)|(?P<script>\w+)\.py)|mstrain (?P<installed>\w+))\b"
    r"(?P<rest>.*)"
)


def lines(page: Path) -> list[str]:
    """The command lines of a page's bash blocks, continued lines joined, comments and `KEY=...` ellipses left out."""
    found = []
    for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s#.*", "", line).strip()
            found += [line] if line.startswith("gcloud") else [part.strip() for part in line.split("&&")]
    return [line for line in found if line and not line.startswith("#")]


ALL = [(page.relative_to(ROOT).as_posix(), line) for page in PAGES for line in lines(page)]
OURS = [(page, line, SCRIPT.match(line)) for page, line in ALL if SCRIPT.match(line)]


def name_of(match: re.Match) -> str:
    return match["module"] or match["script"] or match["installed"]


@pytest.mark.parametrize("page, line, match", OURS, ids=[f"{page}:{line[:60]}" for page, line, _ in OURS])
def test_a_command_of_a_page_is_accepted(page, line, match, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "mymodel.yaml").write_text("name: mymodel\nlayers: 3\n")
    sizes = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256}
    for folder in (tmp_path / "Llama-3.2-1B", tmp_path / "base"):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
        (folder / "tokenizer.json").touch()
    assert name_of(match) in COMMANDS, f"{page} types a command that does not exist"
    options, pairs = _options(shlex.split(match["rest"]))
    first = [re.sub(r"=(\w+|range\([^)]*\)),.*", r"=\1", pair) for pair in pairs] if options.multirun else pairs
    if not options.help and first != ["model=list"]:
        with config_dir(options.config_dir):
            assert command_named(name_of(match)).config(first)


def test_commands_of_other_programs_are_known():
    strangers = [line for page, line in ALL if not SCRIPT.match(line) and not line.startswith(OTHERS)]
    strangers = [line for line in strangers if not re.match(r"\.venv/bin/(python -m pytest|pip )", line)]
    assert not strangers


def test_pages_link_to_what_exists():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_page_s_tables_are_those_of_the_files():
    """Type: python -m tests.docs.steps, python -m tests.docs.options."""
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert steps.table() in page and options.table() in page


def test_an_experiment_expects_what_was_compiled():
    """The step of the experiment, MeshSlice with automatic slices, is in docs/data/steps.csv."""
    config = load_config(["experiment=gpt3_175b_v5p_512"])
    wanted = ("v5p-512", "gpt3_175b", str(config.batch), str(config.seq), config.remat, "meshslice", config.mesh)
    columns = ("target", "model", "batch", "seq", "remat", "algorithm", "mesh")
    (row,) = [row for row in steps.read_steps() if tuple(row[name] for name in columns) == wanted]
    text = (ROOT / "conf" / "experiment" / "gpt3_175b_v5p_512.yaml").read_text()
    assert f"# Expected: {float(row['ms']) / 1e3:.2f} s a step, {row['mfu_percent']} % MFU" in text


def test_a_page_s_command_runs(tmp_path):
    """The first one of the data page, in two steps."""
    (line,) = [line for page, line in ALL if page == "docs/howto/data.md" and "data.path=docs" in line]
    words = shlex.split(SCRIPT.match(line)["rest"])
    changed = [word for word in words if not word.startswith(("steps=", "run_dir="))]
    places = [f"run_dir={tmp_path / 'run'}", f"data.cache_dir={tmp_path}"]
    command = [sys.executable, "train.py", *changed, "steps=2", *places]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout


def test_the_comparison_of_experts_draws_both_models(tmp_path, monkeypatch):
    """The sweep of the experts page, two steps of each model in this process."""
    (line,) = [line for page, line in ALL if page == "docs/howto/experts.md" and " -m " in line]
    words = [word for word in shlex.split(SCRIPT.match(line)["rest"]) if not word.startswith(("seed=", "run_dir="))]

    def train_here(self, name, pairs, folder):
        place = pairs.pop().removeprefix("run_dir=")
        return train(make(Path(place), *pairs, "steps=2", "eval.batches=1"))

    monkeypatch.setattr("mstrain.cli.sweep._Child.run", train_here)
    with pytest.raises(SystemExit) as left:
        run_command(command_named("train"), [*words, f"run_dir={tmp_path / 'experts'}"])
    assert left.value.code == 0
    table = (tmp_path / "experts" / "sweep.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in table] == ["run", "model=small", "model=small_moe"]
    assert "validation loss" in table[0] and all(float(row.split(",")[2]) > 0 for row in table[1:])
    assert (tmp_path / "experts" / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", ["requirements", "reference"])
def test_written_files_are_those_of_their_source(script):
    command = [sys.executable, ROOT / ".ci" / script, "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
