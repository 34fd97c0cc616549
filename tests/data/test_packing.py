"""Rows of documents: every target once, segments and masks as the documents are."""

import itertools
import json

import numpy as np
import pytest

from mstrain.data import DataConfig, prepare
from mstrain.data.batches import Batches
from mstrain.data.chat import Template, messages_of
from mstrain.data.in_order import InOrder
from mstrain.data.token_file import ANSWER, START, TokenFile, TokenWriter, marks_path

EOD, SEQ = 99, 7
LENGTHS = (3, 9, 1, 30, 5, 2, 2, 8)


def write(path, documents, marks=None):
    with TokenWriter(path, 100) as writer:
        for document in documents:
            writer.append(np.array(document))
    if marks:
        with TokenWriter(marks_path(path), 4) as writer:
            writer.append(np.concatenate(marks))
    return TokenFile.open(path, EOD)


@pytest.fixture
def documents():
    """Documents of distinct tokens that end with EOD."""
    tokens = itertools.count()
    return [[next(tokens) % 98 for _ in range(length - 1)] + [EOD] for length in LENGTHS]


def epoch(file, pack):
    """All rows of the file, in order."""
    batches = Batches(file, SEQ, 1, shuffle=False, pack=pack)
    return batches.samples(np.arange(batches.num_windows))


def pairs(batch):
    """(input, target) of all targets that count."""
    return sorted(zip(batch.tokens[:, :-1][batch.mask], batch.tokens[:, 1:][batch.mask], strict=True))


@pytest.mark.parametrize("pack", ["segments", "none"])
def test_every_target_inside_a_document_counts_once(tmp_path, documents, pack):
    batch = epoch(write(tmp_path / "a.bin", documents), pack)
    found = pairs(batch)
    inside = sorted(pair for document in documents for pair in zip(document, document[1:], strict=False))
    if pack == "segments":  # the grid's last row is whole, so the last tokens of the file may be in none
        assert set(found) <= set(inside) and len(inside) - len(found) < SEQ
    else:
        assert found == inside
    assert (batch.segments is None) == (pack == "none")


@pytest.mark.parametrize("pack", ["concat", "segments", "none"])
def test_an_evaluation_counts_every_target_once(tmp_path, documents, pack):
    rows = InOrder(write(tmp_path / "a.bin", documents), SEQ, 4, pack)
    batches = [rows.batch(number) for number in range(rows.batches_per_epoch)]
    tokens = list(itertools.chain(*documents))
    whole = documents if pack != "concat" else [tokens]
    inside = sorted(pair for document in whole for pair in zip(document, document[1:], strict=False))
    assert sorted(itertools.chain(*map(pairs, batches))) == inside
    assert all(batch.tokens.shape == (4, SEQ + 1) for batch in batches)
    if pack == "none":
        counts = np.concatenate([batch.mask.sum(1) for batch in batches])[: rows.num_rows]
        bounds, owners = rows.documents()
        assert np.diff(bounds).tolist() == list(LENGTHS)
        assert np.bincount(owners, counts, len(LENGTHS)).tolist() == [length - 1 for length in LENGTHS]


def test_segments_number_the_documents_of_a_row(tmp_path, documents):
    batch = epoch(write(tmp_path / "a.bin", documents), "segments")
    for tokens, segments in zip(batch.tokens, batch.segments, strict=True):
        assert segments[0] == 1 and (np.diff(segments) == (tokens[:-2] == EOD)).all()
        assert segments.dtype == np.int32


def test_conversations_stay_whole_where_they_fit_and_only_answers_count(tmp_path, documents):
    marks = []
    for document in documents:
        flags = np.zeros(len(document), np.int64)
        flags[0] = START
        flags[-2:] |= ANSWER
        marks.append(flags)
    file = write(tmp_path / "a.bin", documents, marks)
    assert file.marks is not None and file.bits_per_byte(1.0) is None
    batch = epoch(file, "segments")
    for short in (document for document in documents if len(document) <= SEQ):
        assert any(" ".join(map(str, short)) in " ".join(map(str, row.tolist())) for row in batch.tokens)
    wanted = sorted(pair for document in documents for pair in list(zip(document, document[1:], strict=False))[-2:])
    assert pairs(batch) == wanted


