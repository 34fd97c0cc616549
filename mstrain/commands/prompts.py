"""The prompts of `mstrain sample`: texts, or conversations that the chat template writes."""

import json
from pathlib import Path
from typing import Any

from mstrain.data.chat import Template

Prompt = str | list[dict[str, Any]]  # text, or messages


def read_prompts(name: str, chat: bool) -> list[Prompt]:
    """The prompts of a file: lines of text, or of a `.jsonl` file objects with `prompt` (text), or with `chat` also
    `messages`, whose last answer is left out.

    Raises ValueError, with the line, for a file without prompts.
    """
    path = Path(name).expanduser()
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # splitlines() would cut at U+2028 too, which JSON may contain
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"Cannot read prompts={name} ({getattr(error, 'strerror', None) or error}).") from None
    found = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"prompts={name} has no prompts. Write one per line.")
    if path.suffix == ".jsonl":
        return [_parsed(line, f"prompts={name}, line {number}", chat) for number, line in found]
    return [line for _, line in found]


def text_of(prompt: Prompt, template: Template | None) -> str:
    """A prompt as text: written by the chat template, if there is one, up to where the answer begins."""
    if template is None:
        assert isinstance(prompt, str)
        return prompt
    return template.question([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)


def _parsed(line: str, where: str, chat: bool) -> Prompt:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}).") from None
    record = record if isinstance(record, dict) else {}
    prompt, messages = record.get("prompt"), record.get("messages")
    if isinstance(prompt, str):
        return prompt
    if chat and messages and isinstance(messages, list) and all(_is_message(message) for message in messages):
        return messages[:-1] if messages[-1]["role"] == "assistant" else messages
    names = 'neither a text "prompt" nor "messages" with role and content' if chat else 'no text "prompt"'
    raise ValueError(f'{where} has {names}. Write {{"prompt": "TEXT"}}.')


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
