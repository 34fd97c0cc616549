"""Configs and files as people (and accidents) make them: each is read, counted or refused with the fix."""

import gzip
import io
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mstrain.data import DataConfig, prepare
from mstrain.data.documents import Skips
from mstrain.data.files import JsonLines, TextFiles
from mstrain.data.listing import Files, listing


def of_path(kind, path, *options):
    """A source of a file, folder or pattern."""
    return kind(listing(path, kind.endings), *options)


def read(source):
    """({name: text}, skip messages) of one pass."""
    skips = Skips(source.unit)
    texts = {}
    for document in source.documents(skips):
        texts[document.name] = "".join(document.chunks)
        assert len(texts[document.name].encode()) == document.num_bytes
    return texts, skips.messages()


@pytest.mark.parametrize(
    "options, message",
    [
        ({"source": "stdlb"}, "type data=stdlib$"),
        ({"source": "json"}, "type data=jsonl$"),
        ({"source": "text"}, "add data.path="),
        ({"source": "stdlib", "path": "x"}, "data.path=x has no effect with data=stdlib: remove it"),
        (
            {"source": "text", "path": "x", "field": "body"},
            "field=body has no effect.*data=jsonl or .* or data=hf",
        ),
        ({"source": "jsonl", "path": "x", "name": "en"}, "data.name=en has no effect"),
        ({"num_tokens": 5000}, "data.num_tokens=5000 has no effect .* data=synthetic"),
        ({"source": "synthetic", "num_tokens": 10}, "type data.num_tokens=1024 or more"),
        ({"source": "text", "path": "x", "max_skipped": 0.5}, "max_skipped=0.5 has no effect with data=text"),
        ({"source": "jsonl", "path": "x", "max_skipped": 2}, "type for example data.max_skipped=0.01"),
        ({"source": "synthetic", "num_tokens": "many"}, "is not a number"),
        ({"source": "text", "path": 7}, "data.path='7'"),
        ({"validation_fraction": 0}, "type for example data.validation_fraction=0.05"),
        ({"validation_fraction": float("nan")}, "type for example data.validation_fraction=0.05"),
        ({"validation_fraction": True}, "is not a number"),
        ({"cache_dir": ""}, "data.cache_dir"),
    ],
)
def test_a_bad_config_is_refused_with_the_fix(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**options)


