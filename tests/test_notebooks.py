"""Every notebook runs from top to bottom in its folder; the walk-through's checks refuse wrong products.

The commands of the finetune page run after the cells of its notebook, in the same process, which saves imports and
compiling.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.docs.test_commands import OURS, name_of
from tests.quick import QUICK_FLAGS

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# A product whose gradients, or whose values, are all zero.
FAULTS = {
    "dX": "linear = lambda x, w, plan, right=linear: jax.lax.stop_gradient(right(x, w, plan))",
    "Y": "linear = lambda x, w, plan, right=linear: 0 * right(x, w, plan)",
}


def execute(notebook) -> None:
    """Runs a notebook in its own folder; a cell that fails raises. The limit of seconds is for a cell that hangs."""
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_holds_little_besides_its_text(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {kind for output in outputs for kind in output.get("data", ())} <= {"image/png", "text/plain"}
    assert path.stat().st_size < 300_000


def test_the_walk_through_shows_what_its_cells_print():
    notebook = nbformat.read(FOLDER / "meshslice_cpu.ipynb", 4)
    for cell in (cell for cell in notebook.cells if "print(" in cell.source or "\ncheck(" in cell.source):
        assert any(output.output_type == "stream" for output in cell.outputs), cell.source


@pytest.mark.parametrize("path", [p for p in NOTEBOOKS if p.stem != "finetune"], ids=lambda path: path.stem)
def test_notebook_runs_and_the_walk_through_refuses_zeros(path):
    """One kernel for both: after the last cell, the one that compares products runs again with each fault."""
    notebook, faulty = nbformat.read(path, 4), {}
    if path.stem == "meshslice_cpu":
        (comparison,) = [cell for cell in notebook.cells if "def run(plan, x, w, dy)" in cell.source]
        for name, fault in FAULTS.items():
            faulty[name] = nbformat.v4.new_code_cell(comparison.source, metadata={"tags": ["raises-exception"]})
            notebook.cells += [nbformat.v4.new_code_cell(fault), faulty[name]]
    execute(notebook)
    for name, cell in faulty.items():
        errors = [output.evalue for output in cell.outputs if output.output_type == "error"]
        assert len(errors) == 1 and errors[0].startswith(f"{name}, Collective on the mesh is off by 1 of its"), errors


CELLS_THEN_COMMANDS = """
import json, os, sys

folder, cells, commands = json.load(sys.stdin)
home, names = os.getcwd(), {}
os.chdir(folder)
for cell in cells:
    exec(cell, names)
os.chdir(home)
for name, words in commands:
    assert names["command_named"](name).main(words) == 0, words
"""


def shortened(words: list[str]) -> list[str]:
    """A command of the page with two steps or four tokens, on shapes that the notebook has compiled."""
    small = {"steps": "2", "optimizer.warmup": "1", "eval.every": "1", "tokens": "4", "batch": "8"}
    return [f"{key}={small.get(key, value)}" for key, _, value in (word.partition("=") for word in words)]


def test_the_finetune_notebook_and_every_command_of_its_page_run(tmp_path):
    (tmp_path / "docs").symlink_to(FOLDER.parent / "docs")
    cells = [cell.source for cell in nbformat.read(FOLDER / "finetune.ipynb", 4).cells if cell.cell_type == "code"]
    typed = [(name_of(m), shortened(shlex.split(m["rest"]))) for page, _, m in OURS if page.endswith("/finetune.md")]
    for name, words in typed:
        words += ["data.cache_dir=cache"] if name == "train" else []
        words += ["model.layers=1"] if "model=tiny" in words else []
    environment = {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK_FLAGS, "MPLBACKEND": "Agg", "TMPDIR": str(tmp_path),
        "PYTHONPATH": str(FOLDER.parent),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", CELLS_THEN_COMMANDS], input=json.dumps((str(FOLDER), cells, typed)), cwd=tmp_path,
        env=os.environ | environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(typed) == 8 and done.stdout.count("step 2/2  loss") == 2
    assert re.search(r"^\[20\] ", done.stdout, re.MULTILINE)
    assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 20
    assert (tmp_path / "finetuned" / "model.safetensors").is_file()
