"""Text from Hugging Face datasets: a name on the Hub, a `save_to_disk` folder, or local data files."""

from collections.abc import Iterator
from pathlib import Path

from mstrain.data.config import DataConfig, nearest
from mstrain.data.documents import Document, Skips, text_digest

_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv",
             ".txt": "text"}


class HuggingFace:
    """One document per row. Raises ValueError when the dataset, split or column cannot be had."""

    unit = "rows"

    def __init__(self, config: DataConfig):
        self._field = config.field
        dataset = _load(config)
        if self._field not in dataset.column_names:
            raise ValueError(f"{config.path} has no column {self._field!r} (columns: "
                             f"{', '.join(dataset.column_names)}): type "
                             f"data.field={nearest(self._field, dataset.column_names)}")
        self._dataset = dataset.select_columns([self._field])

    def fingerprint(self) -> str:
        # The fingerprint of `datasets` covers file contents or times and every transform applied.
        return text_digest("hf", self._field, str(self._dataset.num_rows), self._dataset._fingerprint)

    def documents(self, skips: Skips) -> Iterator[Document]:
        for rows in self._dataset.iter(batch_size=1000):
            for text in rows[self._field]:
                where = f"row {skips.seen}"
                skips.seen += 1
                if not isinstance(text, str):
                    skips.add(f"without text in column {self._field!r}", where)
                elif text:
                    yield Document(where, len(text.encode("utf-8")), [text])


def _load(config: DataConfig):
    """A `datasets.Dataset`. Scripts are refused and remote code is never trusted."""
    try:
        import datasets
    except ImportError:
        raise ValueError("data=hf needs the package datasets: pip install datasets") from None
    path = Path(config.path).expanduser()
    if path.suffix == ".py" or (path / f"{path.name}.py").exists():
        raise ValueError(f"data.path={config.path} is a dataset script, and scripts are not run: "
                         "convert it to parquet or JSON lines and give that path")
    if path.is_file() and path.suffix not in _BUILDERS:
        raise ValueError(f"data.path={config.path} has an ending that is not one of {', '.join(_BUILDERS)}: "
                         "convert it, or type data=text")
    try:
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            dataset = datasets.load_from_disk(str(path))
        elif path.is_file():
            dataset = datasets.load_dataset(_BUILDERS[path.suffix], config.name, data_files=str(path))
        else:
            dataset = datasets.load_dataset(str(path) if path.is_dir() else config.path, config.name)
    # The library raises types of its own, of pyarrow and of its HTTP client; to a person all say the same.
    except Exception as error:
        raise ValueError(f"cannot load the dataset data.path={config.path} ({type(error).__name__}: "
                         f"{error.__cause__ or error}): check the name and the network, or give a local "
                         "path") from None
    return _pick_split(dataset, config)


def _pick_split(dataset, config: DataConfig):
    if isinstance(dataset.column_names, list):  # one Dataset; a DatasetDict has columns per split
        if config.split != "train":
            raise ValueError(f"{config.path} was saved without splits, so data.split={config.split} has no "
                             "effect: remove it")
        return dataset
    if config.split not in dataset:
        raise ValueError(f"{config.path} has no split {config.split!r} (splits: {', '.join(dataset)}): type "
                         f"data.split={nearest(config.split, list(dataset))}")
    return dataset[config.split]
