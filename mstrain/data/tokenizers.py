"""Converts text to token ids and back with one interface: bytes, a trained BPE, or any Hugging Face tokenizer."""

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from mstrain.data.documents import text_digest

TOKENIZER_FILE = "tokenizer.json"
_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_SMALLEST_BPE = 257  # 256 bytes and the end-of-document token


class Tokenizer(Protocol):
    """Ids are int64 arrays [n]; `decode` drops end-of-document tokens; `eod` is None when there is none."""

    vocab_size: int
    eod: int | None
    digest: str
    """Equal for tokenizers that encode and decode alike."""
    revision: str | None
    """Commit on the Hugging Face Hub; None for what does not come from there."""

    def save(self, folder: Path) -> Path | None:
        """Writes `folder`/tokenizer.json, which `tokenizer=` reads; None for bytes, which needs no file."""

    def encode(self, text: str) -> np.ndarray: ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]: ...

    def decode(self, ids: np.ndarray) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as they are. End of document is 255, a byte that UTF-8 never uses (RFC 3629 section 3).

    So the vocabulary is exactly 256 and divides over any mesh of a power of two.
    """

    vocab_size: int = 256
    eod: int | None = 255
    digest: str = "bytes"
    revision: str | None = None

    def save(self, folder: Path) -> None:
        return None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids != self.eod].astype(np.uint8).tobytes().decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer`. Special tokens spelled out in a text are encoded as plain text."""

    def __init__(self, inner, revision: str | None = None):
        inner.no_truncation()  # a tokenizer.json may carry its model's length limit
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner, self.revision = inner, revision
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1  # ids may have holes
        found = [inner.token_to_id(name) for name in _EOD_NAMES]
        self.eod = next((token for token in found if token is not None), None)
        self.digest = text_digest("hf", inner.to_str())

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def decode(self, ids: np.ndarray) -> str:
        return self._inner.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> Path:
        path = folder / TOKENIZER_FILE
        self._inner.save(str(path))
        return path


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer `bytes`, a tokenizer.json file or a model's NAME or NAME@REVISION on the Hugging Face Hub.

    Raises ValueError when it cannot be loaded. `bpe` is made by `train_bpe` instead, since it needs text.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if path.is_file():
        return _load(spec, lambda: path, "give a tokenizer.json")
    # A misspelled word is refused here, because a request to the Hub without a network takes half a minute of retries.
    meant = difflib.get_close_matches(spec.lower(), ("bytes", "bpe"), n=1, cutoff=0.75)
    if meant or path.suffix == ".json" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", spec):
        fix = f"tokenizer={meant[0]}" if meant else "tokenizer=bytes, tokenizer=bpe or a file that exists"
        raise ValueError(f"tokenizer={spec} is not bytes, bpe, a file or a Hugging Face name: type {fix}")
    return _load(
        spec,
        lambda: _download(spec),
        "check the name and the network, or type tokenizer=bytes or give a tokenizer.json",
    )


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Byte-level BPE (Radford et al., GPT-2, 2019) of at most `vocab_size` tokens; deterministic."""
    library = _library()
    inner = library.Tokenizer(library.models.BPE())
    inner.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_EOD_NAMES[0]],
        show_progress=False,
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
    )
    inner.train_from_iterator(texts, trainer)
    return HuggingFaceTokenizer(inner)


def check_vocab_size(spec: str, vocab_size: int | None) -> None:
    """Raises ValueError when a vocabulary size is impossible for the tokenizer, or would have no effect."""
    if spec == "bpe":
        if vocab_size is not None and vocab_size < _SMALLEST_BPE:
            raise ValueError(
                f"vocab_size={vocab_size} is too small for tokenizer=bpe, which has every "
                f"byte: type vocab_size={_SMALLEST_BPE} or more"
            )
    elif vocab_size is not None and not (spec == "bytes" and vocab_size == ByteTokenizer.vocab_size):
        raise ValueError(
            f"vocab_size={vocab_size} has no effect with tokenizer={spec}, which has its own: "
            "remove it, or type tokenizer=bpe"
        )


def _library():
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "this tokenizer needs the package tokenizers: pip install tokenizers, or type tokenizer=bytes"
        ) from None
    return tokenizers


def _download(spec: str) -> Path:
    """tokenizer.json of a model on the Hub, from the local cache when it is there."""
    from huggingface_hub import hf_hub_download

    name, _, revision = spec.partition("@")
    return Path(hf_hub_download(name, TOKENIZER_FILE, revision=revision or None))


def _load(spec: str, find: Callable[[], Path], fix: str) -> HuggingFaceTokenizer:
    library = _library()
    try:
        path = find()
        # The Hub's cache keeps the files of a commit in the folder snapshots/COMMIT.
        revision = path.parent.name if path.parent.parent.name == "snapshots" else None
        return HuggingFaceTokenizer(library.Tokenizer.from_file(str(path)), revision)
    # The library raises bare Exception for a bad file and its HTTP client's own types for the network.
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"cannot load tokenizer={spec} ({type(error).__name__}, {reason}): {fix}") from None
