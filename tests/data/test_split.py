"""The held-out documents: disjoint from training, stable when the corpus grows, never none."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.data.documents import Document
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
