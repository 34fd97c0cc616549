"""Conversations in JSON lines, written out by the tokenizer's chat template; only answers count in the loss.

A line is `{"messages": [{"role": ..., "content": ...}, ...]}`, or an instruction with its response. The template is
the Jinja template of the tokenizer's folder (as `transformers` renders it), or DEFAULT_TEMPLATE.
"""

import datetime
import json
from collections.abc import Iterator
from typing import Any

from mstrain.data.documents import Document, Skips, text_digest
from mstrain.data.files import JsonLines
from mstrain.data.listing import Files

DEFAULT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
"""The template of tokenizers that have none."""
QUESTIONS, ANSWERS = ("instruction", "prompt", "question"), ("response", "output", "completion", "answer")


class Chats(JsonLines):
    """One document per conversation. Raises ValueError, with file and line, for a record that is not one or has no
    answer."""

    kind, unit = "chat", "conversations"

    def __init__(self, files: Files, template: "Template"):
        super().__init__(files, "messages")
        self._options, self._template = (template.source, json.dumps(template.tokens)), template

    def _document(self, where: str, record: Any, skips: Skips) -> Iterator[Document]:
        name, _, line = where.rpartition(":")
        try:
            text, answers = self._template.render(messages_of(record))
            size = len(text.encode("utf-8"))
        except (ValueError, TypeError) as error:
            reason = "its text is not valid Unicode" if isinstance(error, UnicodeEncodeError) else str(error)
            raise ValueError(f"{self.files.where(name)}, line {line}: {reason}") from None
        yield Document(where, size, [text], answers)


def messages_of(record: Any) -> list[dict[str, Any]]:
    """The messages of a record. Raises ValueError when it is not a conversation with an answer."""
    if not isinstance(record, dict):
        raise ValueError('the line is not a JSON object: write {"messages": [...]}')
    if record.get("tools"):
        raise ValueError(
            "the record has tools, which are not passed to the chat template: write them into a system message and "
            "remove the key"
        )
    messages = record.get("messages", record.get("conversations"))
    if messages is None:
        question = next((record[key] for key in QUESTIONS if key in record), None)
        answer = next((record[key] for key in ANSWERS if key in record), None)
        if question is None:
            raise ValueError(
                f"the record has neither messages nor {' or '.join(QUESTIONS)} (keys: {', '.join(record) or 'none'}): "
                'write {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'
            )
        if extra := record.get("input"):
            texts = isinstance(question, str) and isinstance(extra, str)
            question = f"{question}\n\n{extra}" if texts else None
        system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
        messages = [*system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages
    ):
        raise ValueError("messages is not a list of objects with role and content")
    for number, message in enumerate(messages, 1):
        content = message.get("content")
        if not isinstance(content, str) or (message["role"] == "assistant" and not content.strip()):
            what = "an answer without text" if message["role"] == "assistant" else "without text"
            raise ValueError(f"message {number} ({message['role']}) is {what}: write its content, or remove the line")
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError('the conversation has no answer: add a message with "role": "assistant", or remove the line')
    return messages


class Template:
    """A chat template and the special tokens that it may write. Raises ValueError when it is not valid Jinja."""

    def __init__(self, source: str, tokens: dict[str, str]):
        self.source, self.tokens = source, tokens
        self._compiled = _compile(source)

    @property
    def digest(self) -> str:
        return text_digest(self.source, json.dumps(self.tokens))

    def render(self, messages: list[dict]) -> tuple[str, tuple[tuple[int, int], ...]]:
        """(text, ranges of characters of the answers).

        An answer is what the template adds for its message after the generation prompt. Raises ValueError when the
        template refuses the messages, or changes earlier turns when a later one follows.
        """
        text, answers = self._render(messages), []
        for place, message in enumerate(messages):
            if message["role"] == "assistant":
                begin = self._common(text, messages[:place], add_generation_prompt=True)
                end = self._common(text, messages[: place + 1])
                if end <= begin:
                    raise ValueError(
                        "the chat template leaves out an answer: give one that does not, data.template=FILE"
                    )
                answers.append((begin, end))
        return text, tuple(answers)

    def question(self, messages: list[dict]) -> str:
        """The text of `messages` up to where the next answer begins.

        Raises ValueError when the template refuses them.
        """
        return self._render(messages, add_generation_prompt=True)

    def _common(self, text: str, messages: list[dict], add_generation_prompt: bool = False) -> int:
        """The length of the rendered `messages`, which begin `text`."""
        part = self._render(messages, add_generation_prompt)
        if not text.startswith(part):
            raise ValueError(
                "the chat template writes earlier turns differently once others follow, so its answers cannot be "
                "located: give one that does not, data.template=FILE"
            )
        return len(part)

    def _render(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        import jinja2

        try:
            # `transformers` passes the Nones too: templates compare them with none.
            return self._compiled.render(
                messages=messages, tools=None, documents=None, add_generation_prompt=add_generation_prompt,
                **self.tokens,
            )  # fmt: skip
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses the conversation ({error})") from None


def _compile(source: str):
    """Compiles as `transformers` does: sandboxed, blocks trimmed, with raise_exception, strftime_now and tojson."""
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str):
        raise jinja2.TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Generation(jinja2.ext.Extension):
        """The tag {% generation %}, which marks answers for `transformers`, writes its content."""

        tags = {"generation"}

        def parse(self, parser):
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise ValueError(f"the chat template is not valid Jinja ({error}): give another, data.template=FILE") from None