def test_text_folder_is_recursive_sorted_and_verbatim(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {"b/a.md": "é\r\n\n", "c": "\0x", "a.txt": "1", "empty": "", ".git/x": "no"}.items():
        (tmp_path / name).write_bytes(content.encode())
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for ever
    texts, skipped = read(of_path(TextFiles, str(tmp_path)))
    assert list(texts.items()) == [("a.txt", "1"), ("b/a.md", "é\r\n\n"), ("c", "\0x")]
    assert skipped == []


@pytest.mark.parametrize("chunk_bytes", [1, 2, 7, 50, 61])
def test_large_files_are_read_in_chunks_that_lose_nothing(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr("mstrain.data.files._CHUNK_BYTES", chunk_bytes)
    content = "ab\nδοκιμή 😀😀😀😀\n\n" * 9 + "no end"
    (tmp_path / "long.txt").write_text(content, newline="")
    (tmp_path / "late.txt").write_bytes(b"fine so far, " * 9 + b"\xf0\x9f")
    texts, skipped = read(of_path(TextFiles, str(tmp_path)))
    assert texts == {"long.txt": content}
    assert skipped == ["skipped 1 of 2 files that are not UTF-8, first: late.txt"]


def test_files_that_are_not_utf8_are_counted(folder):
    (folder / "05.bin").write_bytes(b"\xff\xfe\0")
    with open(os.fsencode(folder) + b"/\xff.txt", "wb") as file:  # a name no terminal can print
        file.write(b"\xff")
    texts, skipped = read(of_path(TextFiles, str(folder)))
    assert len(texts) == 40
    assert skipped == ["skipped 2 of 42 files that are not UTF-8, first: 05.bin"]


def test_a_file_that_vanishes_is_counted(folder):
    source = of_path(TextFiles, str(folder))
    (folder / "03.txt").unlink()
    texts, skipped = read(source)
    assert len(texts) == 39 and skipped == ["skipped 1 of 40 files that cannot be read, first: 03.txt"]


def test_a_file_is_not_closed_while_progress_asks_for_its_position(folder, monkeypatch):
    """A file's `tell` takes its descriptor, lets other threads run, and seeks."""
    asked = threading.Event()

    class Slow(io.FileIO):
        def tell(self):
            descriptor = self.fileno()
            if threading.current_thread() is not threading.main_thread():
                asked.set()
                time.sleep(0.05)
            return os.lseek(descriptor, 0, os.SEEK_CUR)

    monkeypatch.setattr(Files, "raw", lambda files, name: Slow(files.path(name)))
    source = of_path(TextFiles, str(folder))
    with ThreadPoolExecutor(1) as pool:
        with source._open("00.txt"):
            found = pool.submit(lambda: source.fraction)
            assert asked.wait(5)
        assert found.result() is not None


def test_the_standard_library_needs_no_network_and_has_no_tests():
    texts, skipped = read(TextFiles.of_stdlib())
    assert "json/decoder.py" in texts
    assert not any(name.startswith(("test/", "site-packages/")) for name in texts)
    assert skipped == [] and sum(map(len, texts.values())) > 5e6


def test_broken_json_lines_are_counted_by_file_and_line(tmp_path):
    lines = [
        json.dumps({"body": "one"}),
        "{bad",
        "",
        "[" * 100000,
        '"text"',
        '{"bodies": "x"}',
        '{"body": 3}',
        '{"body": "\\ud800"}',
        '{"body": ""}',
        "9" * 10000,
        json.dumps({"body": "zwölf"}),
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "ignored.txt").write_text("no")
    texts, skipped = read(of_path(JsonLines, str(tmp_path), "body"))
    assert texts == {"a.jsonl:1": "one", "a.jsonl:11": "zwölf"}
    assert skipped == [
        "skipped 3 of 10 lines that are not JSON, first: a.jsonl:2",
        "skipped 3 of 10 lines without text under 'body', first: a.jsonl:5",
        "skipped 1 of 10 lines whose text is not valid Unicode, first: a.jsonl:8",
    ]


def test_json_lines_are_utf8_and_may_begin_with_a_byte_order_mark(tmp_path):
    lines = '{"text": "one"}\n{"text": "zwölf"}\n'
    (tmp_path / "a.jsonl").write_bytes(lines.encode("utf-8-sig"))
    assert read(of_path(JsonLines, str(tmp_path / "a.jsonl"), "text"))[0] == {"a.jsonl:1": "one", "a.jsonl:2": "zwölf"}
    (tmp_path / "b.jsonl").write_bytes((lines * 5).encode("utf-16"))
    texts, skipped = read(of_path(JsonLines, str(tmp_path / "b.jsonl"), "text"))
    assert not texts and skipped == ["skipped 11 of 11 lines that are not JSON, first: b.jsonl:1"]


def test_a_wrong_field_names_the_right_one(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"content": "x", "id": 1}\n' * 3)
    with pytest.raises(ValueError, match="3 of 3 lines without text under 'text'.*data.field=content"):
        prepare(DataConfig("jsonl", str(tmp_path), cache_dir=str(tmp_path / "cache")))


def jsonl(folder, lines, name="a.jsonl", **options):
    """A corpus of these lines."""
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    return prepare(DataConfig("jsonl", str(folder / name), cache_dir=str(folder / "cache"), **options))


def test_broken_json_lines_are_refused_by_file_and_line_beyond_a_share(tmp_path):
    good = [json.dumps({"text": f"line {number}"}).encode() for number in range(150)]
    assert jsonl(tmp_path, [*good, b"{bad"]).warnings == (
        "skipped 1 of 151 lines that are not JSON, first: a.jsonl:151",
    )
    broken = [*good, b"{bad", b"5"]
    message = "skipped 1 of 152 .* first: a.jsonl:151; skipped 1 .* first: a.jsonl:152: correct them, or type"
    for _ in range(2):
        with pytest.raises(ValueError, match=message + " data.max_skipped=1"):
            jsonl(tmp_path, broken)
    assert len(jsonl(tmp_path, broken, max_skipped=1).warnings) == 2
    with pytest.raises(ValueError, match=message):  # the corpus made by the lenient run is not taken
        jsonl(tmp_path, broken)


def test_many_broken_lines_are_refused_before_all_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr("mstrain.data.documents._MANY", 100)
    good = [json.dumps({"text": "x"}).encode()] * 60
    with pytest.raises(ValueError, match="skipped 40 of 100 lines that are not JSON, first: a.jsonl:61"):
        jsonl(tmp_path, [*good, *[b"{"] * 500])


def compress(kind, data):
    """Two compressed streams, one after the other, as parallel compressors write them."""
    if kind == "gz":
        return gzip.compress(data[:100]) + gzip.compress(data[100:])
    pyarrow = pytest.importorskip("pyarrow")
    parts = []
    for part in (data[:100], data[100:]):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(part)
        parts.append(sink.getvalue().to_pybytes())
    return b"".join(parts)


@pytest.mark.parametrize("chunk_bytes", [50, 1 << 20])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_compressed_files_are_read_as_their_text(tmp_path, monkeypatch, kind, chunk_bytes):
    monkeypatch.setattr("mstrain.data.files._CHUNK_BYTES", chunk_bytes)
    texts = ["δοκιμή 😀\n" * 40, "one\ntwo"]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / f"a.jsonl.{kind}").write_bytes(compress(kind, lines.encode()))
    assert list(read(of_path(JsonLines, str(tmp_path), "text"))[0].values()) == texts
    (tmp_path / f"a.jsonl.{kind}").rename(tmp_path / "by mistake.jsonl")
    assert list(read(of_path(JsonLines, str(tmp_path), "text"))[0].values()) == texts
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / f"a.txt.{kind}").write_bytes(compress(kind, texts[0].encode()))
    (tmp_path / "t" / f"b.{kind}").write_bytes(compress(kind, b"\xff" * 200))
    assert read(of_path(TextFiles, str(tmp_path / "t"))) == (
        {f"a.txt.{kind}": texts[0]},
        [f"skipped 1 of 2 files that are not UTF-8, first: b.{kind}"],
    )


