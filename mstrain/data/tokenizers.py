"""Converts text to token ids and back with one interface: bytes, a trained BPE, any Hugging Face tokenizer, or a
SentencePiece model."""

import difflib
import functools
import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from mstrain.data.documents import text_digest
from mstrain.json_files import read_json

TOKENIZER_FILE, CONFIG_FILE, TEMPLATE_FILE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
SENTENCEPIECE_FILE = "tokenizer.model"
_FILES = (TOKENIZER_FILE, SENTENCEPIECE_FILE)
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
_DIGITS = 31  # transformers writes 1e30 as the model_max_length of a tokenizer without a limit
_SMALLEST_BPE = 257  # 256 bytes and the end-of-document token
Spans = tuple[tuple[int, int], ...]


class Tokenizer(Protocol):
    """Ids are int64 arrays [n]; `decode` drops special tokens; `eod` is None when documents end without a mark.

    `bos` and `eod` are the ids before and after every document of a corpus.
    """

    vocab_size: int
    bos: int | None
    eod: int | None
    digest: str
    """Equal for tokenizers that encode and decode alike."""
    revision: str | None
    """Commit on the Hugging Face Hub; None for what does not come from there."""
    settings: dict[str, Any]
    """tokenizer_config.json of its folder: special tokens and chat template; empty without one."""

    def save(self, folder: Path) -> Path | None:
        """Writes the files that `tokenizer=FOLDER` reads and returns the main one; None for bytes, which needs none."""

    def token_id(self, token: str) -> int | None:
        """The id of a token by its text; None for an unknown token."""

    def encode(self, text: str) -> np.ndarray: ...

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]: ...

    def encode_spans(self, text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        """(ids, whether each begins in one of the ranges of characters); special tokens in the text are themselves."""
        ...

    def decode(self, ids: np.ndarray) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes as they are. End of document is 255, a byte that UTF-8 never uses (RFC 3629 section 3).

    So the vocabulary is exactly 256 and divides over any mesh of a power of two.
    """

    vocab_size: int = 256
    bos: int | None = None
    eod: int | None = 255
    digest: str = "bytes"
    revision: str | None = None
    settings: dict[str, Any] = {}

    def save(self, folder: Path) -> None:
        return None

    def token_id(self, token: str) -> int | None:
        return None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def encode_spans(self, text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        ids = self.encode(text)
        starts = np.cumsum((ids & 0xC0) != 0x80) - 1  # the character of each byte
        return ids, _inside(starts, spans)

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids != 255].astype(np.uint8).tobytes().decode("utf-8", "replace")


class HuggingFaceTokenizer:
    """A `tokenizers.Tokenizer`. Special tokens spelled out in a text are encoded as plain text, but in a chat."""

    def __init__(self, inner, revision: str | None = None, settings: dict[str, Any] | None = None):
        inner.no_truncation()  # a tokenizer.json may carry its model's length limit
        inner.no_padding()
        inner.encode_special_tokens = True
        self.library, self.revision, self.settings = inner, revision, settings or {}
        self.vocab_size = max(inner.get_vocab(with_added_tokens=True).values()) + 1  # ids may have holes
        self.bos, self.eod = _marks(self, self._before_texts)
        self.digest = text_digest("hf", inner.to_str())

    def _before_texts(self) -> int | None:
        """The token that the post-processor of the tokenizer.json puts before every text."""
        encoding = self.library.encode("x")
        count = next((place for place, added in enumerate(encoding.special_tokens_mask) if not added), 0)
        if count > 1:
            tokens = " ".join(encoding.tokens[:count])
            raise ValueError(f"it begins texts with {count} tokens, {tokens}, and mstrain documents with one at most")
        return encoding.ids[0] if count else None

    def token_id(self, token: str) -> int | None:
        return self.library.token_to_id(token)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in encodings]

    def encode_spans(self, text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        post = self.library.post_processor
        self.library.encode_special_tokens = False
        self.library.post_processor = None  # it may trim spaces off the offsets, but add no token here
        try:
            encoding = self.library.encode(text, add_special_tokens=False)
        finally:
            self.library.encode_special_tokens, self.library.post_processor = True, post
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        # A word's token may begin with the space before it, which belongs to the question.
        return np.array(encoding.ids, np.int64), _inside(np.maximum(offsets[:, 1] - 1, offsets[:, 0]), spans)

    def decode(self, ids: np.ndarray) -> str:
        return self.library.decode([int(token) for token in ids], skip_special_tokens=True)

    def save(self, folder: Path) -> Path:
        path = folder / TOKENIZER_FILE
        self.library.save(str(path))
        _save_settings(self, folder)
        return path


class SentencePieceTokenizer:
    """A SentencePiece model, unigram or BPE."""

    def __init__(self, path: Path, revision: str | None = None, settings: dict[str, Any] | None = None):
        try:
            import sentencepiece  # pyright: ignore[reportMissingImports]  an extra of its own
        except ImportError:
            raise ValueError(
                "a SentencePiece model needs the package sentencepiece: pip install sentencepiece"
            ) from None
        self._model = path.read_bytes()
        self.library = sentencepiece.SentencePieceProcessor(model_proto=self._model)
        self.revision, self.settings = revision, settings or {}
        self.vocab_size = self.library.vocab_size()
        self.bos, self.eod = _marks(self, lambda: None)
        if self.eod is None and self.library.eos_id() >= 0:
            self.eod = self.library.eos_id()
        self.digest = text_digest("sentencepiece", self._model.hex())

    def token_id(self, token: str) -> int | None:
        found = self.library.piece_to_id(token)
        return found if self.library.id_to_piece(found) == token else None

    def encode(self, text: str) -> np.ndarray:
        return np.array(self.library.encode(text), np.int64)

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int64) for ids in self.library.encode(texts)]

    def encode_spans(self, text: str, spans: Spans) -> tuple[np.ndarray, np.ndarray]:
        raise ValueError(
            "data=chat needs a tokenizer.json: a SentencePiece model alone does not encode the special tokens of a chat"
        )

    def decode(self, ids: np.ndarray) -> str:
        return self.library.decode([int(token) for token in ids])

    def save(self, folder: Path) -> Path:
        path = folder / SENTENCEPIECE_FILE
        path.write_bytes(self._model)
        _save_settings(self, folder)
        return path


def _inside(places: np.ndarray, spans: Spans) -> np.ndarray:
    """Whether each place is in one of the ranges."""
    found = np.zeros(len(places), bool)
    for begin, end in spans:
        found |= (places >= begin) & (places < end)
    return found


def _save_settings(tokenizer: Tokenizer, folder: Path) -> None:
    if tokenizer.settings:
        (folder / CONFIG_FILE).write_text(json.dumps(tokenizer.settings, indent=1, ensure_ascii=False))


def special_token(settings: dict[str, Any], name: str) -> str | None:
    """A special token such as `eos_token` by the settings of a tokenizer, where it is text or an object."""
    value = settings.get(name)
    return value.get("content") if isinstance(value, dict) else value if isinstance(value, str) else None


def _marks(tokenizer: Tokenizer, before_texts: Callable[[], int | None]) -> tuple[int | None, int | None]:
    """(bos, eod): bos of the settings if they ask for it, or else the token that is put `before_texts`; eod of the
    settings, or a well-known one where nothing is stated."""
    bos, eos = (special_token(tokenizer.settings, name) for name in ("bos_token", "eos_token"))
    asked = bos if tokenizer.settings.get("add_bos_token") is True else None
    begins = tokenizer.token_id(asked) if asked else before_texts()
    if eos and (found := tokenizer.token_id(eos)) is not None:
        return begins, found
    known = [tokenizer.token_id(name) for name in EOD_NAMES]
    return begins, next((token for token in known if token is not None), None)


def marked(tokenizer: Tokenizer, bos: str, eos: str) -> str:
    """Sets the tokens before and after a document by data.bos and data.eos, and describes them.

    Raises ValueError for a token that the tokenizer does not have.
    """
    for key, name, choice in (("bos", "bos", bos), ("eos", "eod", eos)):
        if choice == "none":
            setattr(tokenizer, name, None)
        elif choice != "auto":
            found = tokenizer.token_id(choice)
            if found is None:
                raise ValueError(
                    f"data.{key}={choice} is not a token of this tokenizer: type one that is, none or auto"
                )
            setattr(tokenizer, name, found)
    return describe_marks(tokenizer)


def describe_marks(tokenizer: Tokenizer) -> str:
    """For example: documents end with token 50256."""
    begin = f"begin with token {tokenizer.bos} and " if tokenizer.bos is not None else ""
    end = f"end with token {tokenizer.eod}" if tokenizer.eod is not None else "end without a token"
    return f"documents {begin}{end}"


def load_tokenizer(spec: str) -> Tokenizer:
    """The tokenizer `bytes`, a tokenizer.json file or SentencePiece model, a folder with one, or a model's NAME or
    NAME@REVISION on the Hugging Face Hub.

    Raises ValueError when it cannot be loaded. `bpe` is made by `train_bpe` instead, since it needs text.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec).expanduser()
    if spec and path.is_dir():
        found = tokenizer_file(path)
        if found is None:
            raise ValueError(f"the folder tokenizer={spec} has no {' or '.join(_FILES)}: give a folder that has")
        path = found
    if path.is_file():
        return _load(spec, lambda: path, "give a tokenizer.json or a SentencePiece model")
    # A misspelled word is refused here, because a request to the Hub without a network takes half a minute of retries.
    meant = difflib.get_close_matches(spec.lower(), ("bytes", "bpe"), n=1, cutoff=0.75)
    if meant or path.suffix in (".json", ".model") or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", spec):
        fix = f"tokenizer={meant[0]}" if meant else "tokenizer=bytes, tokenizer=bpe or a file that exists"
        raise ValueError(f"tokenizer={spec} is not bytes, bpe, a file or a Hugging Face name: type {fix}")
    return _load(
        spec,
        lambda: _download(spec),
        "check the name and the network, or type tokenizer=bytes or give a tokenizer.json",
    )


