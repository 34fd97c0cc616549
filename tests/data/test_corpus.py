"""prepare(): made once, found again, made anew when what matters changes; safe against kills and races."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from mstrain.data import DataConfig, prepare, unigram_nats_per_token


@pytest.fixture
def config(folder, tmp_path):
    return DataConfig("text", str(folder), cache_dir=str(tmp_path / "cache"))


def folders(config):
    """Everything in the cache but the remembered digests."""
    return sorted(path for path in Path(config.cache_dir).iterdir() if path.name != "digests")


def documents(corpus, side):
    """The decoded documents of one split, in file order."""
    tokens = getattr(corpus, side).read()
    parts = np.split(tokens, np.flatnonzero(tokens == corpus.tokenizer.eod) + 1)
    assert len(parts[-1]) == 0  # the last token ends a document
    return [corpus.tokenizer.decode(part) for part in parts[:-1]]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_both_splits_together_are_the_corpus(config, folder, tokenizer):
    corpus = prepare(config, tokenizer, vocab_size=300 if tokenizer == "bpe" else None)
    train, validation = documents(corpus, "train"), documents(corpus, "validation")
    assert sorted(train + validation) == sorted(path.read_text() for path in folder.iterdir())
    assert (len(train), len(validation)) == (corpus.train.num_documents, corpus.validation.num_documents)
    assert train and validation
    assert corpus.train.text_bytes == sum(len(text.encode()) for text in train)
    assert corpus.vocab_size == (300 if tokenizer == "bpe" else 256)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_the_second_run_reads_no_text(config, monkeypatch, tokenizer):
    first = prepare(config, tokenizer)
    monkeypatch.setattr("mstrain.data.files.TextFiles.documents", None)
    second = prepare(config, tokenizer)
    assert (second.directory, second.digest) == (first.directory, first.digest)
    assert second.tokenizer.digest == first.tokenizer.digest


def test_warnings_are_repeated_when_the_cache_is_used(config, folder):
    (folder / "x.bin").write_bytes(b"\xff")
    assert (
        prepare(config).warnings
        == prepare(config).warnings
        == ("skipped 1 of 41 files that are not UTF-8, first: x.bin",)
    )


def test_a_changed_corpus_tokenizer_or_split_is_tokenized_anew(config, folder):
    seen = [prepare(config), prepare(config, "bpe"), prepare(config, "bpe", vocab_size=290)]
    seen.append(prepare(DataConfig("text", str(folder), cache_dir=config.cache_dir, validation_fraction=0.3)))
    (folder / "07.txt").write_text("The 8th Straße, δοκιμή 😀.\n" * 17)  # same size, other text
    seen.append(prepare(config))
    (folder / "new.txt").write_text("one more")
    seen.append(prepare(config))
    assert len({corpus.directory for corpus in seen}) == len({corpus.digest for corpus in seen}) == 6


def test_adding_a_file_keeps_the_others_on_their_side(config, folder):
    before = prepare(config)
    (folder / "00a.txt").write_text("one more")
    after = prepare(config)
    for side in ("train", "validation"):
        assert [text for text in documents(after, side) if text != "one more"] == documents(before, side)


def test_the_same_contents_elsewhere_are_not_tokenized_again(config, folder, tmp_path):
    first = prepare(config)
    shutil.copytree(folder, tmp_path / "moved", copy_function=shutil.copyfile)
    os.utime(tmp_path / "moved" / "01.txt", (1, 1))
    second = prepare(DataConfig("text", str(tmp_path / "moved"), cache_dir=config.cache_dir))
    assert second.digest == first.digest and second.directory == first.directory


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_a_killed_process_is_continued_where_it_was(config, folder, tmp_path, monkeypatch, tokenizer):
    """The tokens are those of an uninterrupted run, and what was saved is not tokenized again."""
    script = f"""
