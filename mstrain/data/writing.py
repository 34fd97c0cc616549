"""Tokenizes documents into the token files of both splits: ahead of the reader, with progress, and resumable."""

import contextlib
import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from mstrain.data.split import TRAIN, VALIDATION, Piece
from mstrain.data.token_file import ANSWER, START, TokenWriter
from mstrain.data.tokenizers import Tokenizer
from mstrain.json_files import replace_text

PROGRESS_FILE = "progress.json"
_GROUP_BYTES = 4 << 20
_SAVE_SECONDS = 10.0  # between two states that a killed run can resume from
T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far tokenizing is: `done` bytes of text, of which `made` in this process within `seconds`."""

    done: int
    made: int
    seconds: float
    fraction: float | None
    """Of the source, by the bytes or rows that were read; None when not known."""

    def __str__(self) -> str:
        rate = self.made / max(self.seconds, 1e-9)
        text = f"{self.done / 1e6:,.0f} MB of text, {rate / 1e6:.1f} MB/s"
        if self.fraction and self.made:
            begun = self.fraction * (1 - self.made / self.done)  # of the source, when this process started
            left = self.seconds * (1 - self.fraction) / max(self.fraction - begun, 1e-9)
            text += f", {self.fraction:.0%}, " + (f"{left / 60:.0f} min left" if left >= 90 else f"{left:.0f} s left")
        return text


def write_tokens(
    pieces: Iterator[Piece], tokenizer: Tokenizer, folder: Path, chat: bool, report: Callable[[int, int, float], None]
) -> None:
    """Writes train.bin and validation.bin of `folder`, for conversations with marks, from where a killed call stopped.

    `report` gets (bytes of text done, bytes done by this call, its seconds) after every group.
    """
    state = read_state(folder) or {"pieces": 0, "files": {}}
    count, first = state["pieces"], sum(counts["text_bytes"] for counts in state["files"].values())
    done, begun, saved = first, time.perf_counter(), time.monotonic()
    write = _write_chats if chat else _write_texts
    vocab_sizes = {".bin": tokenizer.vocab_size, **({".marks": 4} if chat else {})}
    with contextlib.ExitStack() as stack:
        writers = {}
        for name, size in ((side + end, size) for side in (TRAIN, VALIDATION) for end, size in vocab_sizes.items()):
            writers[name] = stack.enter_context(TokenWriter(folder / name, size, state["files"].get(name)))
        for group in ahead(_groups(itertools.islice(pieces, count, None))):
            write(group, tokenizer, writers)
            count += len(group)
            done += sum(piece.num_bytes for piece in group)
            if time.monotonic() - saved > _SAVE_SECONDS:
                _save_state(folder, count, writers)
                saved = time.monotonic()
            report(done, done - first, time.perf_counter() - begun)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(folder / PROGRESS_FILE)


def _write_texts(group: list[Piece], tokenizer: Tokenizer, writers: dict[str, TokenWriter]) -> None:
    for piece, ids in zip(group, tokenizer.encode_batch([piece.text for piece in group]), strict=True):
        writer = writers[piece.split + ".bin"]
        if tokenizer.bos is not None and piece.begins_document:
            writer.append(np.array([tokenizer.bos]))
        writer.append(ids, piece.num_bytes)
        if piece.ends_document:
            writer.end_document(tokenizer.eod)


def _write_chats(group: list[Piece], tokenizer: Tokenizer, writers: dict[str, TokenWriter]) -> None:
    for piece in group:
        tokens, marks = writers[piece.split + ".bin"], writers[piece.split + ".marks"]
        if piece.ends_document:
            tokens.num_documents += 1
            continue
        ids, answers = tokenizer.encode_spans(piece.text, piece.answers or ())
        # A template usually ends an answer with the end of document, perhaps before a line end.
        if tokenizer.eod is not None and tokenizer.eod not in ids[-2:]:
            ids, answers = np.append(ids, tokenizer.eod), np.append(answers, answers[-1:])
        if tokenizer.bos is not None and ids[0] != tokenizer.bos:
            ids, answers = np.insert(ids, 0, tokenizer.bos), np.insert(answers, 0, False)
        flags = answers * ANSWER
        flags[0] |= START
        tokens.append(ids, piece.num_bytes)
        marks.append(flags)


def ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items, the next one made in a thread while one is used."""
    iterator = iter(items)
    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(next, iterator, None)
        while (item := following.result()) is not None:
            following = pool.submit(next, iterator, None)
            yield item


def _groups(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Lists of about 4 MiB of text: enough for a tokenizer to use every core, little enough to hold."""
    group, size = [], 0
    for piece in pieces:
        group.append(piece)
        size += piece.num_bytes
        if size >= _GROUP_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _save_state(folder: Path, pieces: int, writers: dict[str, TokenWriter]) -> None:
    files = {name: writer.sync() for name, writer in writers.items()}
    sizes = {name: os.path.getsize(folder / name) for name in files}
    replace_text(folder / PROGRESS_FILE, json.dumps({"pieces": pieces, "files": files, "sizes": sizes}))


def read_state(folder: Path) -> dict | None:
    """The state that a killed call has left in `folder`; None without one, or when its files are shorter."""
    try:
        state = json.loads((folder / PROGRESS_FILE).read_text())
        whole = all(os.path.getsize(folder / name) >= size for name, size in state["sizes"].items())
    except (OSError, ValueError, KeyError):
        return None
    return state if whole else None
