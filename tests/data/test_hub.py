"""What comes from the Hugging Face Hub records its commit; a revision that was asked for is the one that is used."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.hub import NEW, OLD


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{attempt: (revisions, first word of the text, digest)}, from a process whose Hub is on this machine."""
    folder = tmp_path_factory.mktemp("hub")
    done = subprocess.run(
        [sys.executable, "-m", "tests.data.hub", folder],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    corpora = [json.loads(path.read_text()) for path in (folder / "cache").glob("*/corpus.json")]
    return json.loads(done.stdout.splitlines()[-1]), corpora


@pytest.mark.parametrize(
    "attempt, commit, word",
    [
        ("first", OLD, "old"),
        ("moved", NEW, "new"),
        ("pinned", OLD, "old"),
        ("offline", NEW, "new"),
        ("offline and pinned", NEW, "new"),
    ],
)
def test_the_commit_of_dataset_and_tokenizer_is_recorded(found, attempt, commit, word):
    assert found[0][attempt][:2] == [{"data": commit, "tokenizer": commit}, word]


def test_a_tokenizer_that_is_not_of_the_hub_has_no_revision(found):
    assert found[0]["bytes"][0] == {"data": NEW}


def test_the_revisions_are_beside_the_tokens(found):
    recorded = [corpus["revisions"] for corpus in found[1]]
    assert {"data": OLD, "tokenizer": OLD} in recorded and {"data": NEW} in recorded and len(recorded) == 3


def test_another_commit_is_not_taken_when_the_hub_cannot_be_reached(found):
    assert f"newest local copy is of commit {NEW}, not of data.revision={OLD}" in found[0]["offline and another"]
