"""Files of token ids that others wrote: read as they are, refused with their place, never changed."""

import hashlib
import os

import numpy as np
import pytest

from mstrain.data import DataConfig, prepare
from mstrain.data.token_file import DamagedTokens


def write(path, ids, dtype="<u2"):
    np.asarray(ids, dtype).tofile(path)
    return path


def flat(folder, **options):
    return DataConfig("tokens", str(folder), cache_dir=str(folder.parent / "cache"), **options)


def contents(folder):
    return {p.name: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns) for p in folder.iterdir()}


@pytest.fixture
def nano(tmp_path):
    """train.bin and val.bin as nanoGPT's prepare.py writes them."""
    folder = tmp_path / "openwebtext"
    folder.mkdir()
    rng = np.random.default_rng(0)
    write(folder / "train.bin", rng.integers(0, 50257, 5000))
    write(folder / "val.bin", rng.integers(0, 50257, 700))
    return folder


def test_train_and_validation_files_are_read_as_they_are(nano):
    before = contents(nano)
    corpus = prepare(flat(nano), vocab_size=50257)
    assert (corpus.train.num_tokens, corpus.validation.num_tokens, corpus.vocab_size) == (5000, 700, 50257)
    np.testing.assert_array_equal(corpus.train.read(), np.fromfile(nano / "train.bin", "<u2"))
    batches = corpus.batches("train", 16, 4, seed=1)
    assert batches.num_windows == 4999 // 16 and batches.batch(0).tokens.dtype == np.int32
    corpus.verification.wait()
    assert prepare(flat(nano), vocab_size=50257).digest == corpus.digest
    assert contents(nano) == before


def test_several_files_are_one_after_the_other(nano):
    write(nano / "train_2.bin", np.arange(300))
    corpus = prepare(flat(nano), vocab_size=50257)
    both = np.concatenate([np.fromfile(nano / name, "<u2") for name in ("train.bin", "train_2.bin")])
    np.testing.assert_array_equal(corpus.train.read(), both)
    np.testing.assert_array_equal(corpus.train.rows(np.array([4990, 5299]), 1)[:, 0], both[[4990, 5299]])
    np.testing.assert_array_equal(corpus.train.rows(np.array([4990]), 30)[0], both[4990:5020])


def test_without_a_validation_file_the_last_tokens_are_held_out(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    write(folder / "tokens.bin", np.arange(1000), "<u4")
    corpus = prepare(flat(folder, token_dtype="uint32", validation_fraction=0.1), vocab_size=70000)
    np.testing.assert_array_equal(corpus.train.read(), np.arange(900))
    np.testing.assert_array_equal(corpus.validation.read(), np.arange(900, 1000))


def test_a_changed_file_is_named_and_left_alone(nano):
    corpus = prepare(flat(nano), vocab_size=50257)
    with open(nano / "train.bin", "r+b") as file:
        file.write(b"\0\0")
    os.utime(nano / "train.bin", (1, 1))
    before = contents(nano)
    with pytest.raises(DamagedTokens, match="train.bin .*put the file back"):
        corpus.batches("train", 16, 4).batch(0)
    with pytest.raises(DamagedTokens, match="train.bin .*put the file back"):
        corpus.verification.wait()
    assert contents(nano) == before


@pytest.mark.parametrize(
    "content, options, message",
    [
        (np.array([1, 60000, 2], "<u2").tobytes(), {}, r"train.bin: token 1 \(byte 2\) is id 60000, outside .* 50257"),
        (b"abc", {}, "train.bin has 3 bytes, not a whole number of uint16"),
        (b"", {}, "train.bin is empty"),
        (b"abcd", {"vocab_size": None}, "type vocab_size=50257"),
        (b"abcd", {"tokenizer": "bpe"}, "bpe has no effect with data=tokens"),
    ],
)
def test_what_is_not_a_file_of_such_tokens_is_refused(nano, content, options, message):
    (nano / "train.bin").write_bytes(content)
    before = contents(nano)
    with pytest.raises(ValueError, match=message):
        prepare(flat(nano), **{"vocab_size": 50257, **options})
    assert contents(nano) == before
