"""Tokens are those of their digest: any flipped bit is found before they are relied on, and mended or refused."""

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mstrain.data import DataConfig, prepare
from mstrain.data.token_file import TokenFile
from mstrain.data.verification import Verification

TOKENS = ("train.bin", "validation.bin")
FACTS = ("corpus", "warnings", "tokens", "tokenizer", "revisions")


@pytest.fixture
def config(folder, tmp_path):
    return DataConfig("text", str(folder), cache_dir=str(tmp_path / "cache"))


@pytest.fixture
def settled(monkeypatch):
    """Digests are remembered at once, as they are of files that are older than two seconds."""
    monkeypatch.setattr("mstrain.data.file_digests.SETTLED_SECONDS", 0.0)


@pytest.fixture
def hashed(monkeypatch):
    """The names of the token files that were read as a whole."""
    names, original = [], TokenFile.hash_tokens
    monkeypatch.setattr(TokenFile, "hash_tokens", lambda file: names.append(file.path.name) or original(file))
    return names


def flip(path, bit):
    """Flips one bit and puts the modification time back."""
    before = os.stat(path)
    with open(path, "r+b") as file:
        file.seek(bit // 8)
        byte = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(TOKENS), place=st.floats(0, 1, exclude_max=True))
def test_a_flipped_bit_anywhere_is_found_and_the_corpus_made_anew(config, settled, name, place):
    sound = prepare(config)
    tokens = sound.train.read(), sound.validation.read()
    path = sound.directory / name
    flip(path, int(place * 8 * path.stat().st_size))
    mended = prepare(config)
    assert "tokenized again" in mended.warnings[-1] and str(path) in mended.warnings[-1]
    assert mended.digest == sound.digest
    np.testing.assert_array_equal(mended.train.read(), tokens[0])
    np.testing.assert_array_equal(mended.validation.read(), tokens[1])


def test_bit_0_of_every_token_flipped(config):
    sound = prepare(config)
    path, tokens = sound.train.path, sound.train.read()
    path.write_bytes(path.read_bytes()[:4096] + (tokens ^ 1).tobytes())
    mended = prepare(config)
    np.testing.assert_array_equal(mended.train.read(), tokens)
    assert f"the tokens of {path} are not those that were written" in mended.warnings[-1]


def test_token_files_of_another_corpus_are_not_taken_for_ours(config, tmp_path):
    sound = prepare(config)
    other = prepare(DataConfig("synthetic", num_tokens=5000, cache_dir=str(tmp_path / "other")))
    for names, reason in ((TOKENS, "not those of this corpus"), ((*TOKENS, "corpus.json"), "of another corpus")):
        for name in names:
            shutil.copy(other.directory / name, sound.directory / name)
        mended = prepare(config)
        assert mended.digest == sound.digest != other.digest and reason in mended.warnings[-1]


def test_a_version_of_a_file_is_hashed_once(config, settled, hashed):
    corpus = prepare(config)
    assert hashed == ["train.bin", "validation.bin"]
    prepare(config).verification.wait()
    corpus.verification.wait()
    assert len(hashed) == 2
    os.chmod(corpus.train.path, 0o600)  # its change time could hide a write
    prepare(config)
    assert hashed[2:] == ["train.bin"]


def test_a_clock_of_the_file_server_that_is_ahead_does_not_hash_at_every_save(config, monkeypatch, hashed):
    corpus = prepare(config)
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 3600)
    monkeypatch.setattr("mstrain.data.file_digests.SETTLED_SECONDS", 0.05)
    corpus.verification.wait()
    time.sleep(0.06)
    for _ in range(5):
        corpus.verification.wait()
    assert len(hashed) <= 6


def test_a_file_that_may_still_change_within_its_times_is_not_remembered(config, hashed):
    prepare(config)
    prepare(config)
    assert len(hashed) == 4


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"train.bin": 3}', b'{"train.bin": [1, 2, 3, 4, 5]}', b"[" * 99999]
)
def test_broken_memories_are_forgotten(config, settled, hashed, content):
    prepare(config)
    for path in (Path(config.cache_dir) / "digests").iterdir():
        path.write_bytes(content)
    assert prepare(config).warnings == () and len(hashed) == 4
    prepare(config)
    assert len(hashed) == 4


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(FACTS), values) | values)
def test_any_facts_of_a_corpus_are_taken_or_the_corpus_is_made_anew(config, settled, changes):
    sound = prepare(config)
    place = sound.directory / "corpus.json"
    facts = json.loads(place.read_text())
    place.write_text(json.dumps(facts | changes if isinstance(changes, dict) else changes))
    again = prepare(config)
    assert again.digest == sound.digest and again.tokenizer.digest == sound.tokenizer.digest
    assert all(isinstance(warning, str) for warning in again.warnings)
    shutil.rmtree(sound.directory)


@pytest.fixture
def large(monkeypatch, settled):
    """Every corpus is verified in the background."""
    monkeypatch.setattr("mstrain.data.verification.AT_ONCE_BYTES", 0)


def test_a_large_corpus_is_verified_before_it_is_relied_on(config, large):
    sound = prepare(config)
    sound.verification.wait()
    tokens = sound.train.read()
    flip(sound.train.path, 8 * 5000)
    damaged = prepare(config)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"the tokens of {damaged.train.path} are not .* run again"):
            damaged.verification.wait()
    mended = prepare(config)
    mended.verification.wait()
    assert mended.digest == sound.digest
    np.testing.assert_array_equal(mended.train.read(), tokens)


def test_tokens_that_change_after_they_were_verified_are_found_by_the_next_wait(config, large):
    corpus = prepare(config)
    corpus.verification.wait()
    flip(corpus.validation.path, 8 * 4200)
    with pytest.raises(ValueError, match=str(corpus.validation.path)):
        corpus.verification.wait()


def test_of_two_that_find_the_damage_the_second_leaves_the_new_files_alone(config):
    directory, cache = prepare(config).directory, Path(config.cache_dir)
    flip(directory / "train.bin", 8 * 5000)
    first, second = (Verification([TokenFile.open(directory / "train.bin")], cache) for _ in range(2))
    with pytest.raises(ValueError, match="run again"):
        first.wait()
    assert not directory.exists()
    mended = prepare(config)
    with pytest.raises(ValueError, match="run again"):
        second.wait()
    mended.verification.wait()
    assert [path for path in cache.iterdir() if path.name != "digests"] == [directory]


@pytest.mark.parametrize("stray", ["file", "link", "dangling link"])
def test_what_has_the_name_of_a_corpus_and_is_none_makes_way(config, tmp_path, stray):
    directory = prepare(config).directory
    elsewhere = tmp_path / "elsewhere"
    os.rename(directory, tmp_path / "gone")
    if stray == "file":
        directory.write_text("x")
    else:
        directory.symlink_to(elsewhere)
    if stray == "link":
        elsewhere.mkdir()
        (elsewhere / "mine").touch()
    assert prepare(config).directory == directory and not directory.is_symlink()
    assert stray != "link" or (elsewhere / "mine").exists()  # nothing is removed through a link
