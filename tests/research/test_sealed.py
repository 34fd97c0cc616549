"""No module of mstrain imports research; the registry of modes of plan.py names its commands."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REGISTRY = Path("mstrain/commands/plans/modes.py")


def imported(file: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def test_nothing_imports_the_references():
    files = [file.relative_to(ROOT) for file in (ROOT / "mstrain").rglob("*.py")]
    assert not [file for file in files if any(name.split(".")[0] == "research" for name in imported(ROOT / file))]
    assert [file for file in files if '"research.' in (ROOT / file).read_text()] == [REGISTRY]


def test_the_simulator_knows_no_reference_and_no_planner():
    for file in (ROOT / "mstrain/simulator").rglob("*.py"):
        ours = {name.split(".")[1] for name in imported(file) if name.startswith("mstrain.")}
        assert ours <= {"display", "hardware", "json_files", "parallel", "simulator", "timeline"}, file
