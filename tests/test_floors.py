"""Files import each other in one direction: `.importlinter` states the floors, and no files import in a circle."""

from pathlib import Path

import grimp
from importlinter.cli import lint_imports

ROOT = Path(__file__).parent.parent


def test_imports_run_down_the_floors(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert lint_imports(no_cache=True) == 0


def test_no_files_import_in_a_circle():
    """Imports inside functions count. A package's own `__init__` only gathers its names."""
    graph = grimp.build_graph("mstrain", cache_dir=None)
    graph.remove_module("mstrain")
    left = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    while free := [name for name, imports in left.items() if not imports & left.keys()]:
        for name in free:
            del left[name]
    assert not left, sorted(left)
