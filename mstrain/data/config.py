"""The configuration of a corpus, checked without reading a file."""

import dataclasses
import difflib

from mstrain.checks import mounted

SOURCES = ("stdlib", "text", "jsonl", "hf", "synthetic")

# Which sources read an option; with any other source a changed value would silently do nothing.
_READ_BY = {
    "path": ("text", "jsonl", "hf"),
    "field": ("jsonl", "hf"),
    "name": ("hf",),
    "split": ("hf",),
    "revision": ("hf",),
    "max_skipped": ("jsonl",),
    "num_tokens": ("synthetic",),
}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The corpus. Raises ValueError at construction when a value is invalid or has no effect."""

    source: str = "stdlib"
    """Source of the text: `stdlib` (source files of the running Python), `text` or `jsonl` (files), `hf` (Hugging Face
    datasets), or `synthetic` (a seeded Markov chain, no file)."""
    path: str | None = None
    """File, folder or pattern such as `texts/**/*.md` (text, jsonl; gzip and Zstandard are decompressed), file or
    folder (hf), or a dataset's name on the Hugging Face Hub (hf)."""
    field: str = "text"
    """Key (jsonl) or column (hf) that holds the text."""
    name: str | None = None
    """Configuration of a Hugging Face dataset, for example wikitext-2-raw-v1."""
    split: str = "train"
    """Split of a Hugging Face dataset to read. Validation documents are taken from it."""
    revision: str | None = None
    """Commit, tag or branch of a dataset on the Hugging Face Hub. Null takes the newest commit of its main branch. The
    commit used is recorded."""
    max_skipped: float = 0.01
    """Largest fraction of lines of data=jsonl, from 0 to 1, that may be skipped because they are not JSON or have no
    text under `field`. Skipped lines are counted and the first one is reported."""
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
        if "path" in self._options_read() and not self.path:
            raise ValueError(f"data={self.source} needs to know what to read: add data.path=FILE_OR_FOLDER")
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

    def _options_read(self) -> list[str]:
        return [option for option, readers in _READ_BY.items() if self.source in readers]

    def _check_types(self) -> None:
        for option in ("path", "name", "revision"):
            value = getattr(self, option)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"data.{option}={value!r} is not text: quote it, data.{option}='{value}'")
        for option in ("field", "split", "cache_dir"):
            value = getattr(self, option)
            if not isinstance(value, str) or not value:
                raise ValueError(
                    f"data.{option}={value!r} is not a name: leave it out, or type for example "
                    f"data.{option}={_default(option)}"
                )
        for option, kinds in (
            ("num_tokens", int),
            ("validation_fraction", (int, float)),
            ("max_skipped", (int, float)),
        ):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, kinds):
                raise ValueError(
                    f"data.{option}={value!r} is not a number: type for example data.{option}={_default(option)}"
                )

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
