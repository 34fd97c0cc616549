"""Every tokenizer gives the text back, and a tokenizer that cannot be had is a sentence, not a traceback."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mstrain.data.tokenizers import ByteTokenizer, load_tokenizer, train_bpe

TEXT = "def f(x):\n    return x  # Straße, δοκιμή, 😀\t\r\n\0 <|endoftext|> end\n" * 20
anything = st.text(st.characters(codec="utf-8"), max_size=200)


@pytest.fixture(scope="module")
def bpe():
    return train_bpe([TEXT, "some more text to merge, some more text"], 300)


@settings(max_examples=100, deadline=None)
@given(anything)
def test_bytes_round_trip_and_never_contain_the_end_of_document(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode()) and tokenizer.eod not in ids
    assert tokenizer.decode(np.append(ids, tokenizer.eod)) == text


@settings(max_examples=100, deadline=None)
@given(text=anything)
def test_bpe_round_trip_of_text_it_has_not_seen(bpe, text):
    ids = bpe.encode(text)
    assert bpe.decode(np.append(ids, bpe.eod)) == text
    assert len(ids) == 0 or ids.max() < bpe.vocab_size


def test_a_special_token_spelled_out_in_a_text_stays_text(bpe):
    ids = bpe.encode(TEXT)
    assert bpe.eod not in ids and bpe.decode(ids) == TEXT
    assert len(ids) < len(TEXT.encode()) / 2  # it has learnt merges


def test_a_batch_is_its_texts(bpe):
    for tokenizer in (bpe, ByteTokenizer()):
        texts = [TEXT, "", "x"]
        for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
            np.testing.assert_array_equal(ids, tokenizer.encode(text))


def test_training_is_deterministic(bpe):
    again = train_bpe([TEXT, "some more text to merge, some more text"], 300)
    assert again.digest == bpe.digest
    assert train_bpe([TEXT], 290).digest != bpe.digest


def test_a_saved_tokenizer_is_the_same_tokenizer(bpe, tmp_path):
    assert bpe.save(tmp_path) == tmp_path / "tokenizer.json"
    loaded = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert (loaded.digest, loaded.vocab_size, loaded.eod) == (bpe.digest, bpe.vocab_size, bpe.eod)
    np.testing.assert_array_equal(loaded.encode(TEXT), bpe.encode(TEXT))


def test_a_length_limit_in_the_file_does_not_cut_documents(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({"a": 0, "b": 7, "?": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    inner.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(str(tmp_path / "t.json"))
    assert tokenizer.encode("a b " * 50).tolist() == [0, 7] * 50
    assert tokenizer.encode("b").tolist() == [7]  # nor does its padding lengthen them
    assert tokenizer.vocab_size == 8 and tokenizer.eod is None  # ids have holes; there is no such token


def stated(folder, tokens):
    """A folder of a trained tokenizer whose tokenizer_config.json has `tokens`, {number: content}, besides."""
    train_bpe(["abcabc"], 260).save(folder)
    fields = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    decoder = {number: {"content": content, **fields} for number, content in tokens.items()}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "added_tokens_decoder": decoder}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_tokens_of_the_settings_alone_are_those_of_transformers(tmp_path):
    folder = stated(tmp_path, {"261": "<end>", "260": "<call>", "0": "<|endoftext|>"})
    found, text = load_tokenizer(folder), "ab<call>c<end>"
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    ids, _ = found.encode_spans(text, ())
    assert ids.tolist() == theirs.encode(text) and {260, 261} < set(ids.tolist())
    assert (found.vocab_size, found.eod) == (262, 261) == (len(theirs), theirs.eos_token_id)
    (tmp_path / "again").mkdir()
    found.save(tmp_path / "again")
    assert load_tokenizer(str(tmp_path / "again")).digest == found.digest


def test_a_token_with_two_numbers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="gives <end> the number 300, tokenizer.json 260"):
        load_tokenizer(stated(tmp_path, {"300": "<end>"}))


def test_the_length_that_transformers_writes_for_no_limit_is_read(tmp_path):
    path = stated(tmp_path, {"260": "<end>"})
    settings_file = tmp_path / "tokenizer_config.json"
    settings_file.write_text(json.dumps(json.loads(settings_file.read_text()) | {"model_max_length": int(1e30)}))
    assert load_tokenizer(path).settings["model_max_length"] == int(1e30)


@pytest.mark.parametrize(
    "spec, message",
    [
        ("byte", "type tokenizer=bytes"),
        ("BPE", "type tokenizer=bpe"),
        ("", "type tokenizer=bytes"),
        ("missing/tokenizer.json", "a file that exists"),
        ("a/b/c", "a file that exists"),
    ],
)
def test_a_spec_that_cannot_be_a_tokenizer_is_refused_without_the_network(spec, message):
    with pytest.raises(ValueError, match=message):
        load_tokenizer(spec)


NO_TOKENS = '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'


@pytest.mark.parametrize("content", ["", "{}", "not json", NO_TOKENS])
def test_a_broken_tokenizer_file_is_a_value_error(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="cannot load tokenizer=.*give a tokenizer.json"):
        load_tokenizer(str(path))


def test_a_hub_name_without_network_is_a_value_error(monkeypatch, tmp_path):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="tokenizer=nobody/nothing .*check the name and the network"):
        load_tokenizer("nobody/nothing")