import os
from mstrain.data import DataConfig, prepare, writing
writing._GROUP_BYTES, writing._SAVE_SECONDS = 3000, 0.0
config = DataConfig("text", {str(folder)!r}, cache_dir={config.cache_dir!r})
prepare(config, {tokenizer!r}, on_progress=lambda progress: progress.done > 12000 and os._exit(9))
"""
    assert subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[2]).returncode == 9
    assert [path.name[:5] for path in folders(config)] == [".tmp-"]
    seen = []
    corpus = prepare(config, tokenizer, on_progress=seen.append)
    assert 0 < seen[-1].made < seen[-1].done - 8000
    assert folders(config) == [corpus.directory]
    whole = prepare(DataConfig("text", str(folder), cache_dir=str(tmp_path / "other")), tokenizer)
    assert corpus.digest == whole.digest


def test_a_failure_halfway_cleans_up(config, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mstrain.data.token_file.TokenWriter.append", full)
    with pytest.raises(ValueError, match="No space left.*data.cache_dir="):
        prepare(config)
    assert folders(config) == []


@pytest.mark.parametrize("refusal", [None, FileNotFoundError(2, "No such file"), PermissionError(13, "Denied")])
def test_a_cache_folder_that_cannot_be_written_is_refused(folder, monkeypatch, refusal):
    """FileNotFoundError, too: /proc refuses new folders with it, and it may mean that another process has finished."""

    def refuse(*_, **__):
        raise refusal

    if refusal:
        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match="type data.cache_dir= of a writable folder"):
        prepare(DataConfig("text", str(folder), cache_dir=str(folder / "00.txt")))


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "corpus.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncate", "remove"])
def test_a_damaged_cache_is_tokenized_anew_and_says_so(config, name, damage):
    first = prepare(config, "bpe", vocab_size=300)
    path = first.directory / name
    if damage == "truncate":
        os.truncate(path, path.stat().st_size - 3)
    else:
        path.unlink()
    second = prepare(config, "bpe", vocab_size=300)
    assert second.digest == first.digest and "tokenized again" in second.warnings[-1]
    assert prepare(config, "bpe", vocab_size=300).digest == first.digest


def test_processes_that_prepare_at_once_agree(config, folder):
    script = f"""
import time
from mstrain.data import DataConfig, prepare
time.sleep(max(0, {time.time() + 1.0!r} - time.time()))
print(prepare(DataConfig("text", {str(folder)!r}, cache_dir={config.cache_dir!r})).digest)
"""
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", script], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    digests = {run.communicate()[0] for run in runs}
    assert [run.returncode for run in runs] == [0, 0, 0] and len(digests) == 1
    assert folders(config) == [prepare(config).directory]


def test_a_rename_that_comes_second_gives_way(config, monkeypatch):
    """Another process publishes in the instant between our check and our rename."""
    rename = os.replace

    def beaten(source, target):
        shutil.copytree(source, target)
        rename(source, target)

    monkeypatch.setattr(os, "replace", beaten)
    corpus = prepare(config)
    assert folders(config) == [corpus.directory]


def test_bpe_learns_nothing_from_held_out_documents(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    words = {"a": "alpha", "b": "bravo"}
    for name, word in words.items():
        (folder / name).write_text(f"{word} " * 100)
    config = DataConfig("text", str(folder), cache_dir=str(tmp_path / "cache"))
    corpus = prepare(config, "bpe", vocab_size=300)
    held_out = corpus.tokenizer.decode(corpus.validation.read())[:5]
    kept = next(word for word in words.values() if word != held_out)
    assert len(corpus.tokenizer.encode(kept)) == 1 and len(corpus.tokenizer.encode(held_out)) == 5


def test_progress_counts_every_byte(config, folder, monkeypatch):
    monkeypatch.setattr("mstrain.data.writing._GROUP_BYTES", 5000)
    seen = []
    prepare(config, on_progress=lambda progress: seen.append(progress.done))
    assert len(seen) > 3 and seen == sorted(seen)
    assert seen[-1] == sum(path.stat().st_size for path in folder.iterdir())


def test_synthetic_tokens_depend_on_seed_and_vocabulary_only(tmp_path):
    def make(cache, **options):
        return prepare(DataConfig("synthetic", num_tokens=20000, cache_dir=str(tmp_path / cache)), **options)

    corpus = make("a", seed=1, vocab_size=1000)
    assert (corpus.train.num_tokens, corpus.validation.num_tokens) == (19000, 1000)
    assert corpus.vocab_size == 1000 and corpus.tokenizer is None and not corpus.train.text_bytes
    assert make("b", seed=1, vocab_size=1000).digest == corpus.digest
    assert len({corpus.digest, make("a", seed=2, vocab_size=1000).digest, make("a", seed=1).digest}) == 3
    assert unigram_nats_per_token(corpus.train) == pytest.approx(np.log(1000), abs=0.1)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tokenizer": "bpe"}, "tokenizer=bpe has no effect with data=synthetic"),
        ({"vocab_size": 1}, "type vocab_size=256"),
        ({"seed": -1}, "type seed=0 or more"),
    ],
)
def test_bad_options_of_the_synthetic_source(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        prepare(DataConfig("synthetic", cache_dir=str(tmp_path)), **options)


@pytest.mark.parametrize(
    "tokenizer, vocab_size, message",
    [
        ("bytes", 300, "vocab_size=300 has no effect with tokenizer=bytes"),
        ("bpe", 256, "type vocab_size=257 or more"),
    ],
)
def test_a_vocabulary_size_without_effect_is_refused(config, tokenizer, vocab_size, message):
    with pytest.raises(ValueError, match=message):
        prepare(config, tokenizer, vocab_size=vocab_size)
