"""Files of token ids that others wrote: read as they are, refused with their place, never changed."""

import hashlib
import io
import os
import struct

import numpy as np
import pytest

from mstrain.data import DataConfig, prepare
from mstrain.data.token_file import DamagedTokens
from mstrain.data.token_header import MAGIC, VERSION, encode_header


def write(path, ids, dtype="<u2"):
    np.asarray(ids, dtype).tofile(path)
    return path


OURS = {"magic": MAGIC, "version": VERSION, "dtype": "uint16", "vocab_size": 256, "num_tokens": 10, "num_documents": 1,
        "text_bytes": 10, "digest": "0" * 32}  # fmt: skip


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


def llm_c(ids, magic=20240520, count=None, dtype="<u2"):
    header = np.zeros(256, "<i4")
    header[:3] = magic, 1, len(ids) if count is None else count
    return header.tobytes() + np.asarray(ids, dtype).tobytes()


def as_npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


IDS = np.random.default_rng(1).integers(0, 50257, 5000)


@pytest.mark.parametrize(
    "content",
    [llm_c(IDS), llm_c(IDS, 20240801, dtype="<u4"), *(as_npy(IDS.astype(dtype)) for dtype in ("u2", "i4", "i8"))],
)
def test_a_header_states_the_dtype_and_is_no_text(nano, content):
    (nano / "train.bin").write_bytes(content)
    corpus = prepare(flat(nano), vocab_size=50257)
    np.testing.assert_array_equal(corpus.train.read(), IDS)
    corpus.verification.wait()
    tokens = corpus.batches("train", 16, 4, seed=1).batch(0).tokens
    assert tokens.dtype == np.int32 and {tuple(row) for row in tokens} <= set(sliding(IDS, 17))


def sliding(ids, length):
    return map(tuple, np.lib.stride_tricks.sliding_window_view(ids, length).tolist())


def test_a_folder_of_npy_files(nano):
    for path in list(nano.iterdir()):
        np.save(path.with_suffix(".npy"), np.fromfile(path, "<u2"))
        path.unlink()
    assert prepare(flat(nano), vocab_size=50257).train.num_tokens == 5000


def test_the_index_of_megatron_states_the_dtype(nano):
    write(nano / "train.bin", IDS, "<i4")
    with pytest.raises(ValueError, match="its ids are uint32. Type data.token_dtype=uint32"):
        prepare(flat(nano), vocab_size=50257)
    (nano / "train.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QB", 1, 4) + b"\0" * 50)
    np.testing.assert_array_equal(prepare(flat(nano), vocab_size=50257).train.read(), IDS)


def test_what_is_remembered_of_a_file_is_of_its_dtype(tmp_path, monkeypatch):
    monkeypatch.setattr("mstrain.data.file_digests.SETTLED_SECONDS", 0.0)
    (tmp_path / "a").mkdir()
    write(tmp_path / "a" / "tokens.bin", np.full(1000, 10**6), "<u4")
    prepare(flat(tmp_path / "a"), vocab_size=65536)  # as uint16: no id is too large
    with pytest.raises(ValueError, match="id 1000000, outside the vocabulary of 70000"):
        prepare(flat(tmp_path / "a", token_dtype="uint32"), vocab_size=70000)


@pytest.mark.parametrize(
    "content, options, message",
    [
        (np.array([1, 60000, 2], "<u2").tobytes(), {}, r"train.bin: token 1 \(byte 2\) is id 60000, outside .* 50257"),
        (b"abc", {}, "train.bin has 3 bytes, not a whole number of uint16"),
        (b"", {}, "train.bin is empty"),
        (llm_c([1, 2], count=3), {}, "has 2 token ids, but its header states 3"),
        (llm_c([]), {}, "train.bin is empty"),
        (as_npy(np.array([1, -1])), {}, r"token 1 \(byte 136\) is id 18446744073709551615, outside"),
        (as_npy(np.zeros((2, 2), np.int32)), {}, r"is an array \[2, 2\] of <i4: save one dim"),
        (as_npy(np.zeros(4)), {}, r"is an array \[4\] of <f8: save one dim"),
        (as_npy(np.zeros(4))[:-1], {}, "is not an array that NumPy can read"),
        (encode_header(OURS) + b"\0" * 20, {}, "of mstrain's own cache: type the data="),
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


def test_a_file_of_data_validation_is_not_trained_on(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for name in ("a.bin", "b.bin", "c.bin"):
        write(folder / name, np.arange(100))
    corpus = prepare(flat(folder, validation=str(folder / "b.bin")), vocab_size=100)
    assert (corpus.train.num_tokens, corpus.validation.num_tokens) == (200, 100)


def test_an_end_of_document_outside_the_vocabulary_is_refused(nano):
    assert prepare(flat(nano, eos="50256"), vocab_size=50257).train.eod == 50256
    with pytest.raises(ValueError, match="data.eos=50257 is outside the vocabulary of 50257"):
        prepare(flat(nano, eos="50257"), vocab_size=50257)
