"""Hostile input: any bytes in a file are judged, never executed, and a run writes only where it may."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from mstrain.data import TokenFile
from mstrain.data.token_file import DamagedTokens
from mstrain.data.token_header import MAGIC, VERSION, encode_header
from mstrain.training import json_lines, resume
from tests.job.processes import ROOT, arguments
from tests.quick import QUICK_FLAGS

PACKAGE = Path(resume.__file__).parents[1]
EXECUTES = {"eval", "exec", "compile", "__import__"}
UNPICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
HEADER = {
    "magic": MAGIC, "version": VERSION, "dtype": "uint16", "vocab_size": 256, "num_tokens": 8,
    "num_documents": 1, "text_bytes": 8, "digest": "d" * 32,
}  # fmt: skip
near_headers = st.builds(
    lambda changes, checksum, tail: checksum(HEADER | changes) + tail,
    st.dictionaries(
        st.sampled_from(sorted(HEADER)), scalars | st.sampled_from([256, 8, 2**40, 2**62, 2**63, -1]), max_size=3
    ),
    st.sampled_from([encode_header, lambda header: json.dumps(header).encode().ljust(4096)]),
    st.binary(max_size=40) | st.just(bytes(16)),
)


@settings(max_examples=1500, deadline=None)
@given(st.binary(max_size=200) | near_headers | values.map(lambda value: json.dumps(value).encode()))
@example(encode_header(HEADER | {"num_tokens": True}) + bytes(2))
@example(encode_header(HEADER) + bytes(16))
def test_any_token_file_is_opened_or_refused_with_the_fix(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.bin"
    path.write_bytes(content)
    try:
        file = TokenFile.open(path)
        tokens = file.read()
    except DamagedTokens as error:
        assert "run again" in str(error)
    except ValueError as error:
        assert "delete its folder" in str(error)
    else:
        assert path.stat().st_size == 4096 + tokens.nbytes and file.num_tokens == len(tokens)


@settings(max_examples=2000, deadline=None)
@given(values | st.fixed_dictionaries({"format": scalars}))
def test_any_facts_of_a_checkpoint_are_taken_or_refused_with_the_fix(facts):
    try:
        resume._check_format(facts, "runs/x")
    except ValueError as error:
        assert "Update mstrain" in str(error) or "are not mstrain's" in str(error)
    else:
        assert isinstance(facts, dict) and facts.get("format", resume.FORMAT) <= resume.FORMAT


@settings(max_examples=500, deadline=None)
@given(st.lists(st.binary(max_size=30) | values.map(lambda value: json.dumps(value).encode()), max_size=5))
def test_any_lines_are_read_or_left_out(tmp_path_factory, lines):
    path = tmp_path_factory.getbasetemp() / "fuzz.jsonl"
    path.write_bytes(b"\n".join(lines))
    assert all(isinstance(line, dict) for line in json_lines.read(path))
    json_lines.drop_after(path, 5)
    assert all(line["step"] <= 5 for line in json_lines.read(path))


def dangers(code: str) -> set[str]:
    """What in `code` could run or unpickle what a file holds."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & UNPICKLES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").partition(".")[0]} & UNPICKLES
        elif isinstance(node, ast.Call):
            found |= {getattr(node.func, "id", "")} & EXECUTES
            found |= {keyword.arg for keyword in node.keywords} & {"allow_pickle", "shell"}
    return found


def test_the_package_executes_and_unpickles_nothing():
    found = {str(path): dangers(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 100 and not {path for path, names in found.items() if names}
    for code in ("import pickle", "from dill import load", "eval(text)", "np.load(path, allow_pickle=True)"):
        assert dangers(code)


# train.py that notes every path that Python opens for writing, makes, renames or removes.
AUDITED = """
import os, sys
log = os.open(os.environ["AUDIT"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
ALTERS = {"os.mkdir": 0, "os.rmdir": 0, "os.remove": 0, "os.truncate": 0, "os.symlink": 1, "os.link": 1,
          "os.rename": 1, "shutil.rmtree": 0, "shutil.move": 1, "shutil.copyfile": 1}
def hook(event, arguments):
    if event == "open":
        path, _, flags = arguments
        if not flags & WRITES:
            return
    elif event in ALTERS:
        path = arguments[ALTERS[event]]
    else:
        return
    if not isinstance(path, int):
        if event in ("os.remove", "os.rmdir", "os.mkdir") and arguments[-1] >= 0:  # relative to an open folder
            path = os.path.join(os.readlink(f"/proc/self/fd/{arguments[-1]}"), os.fsdecode(path))
        os.write(log, os.path.abspath(os.fsdecode(path)).encode() + b"\\n")
sys.addaudithook(hook)
from mstrain.cli import run_command
from mstrain.commands.train import COMMAND
run_command(COMMAND)
"""


def test_a_run_writes_nowhere_but_where_it_may(tmp_path):
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    for folder in (home, temporary):
        folder.mkdir()
    run, cache = tmp_path / "run", tmp_path / "cache"
    profile = ("profile.start=2", "profile.steps=1")
    words = arguments(run, cache, "steps=2", "mesh=1x1", "checkpoint.every=1", "eval.every=2", *profile)
    environment = os.environ | {
        "AUDIT": str(tmp_path / "audit"), "HOME": str(home), "TMPDIR": str(temporary), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": QUICK_FLAGS, "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", AUDITED, *words], cwd=ROOT, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    written = {Path(line) for line in (tmp_path / "audit").read_text().splitlines()}
    fonts = (home / ".config" / "matplotlib", home / ".cache" / "matplotlib")
    may = (run, cache, temporary, *fonts, Path("/dev/null"))
    parents = {parent for place in may for parent in place.parents}
    elsewhere = [path for path in written - parents if not any(path.is_relative_to(place) for place in may)]
    assert not elsewhere
    assert run / "metrics.jsonl" in written and any(path.is_relative_to(cache) for path in written)
    found = {path for path in tmp_path.iterdir()}  # what is not Python's (TensorStore, XLA) shows on the disk
    assert found == {home, temporary, run, cache, tmp_path / "audit"}