@pytest.mark.parametrize("source", ["text", "jsonl"])
@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_a_truncated_compressed_file_is_named(tmp_path, kind, source):
    words = np.random.default_rng(0).integers(0, 1000, 9000)
    lines = b"".join(json.dumps({"text": f"word {word}"}).encode() + b"\n" for word in words)
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compress(kind, lines)[:-9])
    with pytest.raises(ValueError, match=f"{path} is truncated or damaged"):
        prepare(DataConfig(source, str(path), cache_dir=str(tmp_path / "cache")))
    assert not list(tmp_path.glob("cache/*/*.bin"))


def test_patterns_choose_files(tmp_path):
    for name in ("a.md", "b.txt", "x/c.md", "x/y/d.md", "x/.e.md", "[z].md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for pattern, names in {
        "*.md": ["[z].md", "a.md"],
        "**/*.md": ["[z].md", "a.md", "x/c.md", "x/y/d.md"],
        "x/?.md": ["c.md"],
        "[ab].*": ["a.md", "b.txt"],
        "[z].md": ["[z].md"],
        "*": ["[z].md", "a.md", "b.txt"],
    }.items():
        assert list(read(of_path(TextFiles, str(tmp_path / pattern)))[0]) == names, pattern
    with pytest.raises(ValueError, match="matches no file"):
        of_path(TextFiles, str(tmp_path / "*.rst"))


def test_a_file_that_cannot_be_read_is_refused_and_not_half_read(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "x"}\n')
    source = of_path(JsonLines, str(path), "text")
    path.unlink()
    with pytest.raises(ValueError, match=f"cannot read {path}"):
        read(source)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "is not a file or folder.*perhaps .*corpus2.txt"),
        (b"", "all 1 files are empty"),
        (b"\xff", "not UTF-8, first: corpus.txt"),
        (b"x", "the validation split holds"),
    ],
)
def test_a_corpus_without_text_is_refused(tmp_path, content, message):
    path = tmp_path / "corpus.txt"
    (tmp_path / "corpus2.txt").write_text("")
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare(DataConfig("text", str(path), cache_dir=str(tmp_path / "cache")))
    assert not list((tmp_path).glob("cache/*/*.bin"))


def test_empty_validation_data_are_named(folder, tmp_path):
    (tmp_path / "empty").write_text("")
    config = DataConfig("text", str(folder), validation=str(tmp_path / "empty"), cache_dir=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match="the validation split holds 0 tokens.*data.validation="):
        prepare(config)


def test_a_folder_without_such_files_is_refused(folder):
    with pytest.raises(ValueError, match=r"has no \*.jsonl or \*.ndjson files"):
        of_path(JsonLines, str(folder), "text")


