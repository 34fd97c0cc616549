"""Addresses, Parquet, a set's own validation split, and mixtures."""

import collections
import gzip
import json

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from mstrain.data import DataConfig, prepare, unigram_bits_per_byte


def lines(words):
    return "".join(json.dumps({"text": f"{word} "}) + "\n" for word in words).encode()


def words(corpus, side):
    file = getattr(corpus, side)
    return sorted(corpus.tokenizer.decode(file.read()).split())


@pytest.fixture
def memory():
    system = fsspec.filesystem("memory")
    system.store.clear()
    return system


def test_addresses_are_read_through_fsspec_and_known_by_content(memory, tmp_path):
    memory.pipe("/set/a.jsonl", lines(f"a{n}" for n in range(40)))
    memory.pipe("/set/deep/b.jsonl.gz", gzip.compress(lines(f"b{n}" for n in range(40))))
    memory.pipe("/set/.hidden.jsonl", b"{")

    def read(path):
        return prepare(DataConfig("jsonl", path, cache_dir=str(tmp_path / "cache")))

    whole = read("memory://set")
    assert words(whole, "train") + words(whole, "validation") != [] and whole.warnings == ()
    assert len(words(whole, "train")) + len(words(whole, "validation")) == 80
    assert read("memory://set/**/*.jsonl.gz").train.num_documents < 41
    memory.pipe("/set/a.jsonl", lines(f"c{n}" for n in range(40)))
    assert read("memory://set").digest != whole.digest
    local = tmp_path / "set" / "deep"
    local.mkdir(parents=True)
    (local.parent / "a.jsonl").write_bytes(lines(f"a{n}" for n in range(40)))
    (local / "b.jsonl").write_bytes(lines(f"b{n}" for n in range(40)))
    assert words(read(f"file://{local.parent}"), "train")[:2] == ["a0", "a1"]
    with pytest.raises(ValueError, match="memory://nowhere has no .*jsonl"):
        read("memory://nowhere")
    with pytest.raises(ValueError, match="cannot list data.path=unknown://x"):
        read("unknown://x")


def parquet(path, texts, column="text"):
    pyarrow.parquet.write_table(pyarrow.table({column: texts, "id": list(range(len(texts)))}), path)


def test_parquet_files_with_their_own_validation_split(tmp_path):
    """Named as on the Hub: the test split is neither trained on nor validated with."""
    folder = tmp_path / "set"
    folder.mkdir()
    for split in ("train-00000-of-00002", "train-00001-of-00002", "validation-00000-of-00001", "test-00000-of-00001"):
        parquet(folder / f"{split}.parquet", [f"{split[:5]}{n} " for n in range(20)])
    corpus = prepare(DataConfig("parquet", str(folder), cache_dir=str(tmp_path / "cache")))
    assert {word[:5] for word in words(corpus, "train")} == {"train"} and corpus.train.num_documents == 40
    assert {word[:5] for word in words(corpus, "validation")} == {"valid"} and corpus.validation.num_documents == 20
    assert corpus.warnings == ("1 files of other splits are not read, first: test-00000-of-00001.parquet",)
    held_out = str(folder / "test*")
    chosen = DataConfig("parquet", str(folder / "train*"), validation=held_out, cache_dir=str(tmp_path / "cache"))
    assert {word[:4] for word in words(prepare(chosen), "validation")} == {"test"}


@pytest.mark.parametrize(
    "texts, options, message",
    [
        (["a", "b"], {"field": "body"}, r"a.parquet has no column 'body' \(columns: text, id\): type data.field="),
        ([None, None], {}, "skipped 2 of 2 rows without text in column 'text', first: a.parquet:1"),
        (["", ""], {}, "all 2 rows are empty"),
        ([b"ab", b"\xff"], {}, "skipped 1 of 2 rows whose text is not valid Unicode, first: a.parquet:2"),
        (None, {}, "a.parquet is not a Parquet file, or damaged"),
    ],
)
def test_a_parquet_file_without_text_is_refused(tmp_path, texts, options, message):
    path = tmp_path / "a.parquet"
    if texts is None:
        path.write_bytes(gzip.compress(b"x" * 99))
    else:
        kind = pyarrow.binary() if isinstance(texts[0], bytes) else pyarrow.string()
        parquet(path, pyarrow.array(texts, kind).view(pyarrow.string()))
    with pytest.raises(ValueError, match=message):
        prepare(DataConfig("parquet", str(path), cache_dir=str(tmp_path / "cache"), **options))
    assert not list(tmp_path.glob("cache/**/*.bin"))


def test_a_dataset_is_validated_with_its_own_split(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    rows = {split: datasets.Dataset.from_dict({"text": [f"{split} "] * 9}) for split in ("train", "validation", "test")}
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "set")

    def read(**options):
        return prepare(DataConfig("hf", str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"), **options))

    assert set(words(read(), "validation")) == {"validation"} and read().train.num_documents == 9
    assert set(words(read(validation="test"), "validation")) == {"test"}
    with pytest.raises(ValueError, match="no split 'tst' .*type data.validation=test"):
        read(validation="tst")


def test_a_mixture_has_its_proportions_in_every_period_and_is_a_pure_function(tmp_path):
    for name, count in (("a", 900), ("b", 300)):
        (tmp_path / f"{name}.jsonl").write_bytes(lines([name * 6] * count))
    (tmp_path / "c.txt").write_text("cccccc\n" * 300)
    config = DataConfig(
        "jsonl",
        mixture=f"{tmp_path}/a.jsonl:6 {tmp_path}/b.jsonl:3 text={tmp_path}/c.txt:1",
        cache_dir=str(tmp_path / "x"),
    )
    corpus, again = prepare(config), prepare(config)
    batches = corpus.batches("train", 6, 512, seed=3)
    seen = np.concatenate([batches.batch(step).tokens for step in range(8)])
    counts = collections.Counter(chr(np.bincount(row[row < 255]).argmax()) for row in seen)
    assert sum(counts.values()) == 4096
    assert [round(counts[name] / 4096, 3) for name in "abc"] == [0.6, 0.3, 0.1]
    other = again.batches("train", 6, 512, seed=3)
    np.testing.assert_array_equal(other.batch(5, np.array([7, 300])).tokens, batches.batch(5).tokens[[7, 300]])
    assert not np.array_equal(corpus.batches("train", 6, 512, seed=4).batch(0).tokens, batches.batch(0).tokens)
    assert corpus.digest == again.digest and unigram_bits_per_byte(corpus.train) > 0.5
    for bad in ("a.jsonl", "a.jsonl:0", "a.jsonl:x", "a.jsonl:-1"):
        with pytest.raises(ValueError, match="not PATH:WEIGHT"):
            DataConfig("jsonl", mixture=bad)
    for bad, message in (
        (" ", "is empty"),
        ("a:1 a:2", "names jsonl=a twice"),
        (f"{tmp_path}/a.jsonl:1 b:1", "=b is not"),
    ):
        with pytest.raises(ValueError, match=f"data.mixture.*{message}"):
            prepare(DataConfig("jsonl", mixture=bad, cache_dir=str(tmp_path / "y")))
    assert not (tmp_path / "y").exists()  # found before the first source is tokenized
