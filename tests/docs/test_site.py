"""The site of docs/ is built from its pages and the docstrings, without a warning."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import mstrain

ROOT = Path(__file__).resolve().parents[2]
NEEDED = ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)}: requirements-dev.txt is not installed in full")
def test_the_site_has_every_public_name_with_its_documentation(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "api.html").read_text()
    for name in mstrain.__all__:
        assert f'id="mstrain.{name}"' in page, f"docs/api.md does not describe mstrain.{name}"
    assert "any leading dims" in page and "donates its argument" in page


def test_every_page_is_in_the_site():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:")[1]
    for path in (ROOT / "docs").rglob("*.md"):
        assert f" {path.relative_to(ROOT / 'docs').as_posix()}\n" in navigation, f"{path} is not in mkdocs.yml"
