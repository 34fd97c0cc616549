"""How the token files of each kind of source are made: their name in the cache, and the function that writes them."""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mstrain.checks import TransientError
from mstrain.data.chat import DEFAULT_TEMPLATE, Chats, Template
from mstrain.data.config import DataConfig
from mstrain.data.documents import Skips, Source, printable, text_digest
from mstrain.data.files import JsonLines, ParquetFiles, TextFiles
from mstrain.data.hf import HuggingFace
from mstrain.data.listing import Files, split_listing, states_split
from mstrain.data.split import TRAIN, VALIDATION, Split, choose_split
from mstrain.data.synthetic import markov_tokens
from mstrain.data.token_file import TokenWriter
from mstrain.data.token_header import VERSION
from mstrain.data.tokenizers import (
    EOD_NAMES,
    SPECIAL_TOKENS,
    TOKENIZER_FILE,
    Tokenizer,
    check_vocab_size,
    load_tokenizer,
    marked,
    special_token,
    train_bpe,
)
from mstrain.data.writing import Progress, read_state, write_tokens

KINDS = {"text": TextFiles, "jsonl": JsonLines, "parquet": ParquetFiles, "chat": Chats}
_BPE_SAMPLE_BYTES = 256 << 20
_BPE_VOCAB = 8192


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Makes one corpus: its name in the cache, and a function that writes it and returns warnings."""

    fingerprint: str
    tokenizer: Tokenizer | None
    """None without one (synthetic) or when it is trained while writing (bpe)."""
    trains_tokenizer: bool
    write: Callable[[Path, Callable[[Progress], None]], list[str]]
    revisions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Commits on the Hugging Face Hub that text ("data") and tokenizer ("tokenizer") come from."""
    marks: tuple[str, str] = ("auto", "auto")
    """data.bos and data.eos."""


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

    def write(folder: Path, on_progress: Callable[[Progress], None]) -> list[str]:
        done, begun = 0, time.perf_counter()
        total = sum(counts.values())
        for stream, (side, count) in enumerate(counts.items()):
            with TokenWriter(folder / f"{side}.bin", vocab_size) as writer:
                for block in markov_tokens(seed, stream, vocab_size, count):
                    writer.append(block)
                    done += len(block)
                    on_progress(Progress(done, done, time.perf_counter() - begun, done / total))
                writer.end_document(None)
        return []

    key = text_digest(f"v{VERSION} synthetic", str(seed), str(vocab_size), str(counts))
    return Recipe(key, None, False, write)


def text_recipe(config: DataConfig, spec: str, vocab_size: int | None, window: tuple[str, ...] | None = None) -> Recipe:
    """Of all training files, or those of a `window`."""
    check_vocab_size(spec, vocab_size)
    vocab_size = vocab_size or _BPE_VOCAB
    tokenizer = None if spec == "bpe" else load_tokenizer(spec)
    described = marked(tokenizer, config.bos, config.eos) if tokenizer else ""
    source, held_out, notes = _sources(config, tokenizer, window)
    cache = Path(config.cache_dir).expanduser()

    def contents() -> str:
        digest = source.fingerprint(cache)
        return text_digest(digest, held_out.fingerprint(cache)) if held_out else digest

    before = contents()
    limit = config.max_skipped if "max_skipped" in config.options_read else 1.0  # a folder of texts may contain images

    def write(folder: Path, on_progress: Callable[[Progress], None]) -> list[str]:
        split = Split(0.0) if held_out else choose_split(source, config.validation_fraction)
        chosen, warnings = tokenizer, list(notes)
        if chosen is None:
            chosen = _trained(source, split, vocab_size, folder)
            marked(chosen, config.bos, config.eos)
            if chosen.vocab_size < vocab_size:
                warnings.append(f"the text yields {chosen.vocab_size} of vocab_size={vocab_size} tokens")
        if chosen.eod is None and config.eos == "auto":
            warnings.append(f"tokenizer={spec} has no end-of-document token: nothing separates documents")
        chosen.save(folder)
        reading = [(source, split, Skips(source.unit, limit))]
        if held_out:
            reading.append((held_out, Split(1.0), Skips(held_out.unit, limit)))
        pieces = itertools.chain.from_iterable(
            split.pieces(d) for s, split, skips in reading for d in s.documents(skips)
        )

        def report(done: int, made: int, seconds: float) -> None:
            on_progress(Progress(done, made, seconds, source.fraction))

        write_tokens(pieces, chosen, folder, config.source == "chat", report)
        for _, _, skips in reading:
            skips.check()
            warnings += skips.messages()
        if places := [place for _, _, skips in reading for place in skips.places]:
            (folder / "skipped.txt").write_text("\n".join(places) + "\n")
        if contents() != before:
            raise TransientError("the text of data.path changed while it was tokenized: run again")
        return warnings

    identity = f"bpe {vocab_size} {config.bos} {config.eos}" if tokenizer is None else f"{tokenizer.digest} {described}"
    fingerprint = text_digest(f"v{VERSION}", before, identity, str(config.validation_fraction), str(limit))
    found = {"data": source.revision, "tokenizer": tokenizer and tokenizer.revision}
    revisions = {name: revision for name, revision in found.items() if revision}
    return Recipe(fingerprint, tokenizer, tokenizer is None, write, revisions, (config.bos, config.eos))


