"""Every notebook runs from top to bottom in its folder; the walk-through's checks refuse wrong products."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# A product whose gradients, or whose values, are all zero.
FAULTS = {
    "dX": "linear = lambda x, w, plan, right=linear: jax.lax.stop_gradient(right(x, w, plan))",
    "Y": "linear = lambda x, w, plan, right=linear: 0 * right(x, w, plan)",
}


def execute(notebook) -> None:
    """Runs a notebook in its own folder; a cell that fails or takes a minute raises."""
    NotebookClient(notebook, timeout=60, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_holds_little_besides_its_text(path):
    notebook = nbformat.read(path, 4)
    nbformat.validate(notebook)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert {kind for output in outputs for kind in output.get("data", ())} <= {"image/png", "text/plain"}
    assert path.stat().st_size < 300_000


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    execute(nbformat.read(path, 4))


@pytest.mark.parametrize("refused", FAULTS)
def test_walk_through_refuses_zeros(refused):
    notebook = nbformat.read(FOLDER / "meshslice_cpu.ipynb", 4)
    first = next(index for index, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    notebook.cells.insert(first + 1, nbformat.v4.new_code_cell(FAULTS[refused]))
    with pytest.raises(CellExecutionError, match=f"{refused}, Collective on the mesh is off by 1 of its"):
        execute(notebook)
