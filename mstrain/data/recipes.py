"""Writes the two token files of each kind of source by streaming, without holding a split in memory."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

from mstrain.checks import TransientError
from mstrain.data.config import DataConfig
from mstrain.data.documents import Document, Skips, Source, text_digest
from mstrain.data.files import JsonLines, TextFiles
from mstrain.data.hf import HuggingFace
from mstrain.data.split import TRAIN, VALIDATION, Piece, Split, choose_split
from mstrain.data.synthetic import markov_tokens
from mstrain.data.token_file import TokenWriter
from mstrain.data.token_header import VERSION
from mstrain.data.tokenizers import Tokenizer, check_vocab_size, load_tokenizer, train_bpe

_GROUP_BYTES = 4 << 20
_BPE_SAMPLE_BYTES = 256 << 20
_BPE_VOCAB = 8192


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Makes one corpus: its name in the cache, and a function that writes it and returns warnings."""

    fingerprint: str
    tokenizer: Tokenizer | None
    """None when there is none (synthetic) or when it is trained while writing (bpe)."""
    trains_tokenizer: bool
    write: Callable[[Path, Callable[[int], None]], list[str]]
    revisions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Commits on the Hugging Face Hub that text ("data") and tokenizer ("tokenizer") come from."""


def synthetic_recipe(config: DataConfig, tokenizer: str, seed: int, vocab_size: int | None) -> Recipe:
    if tokenizer != "bytes":
        raise ValueError(
            f"tokenizer={tokenizer} has no effect with data=synthetic, which has no text: "
            "remove it, or choose another data="
        )
    vocab_size = 256 if vocab_size is None else vocab_size
    if not 2 <= vocab_size < 1 << 31:
        raise ValueError(f"vocab_size={vocab_size} is not between 2 and 2**31: type vocab_size=256")
    if seed < 0:
        raise ValueError(f"seed={seed} is negative: type seed=0 or more")
    held_out = max(2, round(config.num_tokens * config.validation_fraction))
    counts = {TRAIN: config.num_tokens - held_out, VALIDATION: held_out}

    def write(folder: Path, on_progress: Callable[[int], None]) -> list[str]:
        done = 0
        for stream, (side, count) in enumerate(counts.items()):
            with TokenWriter(folder / f"{side}.bin", vocab_size) as writer:
                for block in markov_tokens(seed, stream, vocab_size, count):
                    writer.append(block)
                    on_progress(done := done + len(block))
                writer.end_document(None)
        return []

    key = text_digest(f"v{VERSION} synthetic", str(seed), str(vocab_size), str(counts))
    return Recipe(key, None, False, write)


def text_recipe(config: DataConfig, spec: str, vocab_size: int | None) -> Recipe:
    check_vocab_size(spec, vocab_size)
    vocab_size = vocab_size or _BPE_VOCAB
    tokenizer = None if spec == "bpe" else load_tokenizer(spec)
    source, cache = _source(config), Path(config.cache_dir).expanduser()
    contents = source.fingerprint(cache)
    limit = config.max_skipped if config.source == "jsonl" else 1.0  # a folder of texts may contain images
    identity = f"bpe {vocab_size}" if tokenizer is None else tokenizer.digest

    def write(folder: Path, on_progress: Callable[[int], None]) -> list[str]:
        split = choose_split(source, config.validation_fraction)
        chosen, warnings = tokenizer, []
        if chosen is None:
            chosen = train_bpe(_bpe_sample(source, split), vocab_size)
            if chosen.vocab_size < vocab_size:
                warnings.append(f"the text yields {chosen.vocab_size} of vocab_size={vocab_size} tokens")
        if chosen.eod is None:
            warnings.append(f"tokenizer={spec} has no end-of-document token: documents follow without a mark")
        chosen.save(folder)
        skips = Skips(source.unit, limit)
        _write_text(source.documents(skips), split, chosen, folder, on_progress)
        skips.check()
        if source.fingerprint(cache) != contents:
            raise TransientError("the text of data.path changed while it was tokenized: run again")
        return warnings + skips.messages()

    fingerprint = text_digest(f"v{VERSION}", contents, identity, str(config.validation_fraction), str(limit))
    found = {"data": source.revision, "tokenizer": tokenizer and tokenizer.revision}
    revisions = {name: revision for name, revision in found.items() if revision}
    return Recipe(fingerprint, tokenizer, tokenizer is None, write, revisions)


def _source(config: DataConfig) -> Source:
    if config.source == "stdlib":
        return TextFiles.of_stdlib()
    if config.source == "text":
        return TextFiles.of_path(str(config.path))
    if config.source == "jsonl":
        return JsonLines(str(config.path), config.field)
    return HuggingFace(config)


def _bpe_sample(source: Source, split: Split) -> Iterator[str]:
    """The first 256 MiB of training text: more changes little, and all distinct words are held in memory."""
    done = 0
    for document in source.documents(Skips(source.unit)):
        for piece in split.pieces(document):
            if piece.split == TRAIN and piece.text:
                yield piece.text
                done += piece.num_bytes
            if done >= _BPE_SAMPLE_BYTES:
                return


def _write_text(
    documents: Iterator[Document], split: Split, tokenizer: Tokenizer, folder: Path, on_progress: Callable[[int], None]
) -> None:
    """Tokenizes documents into train.bin and validation.bin of `folder`."""
    pieces = itertools.chain.from_iterable(map(split.pieces, documents))
    done = 0
    with contextlib.ExitStack() as stack:
        writers = {
            side: stack.enter_context(TokenWriter(folder / f"{side}.bin", tokenizer.vocab_size))
            for side in (TRAIN, VALIDATION)
        }
        for group in _groups(pieces):
            ids_of_pieces = tokenizer.encode_batch([piece.text for piece in group])
            for piece, ids in zip(group, ids_of_pieces, strict=True):
                writers[piece.split].append(ids, piece.num_bytes)
                if piece.ends_document:
                    writers[piece.split].end_document(tokenizer.eod)
                done += piece.num_bytes
            on_progress(done)


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
