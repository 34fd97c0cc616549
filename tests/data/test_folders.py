"""Tokenizers as folders and SentencePiece models, and chats as `transformers` writes and encodes them."""

import json
import shutil

import numpy as np
import pytest
from tokenizers.processors import ByteLevel, TemplateProcessing

from mstrain.data import DataConfig, prepare
from mstrain.data.recipes import chat_template
from mstrain.data.tokenizers import load_tokenizer, marked, train_bpe
from mstrain.models.hub.tokenizer import write_template, write_tokenizer

TEXT = "Why is the sky blue? Because of é 😀.\n" * 30
CHATML = (
    "{{ bos_token }}{% for m in messages %}{% generation %}{{ '<|im_start|>' + m['role'] }}\n{{ m['content'] | trim }}"
    "<|im_end|>\n{% endgeneration %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Why is the <|im_end|> sky blue?"},
    {"role": "assistant", "content": "Because of é 😀."},
    {"role": "user", "content": "The sky?"},
    {"role": "assistant", "content": "Blue."},
]


@pytest.fixture(scope="module")
def hub_folder(tmp_path_factory):
    """A tokenizer's folder as the Hub has it."""
    folder = tmp_path_factory.mktemp("hub")
    inner = train_bpe([TEXT], 300).library
    inner.add_special_tokens(["<s>", "<|im_start|>", "<|im_end|>"])
    inner.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "add_bos_token": True,
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"}, "chat_template": CHATML,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_states_how_documents_begin_and_end(hub_folder, tmp_path):
    tokenizer = load_tokenizer(str(hub_folder))
    ids = {name: tokenizer.token_id(name) for name in ("<s>", "<|im_end|>", "<|endoftext|>")}
    assert (tokenizer.bos, tokenizer.eod) == (ids["<s>"], ids["<|im_end|>"])
    (tmp_path / "texts").mkdir()
    for n in range(20):
        (tmp_path / "texts" / f"{n}.txt").write_text(TEXT)
    options = {"source": "text", "path": str(tmp_path / "texts"), "cache_dir": str(tmp_path / "cache")}
    corpus = prepare(DataConfig(**options), str(hub_folder))
    tokens = corpus.train.read()
    assert (tokens == ids["<s>"]).sum() == (tokens == ids["<|im_end|>"]).sum() == corpus.train.num_documents
    assert tokens[0] == ids["<s>"]
    begin, end = ids["<s>"], ids["<|im_end|>"]
    assert corpus.described == f"documents begin with token {begin} and end with token {end}"
    other = prepare(DataConfig(**options, bos="none", eos="<|endoftext|>"), str(hub_folder)).train.read()
    assert ids["<s>"] not in other and other[-1] == ids["<|endoftext|>"]
    with pytest.raises(ValueError, match="data.eos=</x> is not a token of this tokenizer"):
        prepare(DataConfig(**options, eos="</x>"), str(hub_folder))
    saved = tokenizer.save(tmp_path)
    again = load_tokenizer(str(saved))
    assert (again.digest, again.bos, again.settings) == (tokenizer.digest, tokenizer.bos, tokenizer.settings)


@pytest.mark.parametrize("single, bos", [("<s> $A", "<s>"), ("$A <s>", None), ("$A", None)])
def test_a_token_that_the_post_processor_puts_before_texts_begins_documents(tmp_path, single, bos):
    """Llama 3: tokenizer_config.json has no add_bos_token."""
    inner = train_bpe([TEXT], 300).library
    inner.add_special_tokens(["<s>"])
    inner.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", inner.token_to_id("<s>"))])
    inner.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).bos == (bos and inner.token_to_id(bos))
    inner.post_processor = TemplateProcessing(single="<s> <s> $A", special_tokens=[("<s>", inner.token_to_id("<s>"))])
    inner.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="begins texts with 2 tokens, <s> <s>"):
        load_tokenizer(str(tmp_path))


def test_chats_are_encoded_as_transformers_does(hub_folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(str(hub_folder))
    ours = load_tokenizer(str(hub_folder))
    template = chat_template(DataConfig("chat", "x"), ours)
    text, answers = template.render(CHAT)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False)
    ids, counted = ours.encode_spans(text, answers)
    assert ids.tolist() == theirs.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    decoded = theirs.decode(ids[counted])
    assert decoded == "Because of é 😀.<|im_end|>\nBlue.<|im_end|>\n"