def document_names(config: DataConfig, tokenizer: Tokenizer | None) -> dict[str, list[str]]:
    """The names of the documents of both splits, in the order of their token files; reads the text again."""
    source, held_out, _ = _sources(config, tokenizer, None)
    reading = [(source, Split(0.0) if held_out else choose_split(source, config.validation_fraction))]
    reading += [(held_out, Split(1.0))] if held_out else []
    names: dict[str, list[str]] = {TRAIN: [], VALIDATION: []}
    for each, split in reading:
        for document in each.documents(Skips(each.unit)):
            for piece in split.pieces(document):
                if piece.begins_document:
                    names[piece.split].append(document.name)
    return names


def split_files(config: DataConfig) -> tuple[Files, Files | None, Files | None]:
    """(training, validation, other) files of a source of files; validation is None where documents are held out."""
    return split_listing(str(config.path), config.validation, KINDS[config.source].endings)


def _sources(
    config: DataConfig, tokenizer: Tokenizer | None, window: tuple[str, ...] | None
) -> tuple[Source, Source | None, list[str]]:
    """(training, validation or None, remarks); without validation data, documents of the first are held out."""
    if config.source == "stdlib":
        return TextFiles.of_stdlib(), None, []
    if config.source == "hf":
        return *HuggingFace.of_config(config), []
    make = _file_source(config, tokenizer)
    train, held_out, rest = split_files(config)
    train = train.only(window) if window else train
    notes = []
    if rest:
        notes.append(f"{len(rest.names)} files of other splits are not read, first: {printable(rest.names[0])}")
        if not all(map(states_split, rest.names)):
            notes[0] += f" ({len(train.names)} have train in their names; to read all, type data.validation=FILE)"
    if train.links:
        links = f"{len(train.links)} links to folders are not followed, first: {printable(train.links[0])}"
        notes.append(f"{links}: type a pattern, data.path='FOLDER/**/*', which follows them")
    return make(train), make(held_out) if held_out else None, notes


def _file_source(config: DataConfig, tokenizer: Tokenizer | None) -> Callable[[Files], Source]:
    kind = KINDS[config.source]
    if kind is not Chats:
        return functools.partial(kind, **({"field": config.field} if config.source != "text" else {}))
    if tokenizer is None:
        raise ValueError("tokenizer=bpe has no chat template and cannot be trained on data=chat: type tokenizer=FOLDER")
    return functools.partial(Chats, template=chat_template(config, tokenizer))


def chat_template(config: DataConfig, tokenizer: Tokenizer) -> Template:
    """That of data.template, or the tokenizer's, or the default one."""
    tokens = {name: text for name in SPECIAL_TOKENS if (text := special_token(tokenizer.settings, name))}
    own = tokenizer.settings.get("chat_template")
    if config.template:
        try:
            own = Path(config.template).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read data.template={config.template} ({error}): give a Jinja file") from None
    if isinstance(own, list):  # several by name
        own = next((entry["template"] for entry in own if entry.get("name") == "default"), None)
    if own is not None and not isinstance(own, str):
        raise ValueError(f"the tokenizer's chat_template is {own!r}, not a text: give another, data.template=FILE")
    # Without a stated one, the token that ends documents, so that every answer of a conversation ends with it.
    ends = (name for name in (config.eos, *EOD_NAMES) if tokenizer.eod is not None)
    eos = next((name for name in ends if tokenizer.token_id(name) == tokenizer.eod), "")
    return Template(own or DEFAULT_TEMPLATE, {"bos_token": "", "eos_token": eos, **tokens})


def _trained(source: Source, split: Split, vocab_size: int, folder: Path) -> Tokenizer:
    """A BPE of the training text; that of a killed call in `folder`, whose tokens are continued."""
    if read_state(folder):
        return load_tokenizer(str(folder / TOKENIZER_FILE))
    return train_bpe(_bpe_sample(source, split), vocab_size)


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
