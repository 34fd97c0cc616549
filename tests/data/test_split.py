"""The held-out documents: disjoint from training, stable when the corpus grows, never none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.data import DataConfig, prepare
from mstrain.data.documents import Document
from mstrain.data.listing import listing
from mstrain.data.split import TRAIN, VALIDATION, choose_split


class Texts:
    """A source of named texts; `chunk` cuts each into pieces of that many characters."""

    unit = "texts"

    def __init__(self, texts, chunk=1000):
        self.texts, self.chunk = texts, chunk

    def documents(self, skips):
        for name, text in self.texts.items():
            chunks = [text[start : start + self.chunk] for start in range(0, len(text), self.chunk)]
            yield Document(name, len(text.encode()), chunks)


def sides(source, fraction):
    split = choose_split(source, fraction)
    return {document.name: split.side(document.name) for document in source.documents(None)}


def test_the_share_of_held_out_documents_is_the_fraction():
    held_out = list(sides(Texts({f"file{n}": "x" for n in range(4000)}), 0.1).values()).count(VALIDATION)
    assert 300 < held_out < 500  # 400 expected, standard deviation 19


def test_adding_and_removing_documents_moves_no_other():
    texts = {f"file{n}": "x" for n in range(300)}
    before, after = sides(Texts(texts), 0.1), sides(Texts({"0": "x", **texts, "zz": "x"}), 0.1)
    assert {name: after[name] for name in before} == before
    fewer = sides(Texts(dict(reversed(list(texts.items())[50:]))), 0.1)
    assert fewer == {name: before[name] for name in fewer}


@settings(max_examples=100, deadline=None)
@given(names=st.sets(st.text(max_size=8), min_size=2, max_size=6), fraction=st.sampled_from([1e-9, 0.05, 0.5]))
def test_two_or_more_documents_fill_both_sides(names, fraction):
    names = sorted(names)
    result = sides(Texts({name: "x" for name in names}), fraction)
    assert set(result.values()) == {TRAIN, VALIDATION}
    assert result == sides(Texts({name: "x" for name in reversed(names)}), fraction)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), min_size=1), chunk=st.integers(1, 50), fraction=st.floats(0.01, 0.5))
def test_a_single_document_is_cut_once_near_the_fraction_at_a_character(text, chunk, fraction):
    source = Texts({"only": text}, chunk)
    split = choose_split(source, fraction)
    pieces = [piece for document in source.documents(None) for piece in split.pieces(document)]
    sides_in_order = [piece.split for piece in pieces]
    assert sides_in_order == sorted(sides_in_order)  # "train" < "validation"
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.num_bytes == len(piece.text.encode()) for piece in pieces)
    for side in (TRAIN, VALIDATION):
        ends = [piece.ends_document for piece in pieces if piece.split == side]
        assert ends.count(True) == 1 and ends[-1]
    kept = sum(piece.num_bytes for piece in pieces if piece.split == TRAIN)
    assert abs(kept - len(text.encode()) * (1 - fraction)) <= 4


def splits_read(root, names, validation=None):
    """Names of the training and validation files that are read of files that hold their own names, and the warnings."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{name}\n" * 3)
    options = {"validation": str(root / validation)} if validation else {}
    corpus = prepare(DataConfig("text", str(root), cache_dir=f"{root}.cache", **options))
    sides = (corpus.train, corpus.validation)
    texts = (corpus.tokenizer.decode(side.read()) for side in sides)
    train, held_out = (set(text.split()) for text in texts)
    return train, held_out, corpus.warnings


def test_a_file_of_data_validation_is_not_trained_on(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "link.txt").symlink_to(tmp_path / "a" / "v" / "held.txt")
    train, held_out, _ = splits_read(tmp_path / "a", ["b.txt", "c.txt", "v/held.txt"], "v/held.txt")
    assert (train, held_out) == ({"b.txt", "c.txt"}, {"v/held.txt"})
    with pytest.raises(ValueError, match="names every file of data.path: type another one, or remove it"):
        splits_read(tmp_path / "d", ["b.txt", "c.txt"], ".")


@pytest.mark.parametrize(
    "names, validation, others",
    [
        (["train-0.txt", "test.txt"], None, 1),
        (["train.txt", "validation.txt", "test.txt"], "validation.txt", 1),
        (["train.txt", "dev.txt", "test.txt"], "../outside.txt", 2),
        (["train.txt", "test.txt", "notes.txt"], None, 0),  # names of some files alone state no split
    ],
)
def test_files_of_other_splits_are_not_trained_on(tmp_path, names, validation, others):
    (tmp_path / "outside.txt").write_text("outside\n")
    train, held_out, warnings = splits_read(tmp_path / "a", names, validation)
    if others:
        assert {name[:5] for name in train} == {"train"}
        assert warnings[0].startswith(f"{others} files of other splits are not read")
    else:
        assert train | held_out == set(names) and not warnings


def test_files_of_no_split_beside_those_of_splits_are_counted_with_the_fix(tmp_path):
    names = ["train.py", "dev.py", "README", "model.py"]
    train, held_out, (warning,) = splits_read(tmp_path / "a", names)
    assert (train, held_out) == ({"train.py"}, {"dev.py"})
    assert warning.startswith("2 files of other splits are not read, first: README (1 have train in their names")
    train, held_out, warnings = splits_read(tmp_path / "a", names, "README")
    assert (train, held_out, warnings) == (set(names) - {"README"}, {"README"}, ())


def test_links_to_folders_are_not_followed_and_counted(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "x.txt").write_text("x")
    root = tmp_path / "a"
    root.mkdir()
    (root / "link").symlink_to(tmp_path / "other")
    train, held_out, (warning,) = splits_read(root, ["b.txt", "c.txt"])
    assert train | held_out == {"b.txt", "c.txt"}
    assert warning.startswith("1 links to folders are not followed, first: link: type a pattern")
    assert "link/x.txt" in listing(f"{root}/**/*", ("",)).names
