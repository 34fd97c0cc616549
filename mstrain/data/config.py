"""The configuration of a corpus, checked without reading a file."""

import dataclasses
import difflib
import math
import re

from mstrain.checks import mounted, one_of

SOURCES = ("stdlib", "text", "jsonl", "parquet", "hf", "tokens", "chat", "synthetic")
FILES = ("text", "jsonl", "parquet", "tokens", "chat")
PACKS = ("auto", "concat", "segments", "none")
TOKEN_DTYPES = ("uint16", "uint32")

# Which sources read an option; with any other source a changed value would silently do nothing.
_READ_BY = {
    "path": (*FILES, "hf"),
    "mixture": FILES,
    "validation": (*FILES, "hf"),
    "field": ("jsonl", "parquet", "hf"),
    "name": ("hf",),
    "split": ("hf",),
    "revision": ("hf",),
    "max_skipped": ("jsonl", "parquet", "chat"),
    "template": ("chat",),
    "bos": ("stdlib", "text", "jsonl", "parquet", "hf", "chat"),
    "eos": tuple(source for source in SOURCES if source != "synthetic"),
    "window": ("text", "jsonl", "parquet", "chat"),
    "token_dtype": ("tokens",),
    "num_tokens": ("synthetic",),
}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus.

    Raises ValueError at construction when a value is invalid or has no effect.
    """

    source: str = "stdlib"
    """Source: `stdlib` (source files of the running Python), `text`, `jsonl` or `parquet` (files), `hf` (Hugging Face
    datasets), `tokens` (flat files of token ids, as nanoGPT writes them), `chat` (conversations in JSON lines, loss on
    answers only), or `synthetic` (a seeded Markov chain, no file)."""
    path: str | None = None
    """File, folder, pattern such as `texts/**/*.md`, or address that fsspec opens, such as gs://bucket/texts; gzip and
    Zstandard are decompressed. With data=hf, file or folder, or a dataset's name on the Hugging Face Hub."""
    mixture: str | None = None
    """Several paths with weights instead of data.path, such as `web:0.7 code/*.jsonl:0.3`; a path may be preceded by
    its own source, as in `parquet=web:0.7`. A weight is a fraction of the sequences."""
    validation: str | None = None
    """Path of the validation data, or with data=hf a split. Null takes the data's own validation split, and holds out
    `validation_fraction` of the documents if it has none."""
    field: str = "text"
    """Key (jsonl) or column (parquet, hf) that holds the text."""
    name: str | None = None
    """Configuration of a Hugging Face dataset, for example wikitext-2-raw-v1."""
    split: str = "train"
    """Split of a Hugging Face dataset to train on."""
    revision: str | None = None
    """Commit, tag or branch of a dataset on the Hugging Face Hub. Null takes the newest commit of its main branch. The
    commit used is recorded."""
    max_skipped: float = 0.01
    """Largest fraction of lines or rows (jsonl, parquet, chat), from 0 to 1, that may be skipped because they are not
    JSON or have no text under `field`. They are counted; skipped.txt beside the tokens lists them."""
    bos: str = "auto"
    """Token before every document: `none`, a token's text, or `auto` (the token that the tokenizer adds before a text).
    The choice is printed."""
    eos: str = "auto"
    """Token after every document: `none`, a token's text, or `auto` (that of the tokenizer's folder, or else a token
    with a well-known name). The choice is printed."""
    template: str | None = None
    """Jinja file of the chat template (chat). Null takes the tokenizer's, or a default template."""
    window: int | None = None
    """Number of files that are tokenized and kept on disk at a time, for a corpus larger than the disk. Null keeps all
    tokens."""
    token_dtype: str = "uint16"
    """Dtype of files of data=tokens without a header: `uint16` or `uint32`, little-endian. `.npy` files, those of
    llm.c, and the index beside those of Megatron-LM state theirs."""
    num_tokens: int = 1 << 22
    """Number of tokens of the synthetic source, training and validation together, at least 1024."""
    validation_fraction: float = 0.05
    """Expected fraction of documents held out for validation, above 0 and up to 0.5. With a single document, the
    fraction of its bytes."""
    cache_dir: str = "~/.cache/mstrain"
    """Folder of the token files, on a fast disk: 2 bytes per token, or 4 if the vocabulary has more than 65536
    tokens."""

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            near = nearest(self.source, SOURCES)
            raise ValueError(f"data={self.source} is not one of {', '.join(SOURCES)}: type data={near}")
        self._check_types()
        mounted("data.cache_dir", self.cache_dir)
        self._check_used()
        if "path" in self.options_read and not self.path and not self.mixture:
            raise ValueError(f"data={self.source} needs a path: add data.path=FILE_OR_FOLDER")
        self._check_together()
        if not 0 < self.validation_fraction <= 0.5:
            raise ValueError(
                f"data.validation_fraction={self.validation_fraction} is not above 0 and up to "
                "0.5: type for example data.validation_fraction=0.05"
            )
        if not 0 <= self.max_skipped <= 1:
            raise ValueError(
                f"data.max_skipped={self.max_skipped} is not a share between 0 and 1: type for example "
                "data.max_skipped=0.01"
            )
        if self.num_tokens < 1024:
            raise ValueError(
                f"data.num_tokens={self.num_tokens} is too few to train on: type data.num_tokens=1024 or more"
            )

    @property
    def options_read(self) -> list[str]:
        """The options that have an effect with this source only, and do."""
        return [option for option, readers in _READ_BY.items() if self.source in readers]

    def _check_types(self) -> None:
        one_of("data.token_dtype", self.token_dtype, TOKEN_DTYPES)
        for option in ("path", "name", "revision", "mixture", "validation", "template"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"data.{option}={value!r} is not text: quote it, data.{option}='{value}'")
        for option in ("field", "split", "cache_dir", "bos", "eos"):
            value = getattr(self, option)
            if not isinstance(value, str) or not value:
                raise ValueError(
                    f"data.{option}={value!r} is not a name: leave it out, or type for example "
                    f"data.{option}={_default(option)}"
                )
        for option, kinds in (
            ("num_tokens", int),
            *([("window", int)] if self.window is not None else []),
            ("validation_fraction", (int, float)),
            ("max_skipped", (int, float)),
        ):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise ValueError(
                    f"data.{option}={value!r} is not a number: type for example data.{option}={_default(option)}"
                )

    def _check_together(self) -> None:
        if self.mixture is not None:
            for option in ("path", "validation", "window"):
                if getattr(self, option) is not None:
                    raise ValueError(f"data.{option} has no effect with data.mixture: remove one of them")
            self.parts

        if self.window is not None and self.window < 1:
            raise ValueError(f"data.window={self.window} is too small: type data.window=1 or more")

    def has_tokenizer(self, tokenizer: str) -> bool:
        """Whether `tokenizer=` belongs to the tokens: not to synthetic ones, and to flat files only if it is given."""
        return self.source != "synthetic" and (self.source, tokenizer) != ("tokens", "bytes")

    @property
    def parts(self) -> list[tuple["DataConfig", float]]:
        """Each source of `mixture` with its weight; the weights add up to 1."""
        parts = []
        for word in (self.mixture or "").split():
            match = re.fullmatch(rf"(?:({'|'.join(FILES)})=)?(.+):([0-9.eE+-]+)", word)
            try:
                weight = float(match[3]) if match else 0.0
            except ValueError:
                weight = 0.0
            if not match or not 0 < weight < math.inf:
                raise ValueError(
                    f"data.mixture: {word} is not PATH:WEIGHT with a weight above 0: type for example "
                    'data.mixture="web:0.7 jsonl=code/*.jsonl:0.3"'
                )
            source = match[1] or self.source
            idle = {o: _default(o) for o, readers in _READ_BY.items() if source not in readers}
            parts.append(
                (dataclasses.replace(self, **{**idle, "source": source, "path": match[2], "mixture": None}), weight)
            )
        named = [f"{part.source}={part.path}" for part, _ in parts]
        if not parts or (twice := next((name for name in named if named.count(name) > 1), None)):
            what = f"names {twice} twice: add up its weights" if parts else "is empty: type PATH:WEIGHT words"
            raise ValueError(f"data.mixture {what}")
        total = sum(weight for _, weight in parts)
        return [(part, weight / total) for part, weight in parts]

    def _check_used(self) -> None:
        for option, readers in _READ_BY.items():
            value = getattr(self, option)
            if self.source not in readers and value != _default(option):
                raise ValueError(
                    f"data.{option}={value} has no effect with data={self.source}: "
                    f"remove it, or type data={' or data='.join(readers)}"
                )


def _default(option: str):
    return DataConfig.__dataclass_fields__[option].default


def nearest(word: object, choices: tuple[str, ...] | list[str]) -> str:
    """The choice spelled most like `word`; the first choice when none is close. `choices` is not empty."""
    return (difflib.get_close_matches(str(word), choices, n=1, cutoff=0.5) or [choices[0]])[0]
