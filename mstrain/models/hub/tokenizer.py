"""The tokenizer of a Hugging Face folder: tokenizer.json and tokenizer_config.json."""

import json
from pathlib import Path

import tokenizers

from mstrain.data import DataConfig
from mstrain.data.recipes import chat_template
from mstrain.data.tokenizers import CONFIG_FILE, SPECIAL_TOKENS, TEMPLATE_FILE, Tokenizer, special_token
from mstrain.models.hub.folder import TOKENIZER

BYTES_END = "<|endoftext|>"


def write_tokenizer(folder: Path, tokenizer: Tokenizer, context: int) -> dict[str, int | None]:
    """Writes `tokenizer`, with its chat template; returns its special tokens as keys of config.json."""
    special = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod, "pad_token_id": None}
    saved = tokenizer.save(folder)
    if saved is None:
        byte_tokenizer(tokenizer.eod).save(str(folder / TOKENIZER))
    elif saved.name != TOKENIZER:  # a SentencePiece model states its own tokens
        return special
    inner = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    end = None if tokenizer.eod is None else inner.id_to_token(tokenizer.eod)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        **{key: tokenizer.settings[key] for key in ("chat_template", *SPECIAL_TOKENS) if key in tokenizer.settings},
        **({"eos_token": end} if end else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return special


def write_template(folder: Path, data: DataConfig, tokenizer: Tokenizer) -> None:
    """Writes the chat template that the conversations of `data` had; without any, the folder keeps the tokenizer's own.

    Raises ValueError when data.template cannot be read.
    """
    if "chat" not in ([part.source for part, _ in data.parts] if data.mixture else [data.source]):
        return
    template = chat_template(data, tokenizer)
    config = folder / CONFIG_FILE
    settings = json.loads(config.read_text()) if config.is_file() else {}
    changed = [name for name, text in template.tokens.items() if text != (special_token(settings, name) or "")]
    sets = "".join(f"{{% set {name} = {json.dumps(template.tokens[name])} %}}" for name in changed)
    if sets + template.source != tokenizer.settings.get("chat_template"):
        (folder / TEMPLATE_FILE).write_text(sets + template.source)


def byte_tokenizer(end: int | None) -> tokenizers.Tokenizer:
    """UTF-8 bytes as a byte-level BPE without merges; token `end` is the end of a document."""
    vocab = {_character(byte): byte for byte in range(256) if byte != end}
    if end is not None:
        vocab[BYTES_END] = end
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if end is not None:
        inner.add_special_tokens([BYTES_END])
    return inner


def _character(byte: int) -> str:
    """The character for `byte` in byte-level BPE (Radford et al., GPT-2, 2019): itself where it is printable."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in printable else chr(256 + [b for b in range(256) if b not in printable].index(byte))
