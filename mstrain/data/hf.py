"""Text from Hugging Face datasets: a name on the Hub, a `save_to_disk` folder, or local data files."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mstrain.data.config import DataConfig, nearest
from mstrain.data.documents import Document, Skips, text_digest
from mstrain.data.listing import contents_digest, listing

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv", ".txt": "text"}


class HuggingFace:
    """One document per row. Raises ValueError when the dataset, split or column is not available."""

    unit: str = "rows"

    def __init__(self, config: DataConfig):
        self._field = config.field
        self._local = _local_files(config)
        self._contents = contents_digest(*self._local, _cache(config)) if self._local else None
        loaded, self.revision = _load(config, self._contents)
        dataset = _pick_split(loaded, config)
        if self._field not in dataset.column_names:
            raise ValueError(
                f"{config.path} has no column {self._field!r} (columns: "
                f"{', '.join(dataset.column_names)}): type "
                f"data.field={nearest(self._field, dataset.column_names)}"
            )
        self._dataset = dataset.select_columns([self._field])
        self._choice = (config.name or "", config.split)

    def fingerprint(self, cache: Path) -> str:
        # The fingerprint of `datasets` covers the commit of a Hub dataset, but only the times of local files.
        contents = contents_digest(*self._local, cache) if self._local else self._dataset._fingerprint
        return text_digest("hf", self._field, *self._choice, str(self._dataset.num_rows), contents)

    def documents(self, skips: Skips) -> Iterator[Document]:
        for rows in self._dataset.iter(batch_size=1000):
            for text in rows[self._field]:
                where = f"row {skips.seen}"
                skips.seen += 1
                if not isinstance(text, str):
                    skips.add(f"without text in column {self._field!r}", where)
                elif text:
                    yield Document(where, len(text.encode("utf-8")), [text])


def _cache(config: DataConfig) -> Path:
    return Path(config.cache_dir).expanduser()


def _local_files(config: DataConfig) -> tuple[Path, list[str]] | None:
    """(folder, names) of a local dataset; None for a name on the Hub. Scripts are refused."""
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


def _pick_split(dataset: Any, config: DataConfig) -> Any:
    if isinstance(dataset.column_names, list):  # one Dataset; a DatasetDict has columns per split
        if config.split != "train":
            raise ValueError(
                f"{config.path} was saved without splits, so data.split={config.split} has no effect: remove it"
            )
        return dataset
    if config.split not in dataset:
        raise ValueError(
            f"{config.path} has no split {config.split!r} (splits: {', '.join(dataset)}): type "
            f"data.split={nearest(config.split, list(dataset))}"
        )
    return dataset[config.split]
