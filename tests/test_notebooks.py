"""Every notebook runs from top to bottom in its folder; the walk-through's checks refuse wrong products."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
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