def test_every_answer_of_the_default_template_ends_with_the_token_that_ends_documents(tmp_path):
    tokenizer = load_tokenizer(str(train_bpe([TEXT], 300).save(tmp_path)))  # no tokenizer_config.json states one
    ids, counted = tokenizer.encode_spans(*chat_template(DataConfig("chat", "x"), tokenizer).render(CHAT))
    assert (ids[counted] == tokenizer.eod).sum() == 2


def test_a_space_before_an_answer_is_not_part_of_it(tmp_path):
    """Llama 3: the post-processor trims spaces off the offsets."""
    inner = train_bpe([TEXT], 300).library
    inner.post_processor = ByteLevel(trim_offsets=True)
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    digest, text = tokenizer.digest, "sky? Zero"
    ids, counted = tokenizer.encode_spans(text, ((5, 9),))
    assert tokenizer.decode(ids[counted]) == text[5:] and tokenizer.decode(ids) == text
    assert load_tokenizer(str(tokenizer.save(tmp_path))).digest == digest


@pytest.mark.parametrize("kind", ["bytes", "folder"])
@pytest.mark.parametrize(
    "template", [None, "{{ bos_token }}{{ eos_token }}{% for m in messages %}{{ m.content }}|{% endfor %}"]
)
def test_an_exported_folder_has_the_chat_template_of_the_run(hub_folder, tmp_path, kind, template):
    transformers = pytest.importorskip("transformers")
    (tmp_path / "template").write_text(template or "")
    config = DataConfig("chat", "x", template=str(tmp_path / "template") if template else None)
    tokenizer = load_tokenizer("bytes" if kind == "bytes" else str(hub_folder))
    folder = tmp_path / "exported"
    folder.mkdir()
    write_tokenizer(folder, tokenizer, 128)
    write_template(folder, config, tokenizer)
    text, _ = chat_template(config, tokenizer).render(CHAT)
    assert transformers.AutoTokenizer.from_pretrained(str(folder)).apply_chat_template(CHAT, tokenize=False) == text
    again = load_tokenizer(str(folder))
    assert chat_template(DataConfig("chat", "x"), again).render(CHAT)[0] == text
    write_template(tmp_path, DataConfig("text", "x"), tokenizer)
    assert not (tmp_path / "chat_template.jinja").exists()


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools is not none or documents is not none %}tools{% endif %}",
        "{% if tools is defined %}defined{% endif %}",
        "{{ sep_token }}{{ cls_token }}{{ mask_token }}",
        "{{ {'b': messages[0].content, 'a': 1} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
    ],
)
def test_templates_find_what_transformers_passes(hub_folder, tmp_path, source):
    transformers = pytest.importorskip("transformers")
    shutil.copytree(hub_folder, tmp_path / "copy")
    path = tmp_path / "copy" / "tokenizer_config.json"
    more = {"chat_template": source + "é", "sep_token": "<s>", "cls_token": "<|im_start|>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | more))
    theirs = transformers.AutoTokenizer.from_pretrained(str(tmp_path / "copy"))
    ours = chat_template(DataConfig("chat", "x"), load_tokenizer(str(tmp_path / "copy")))
    assert ours.question(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece_models(tmp_path, kind):
    sentencepiece = pytest.importorskip("sentencepiece")
    (tmp_path / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"), model_prefix=str(tmp_path / "tokenizer"), vocab_size=60, model_type=kind,
        hard_vocab_limit=False, byte_fallback=False, minloglevel=2,
    )  # fmt: skip
    inner = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = load_tokenizer(str(tmp_path))  # the folder
    line = TEXT.split("\n")[0]
    assert tokenizer.encode(line).tolist() == inner.encode(line) and tokenizer.decode(tokenizer.encode(line)) == line
    assert (tokenizer.eod, tokenizer.vocab_size, tokenizer.bos) == (inner.eos_id(), inner.vocab_size(), None)
    assert "end with token" in marked(tokenizer, "auto", "auto")
    (tmp_path / "copy").mkdir()
    copy = load_tokenizer(str(tokenizer.save(tmp_path / "copy")))
    assert copy.digest == tokenizer.digest
    np.testing.assert_array_equal(copy.encode_batch([line])[0], tokenizer.encode(line))
    (tmp_path / "tokenizer.model").write_bytes(b"broken")
    with pytest.raises(ValueError, match="cannot load tokenizer=.*SentencePiece"):
        load_tokenizer(str(tmp_path / "tokenizer.model"))