def tokenizer_file(folder: Path) -> Path | None:
    """The main file of the tokenizer in a folder: tokenizer.json, or a SentencePiece model; None without one."""
    return next((folder / name for name in _FILES if (folder / name).is_file()), None)


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Byte-level BPE (Radford et al., GPT-2, 2019) of at most `vocab_size` tokens; deterministic."""
    import tokenizers

    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_NAMES[0]],
        show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
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


def _download(spec: str) -> Path:
    """The main tokenizer file of a model on the Hub, from the local cache when it is there."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    name, _, revision = spec.partition("@")
    fetch = functools.partial(hf_hub_download, name, revision=revision or None)
    try:
        path = Path(fetch(TOKENIZER_FILE))
    except EntryNotFoundError:
        path = Path(fetch(SENTENCEPIECE_FILE))
    for extra in (CONFIG_FILE, TEMPLATE_FILE):
        try:
            fetch(extra)
        except Exception:  # few models have all files; the network was there for the main one
            continue
    return path


def _load(spec: str, find: Callable[[], Path], fix: str) -> Tokenizer:
    try:
        path = find()
        # The Hub's cache keeps the files of a commit in the folder snapshots/COMMIT.
        revision = path.parent.name if path.parent.parent.name == "snapshots" else None
        settings = _settings(path.parent) if path.name in _FILES else {}
        if path.suffix == ".model":
            return SentencePieceTokenizer(path, revision, settings)
        import tokenizers

        inner = tokenizers.Tokenizer.from_file(str(path))
        _add_stated(inner, settings.get("added_tokens_decoder") or {})
        return HuggingFaceTokenizer(inner, revision, settings)
    # The library raises bare Exception for a bad file and its HTTP client's own types for the network.
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"cannot load tokenizer={spec} ({type(error).__name__}, {reason}): {fix}") from None


def _add_stated(inner: Any, stated: dict[str, dict[str, Any]]) -> None:
    """Adds the tokens that tokenizer_config.json has and tokenizer.json has not, in the order of their numbers.

    `transformers` does the same but ignores the numbers. Raises ValueError where a token would get another one.
    """
    import tokenizers

    for number, fields in sorted(stated.items(), key=lambda item: int(item[0])):
        inner.add_tokens([tokenizers.AddedToken(**fields)])
        if (found := inner.token_to_id(fields["content"])) != int(number):
            raise ValueError(f"{CONFIG_FILE} gives {fields['content']} the number {number}, {TOKENIZER_FILE} {found}")


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder, with the chat template of its own file; empty without them."""
    path, template = folder / CONFIG_FILE, folder / TEMPLATE_FILE
    settings = read_json(path, "the settings in", _DIGITS) if path.is_file() else {}
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a JSON object")
    return settings | ({"chat_template": template.read_text()} if template.is_file() else {})