@pytest.mark.parametrize("count", [1, 3])
def test_conversations_that_all_fit_into_one_row(tmp_path, count):
    conversations = [[10 * n + 1, 10 * n + 2, EOD] for n in range(count)]
    file = write(tmp_path / "a.bin", conversations, [[START, ANSWER, ANSWER]] * count)
    wanted = sorted(pair for one in conversations for pair in zip(one, one[1:], strict=False))
    assert pairs(Batches(file, 3 * count, 1, pack="segments").batch(0)) == wanted


def test_documents_that_cannot_be_told_apart_are_refused(make_file):
    with pytest.raises(ValueError, match="pack=segments needs an end-of-document token.*data.eos=TOKEN"):
        Batches(make_file(np.arange(100)), 9, 1, pack="segments")


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "Because of é 😀."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "That is all."},
]


def test_answers_are_the_text_after_each_generation_prompt():
    text, answers = Template(CHATML, {}).render(CHAT)
    assert [text[begin:end] for begin, end in answers] == [
        "Because of é 😀.<|im_end|>\n", "That is all.<|im_end|>\n"
    ]  # fmt: skip


def test_a_template_that_rewrites_earlier_turns_is_refused():
    last = "{% for m in messages %}{% if loop.last %}!{% endif %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="writes earlier turns differently.*data.template=FILE"):
        Template(last, {}).render(CHAT)
    with pytest.raises(ValueError, match="refuses the conversation .*str"):
        Template("{{ messages[0].content + 5 }}", {}).question(CHAT)
    with pytest.raises(ValueError, match="leaves out an answer.*data.template=FILE"):
        Template("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", {}).render(
            CHAT
        )


def chats(folder, *records):
    (folder / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return DataConfig("chat", str(folder / "chats.jsonl"), cache_dir=str(folder / "cache"), validation_fraction=0.3)


def test_a_chat_corpus_marks_its_answers(tmp_path):
    corpus = prepare(
        chats(tmp_path, {"messages": CHAT}, *[{"instruction": f"Say {n}", "output": f"{n}!"} for n in range(9)])
    )
    answers = []
    for side in (corpus.train, corpus.validation):
        tokens, marks = side.read(), side.marks.read()
        assert (marks & START).astype(bool).sum() == side.num_documents
        answers += [corpus.tokenizer.decode(part) for part in np.split(tokens[(marks & ANSWER) > 0], [])]
    text = "".join(answers)
    assert all(f"{n}!\n" in text for n in range(9)) and "Because of é 😀.\n" in text and "That is all.\n" in text
    assert "Say" not in text and "Why" not in text and "<|" not in text
    batch = corpus.batches("train", 64, 2).batch(0)
    assert batch.segments is not None and batch.mask.any() and not batch.mask.all()


@pytest.mark.parametrize(
    "record, message",
    [
        ({"messages": CHAT[:1]}, "line 2: the conversation has no answer"),
        (
            {"messages": [*CHAT[:1], {"role": "assistant", "content": " "}]},
            "line 2: message 2 .assistant. is an answer without",
        ),
        ({"instruction": "x", "response": None}, "line 2: message 2 .assistant. is an answer without text"),
        ({"instruction": "x", "input": {"y": 1}, "output": "z"}, "line 2: message 1 .user. is without text"),
        ({"text": "x"}, "line 2: the record has neither messages nor instruction.*keys: text"),
        ([1], "line 2: the line is not a JSON object"),
        ({"messages": "hello"}, "line 2: messages is not a list"),
        ({"messages": CHAT, "tools": [{"name": "x"}]}, "line 2: the record has tools.*write them into a system"),
    ],
)
def test_a_chat_without_an_answer_is_refused_with_file_and_line(tmp_path, record, message):
    config = chats(tmp_path, {"messages": CHAT}, record, {"messages": CHAT})
    with pytest.raises(ValueError, match=f"{tmp_path}/chats.jsonl, {message}"):
        prepare(config)
    assert not list(tmp_path.glob("cache/**/*.bin")) and not list(tmp_path.glob("cache/.tmp*"))


def test_instructions_become_messages():
    record = {"system": "Be brief.", "instruction": "Add", "input": "1 2", "output": "3"}
    assert [m["content"] for m in messages_of(record | {"tools": []})] == ["Be brief.", "Add\n\n1 2", "3"]