def put(folder, words, suffix):
    """Three files whose names, sizes and times do not depend on `words` of equal length."""
    folder.mkdir(exist_ok=True)
    for number, word in enumerate(words):
        path = folder / f"{number}{suffix}"
        path.write_text(json.dumps({"text": f"{word} " * 300}) + "\n")
        os.utime(path, (1, 1))
    return folder


@pytest.mark.parametrize("source, suffix", [("text", ".txt"), ("jsonl", ".jsonl"), ("hf", ".jsonl")])
def test_a_corpus_is_known_by_its_contents_and_not_by_names_sizes_and_times(tmp_path, monkeypatch, source, suffix):
    monkeypatch.setattr("mstrain.data.file_digests.SETTLED_SECONDS", 0.0)
    one, two = put(tmp_path / "a", ("hop", "jig", "box"), suffix), put(tmp_path / "b", ("hop", "jig", "bag"), suffix)

    def read(folder):
        corpus = prepare(DataConfig(source, str(folder), cache_dir=str(tmp_path / "cache")))
        return corpus.digest, {word for word in corpus.tokenizer.decode(corpus.train.read()).split() if len(word) == 3}

    first, other = read(one), read(two)
    assert first[0] != other[0] and first == read(one)
    put(one, ("hop", "jig", "bag"), suffix)  # in place: same inodes too
    assert read(one) == other


def test_text_that_changes_while_it_is_tokenized_is_refused(folder, tmp_path):
    config = DataConfig("text", str(folder), cache_dir=str(tmp_path / "cache"))

    def change(done):
        (folder / "07.txt").write_text("other")

    with pytest.raises(ValueError, match="changed while it was tokenized: run again"):
        prepare(config, on_progress=change)
    assert prepare(config).train.num_documents > 30


def test_unchanged_text_is_not_read_again(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mstrain.data.file_digests.SETTLED_SECONDS", 0.0)
    source, cache = of_path(TextFiles, str(folder)), tmp_path / "cache"
    before = source.fingerprint(cache)
    monkeypatch.setattr("hashlib.file_digest", None)
    assert source.fingerprint(cache) == before
    (folder / "07.txt").touch()
    with pytest.raises(TypeError):
        source.fingerprint(cache)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """Datasets on disk in every form: saved, saved with splits, parquet and JSON lines."""
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    root = tmp_path_factory.mktemp("hub")
    rows = {"body": [f"row {n} 😀 " * 9 for n in range(60)] + [None, ""], "n": list(range(62))}
    dataset = datasets.Dataset.from_dict(rows)
    dataset.save_to_disk(root / "saved")
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(5))}).save_to_disk(root / "splits")
    dataset.to_parquet(root / "rows.parquet")
    dataset.to_json(root / "rows.jsonl")
    (root / "script.py").write_text("raise SystemExit('ran')")
    (root / "rows.xyz").write_text("")
    return root


@pytest.mark.parametrize("name", ["saved", "splits", "rows.parquet", "rows.jsonl"])
def test_hugging_face_datasets_on_disk(hub, tmp_path, monkeypatch, name):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")
    config = DataConfig("hf", str(hub / name), field="body", cache_dir=str(tmp_path / "cache"))
    corpus = prepare(config)
    assert corpus.train.num_documents + corpus.validation.num_documents == 60
    texts = sorted(corpus.tokenizer.decode(corpus.train.read()).split("row "))
    assert len(texts) == 9 * corpus.train.num_documents + 1 and texts[-1].endswith(" 😀 ")
    assert corpus.warnings == ("skipped 1 of 62 rows without text in column 'body', first: row 60",)
    assert prepare(config).directory == corpus.directory


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("saved", {"field": "bdy"}, "columns: body, n.*type data.field=body"),
        ("saved", {"field": "n"}, "skipped 62 of 62 rows without text"),
        ("saved", {"field": "body", "split": "test"}, "has no effect: remove it"),
        ("splits", {"field": "body", "split": "tst"}, "splits: train, test.*type data.split=test"),
        ("saved", {"field": "body", "revision": "main"}, "revision=main has no effect with the local"),
        ("script.py", {}, "scripts are not run"),
        ("rows.xyz", {}, "convert it"),
        ("nothing/here", {}, "check the name and the network"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(hub, tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(DataConfig("hf", str(hub / name), cache_dir=str(tmp_path), **options))
