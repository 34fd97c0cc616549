"""Text from Hugging Face datasets: a name on the Hub, a `save_to_disk` folder, or local data files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mstrain.data.config import DataConfig, nearest
from mstrain.data.documents import Document, Skips, text_digest
from mstrain.data.files import check_column, utf8_bytes
from mstrain.data.listing import Files, listing

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".txt": "text"}


OWN_VALIDATION = ("validation", "valid", "val", "dev")  # names of a dataset's own validation split


class HuggingFace:
    """One document per row of a split. Raises ValueError when it has no column `field`."""

    unit: str = "rows"

    def __init__(self, config: DataConfig, split: str, dataset: Any, local: Files | None, revision: str | None):
        check_column(config.field, dataset.column_names, str(config.path))
        self._field, self._local, self.revision = config.field, local, revision
        self._dataset = dataset.select_columns([self._field])
        self._choice = (config.name or "", split)
        self._read = 0

    @classmethod
    def of_config(cls, config: DataConfig) -> tuple["HuggingFace", "HuggingFace | None"]:
        """(training, validation) rows: of data.split, and of data.validation or the dataset's own validation split, or
        None.

        Raises ValueError when the dataset or a split is not available.
        """
        local = _local_files(config)
        loaded, revision = _load(config, local.digest(_cache(config)) if local else None)
        train = cls(config, config.split, _pick_split(loaded, config, "split", config.split), local, revision)
        splits = [] if isinstance(loaded.column_names, list) else list(loaded)
        own = next((name for name in OWN_VALIDATION if name in splits and name != config.split), None)
        if not (name := config.validation or own):
            return train, None
        return train, cls(config, name, _pick_split(loaded, config, "validation", name), local, revision)

    @property
    def fraction(self) -> float | None:
        return self._read / max(len(self._dataset), 1)

    def fingerprint(self, cache: Path) -> str:
        # The fingerprint of `datasets` covers the commit of a Hub dataset, but only the times of local files.
        contents = self._local.digest(cache) if self._local else self._dataset._fingerprint
        return text_digest("hf", self._field, *self._choice, str(self._dataset.num_rows), contents)

    def documents(self, skips: Skips) -> Iterator[Document]:
        self._read = 0
        for rows in self._dataset.iter(batch_size=1000):
            self._read += len(rows[self._field])
            for text in rows[self._field]:
                where = f"row {skips.seen}"
                skips.seen += 1
                if not isinstance(text, str):
                    skips.add(f"without text in column {self._field!r}", where)
                elif (size := utf8_bytes(text)) is None:
                    skips.add("whose text is not valid Unicode", where)
                elif size:
                    yield Document(where, size, [text])


def _cache(config: DataConfig) -> Path:
    return Path(config.cache_dir).expanduser()


def _local_files(config: DataConfig) -> Files | None:
    """The files of a local dataset; None for a name on the Hub. Scripts are refused."""
    path = Path(str(config.path)).expanduser()
    if path.suffix == ".py" or (path / f"{path.name}.py").exists():
        raise ValueError(
            f"data.path={config.path} is a dataset script, and scripts are not run: "
            "convert it to parquet or JSON lines and give that path"
        )
    if path.is_file() and path.suffix not in _BUILDERS:
        raise ValueError(
            f"data.path={config.path} has an ending that is not one of {', '.join(_BUILDERS)}: "
            "convert it, or type data=text"
        )
    if path.exists() and config.revision:
        raise ValueError(
            f"data.revision={config.revision} has no effect with the local data.path={config.path}: remove it"
        )
    return listing(str(config.path), ("",)) if path.exists() else None


def _load(config: DataConfig, contents: str | None) -> tuple[Any, str | None]:
    """(a Dataset or DatasetDict, its commit on the Hub or None). Remote code is never trusted.

    `contents` is the digest of local files: `datasets` would take a converted copy of other contents for theirs, when
    path, size and time agree.
    """
    try:
        import datasets
    except ImportError:
        raise ValueError("data=hf needs the package datasets: pip install datasets") from None
    path = Path(str(config.path)).expanduser()
    try:
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(path)), None
        if contents is None:
            builder = datasets.load_dataset_builder(str(config.path), config.name, revision=config.revision)
        else:
            copies = str(_cache(config) / "datasets" / contents)
            name, files = (_BUILDERS[path.suffix], str(path)) if path.is_file() else (str(path), None)
            builder = datasets.load_dataset_builder(name, config.name, data_files=files, cache_dir=copies)
        commit = builder.hash if contents is None and re.fullmatch("[0-9a-f]{40}", builder.hash or "") else None
        # Without a network, `datasets` takes the newest local commit and ignores the revision.
        if config.revision not in (None, commit) and type(builder).__module__.endswith(".cache"):
            raise ConnectionError(
                f"the Hub cannot be reached and the newest local copy is of commit {commit}, not of "
                f"data.revision={config.revision}"
            )
        builder.download_and_prepare()
        return builder.as_dataset(), commit
    # The library raises its own exceptions, those of pyarrow and those of its HTTP client.
    except Exception as error:
        raise ValueError(
            f"cannot load the dataset data.path={config.path} ({type(error).__name__}: "
            f"{error.__cause__ or error}): check the name and the network, or give a local "
            "path"
        ) from None


def _pick_split(dataset: Any, config: DataConfig, key: str, split: str) -> Any:
    """The split that data.KEY names."""
    if isinstance(dataset.column_names, list):  # one Dataset; a DatasetDict has columns per split
        if (key, split) != ("split", "train"):
            raise ValueError(f"{config.path} was saved without splits, so data.{key}={split} has no effect: remove it")
        return dataset
    if split not in dataset:
        raise ValueError(
            f"{config.path} has no split {split!r} (splits: {', '.join(dataset)}): type "
            f"data.{key}={nearest(split, list(dataset))}"
        )
    return dataset[split]
