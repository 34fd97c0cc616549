"""Text of a sequence that is generated token by token, up to a stop string."""

import numpy as np

from mstrain.data.tokenizers import Tokenizer

_BEFORE = 5  # tokens of the prompt that decide how the first new one is written, such as its leading space
_INCOMPLETE = "\ufffd"  # at the end: a character of which more bytes follow


class TextStream:
    """The text after a prompt.

    Attributes:
      ids: the tokens after the prompt, without an end of document.
      text: all text so far, without a stop string.
      end: why the text ended: `eos` (end of document), `stop` (a stop string), `length`; None while it continues.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: np.ndarray, stop: tuple[str, ...] = ()):
        self.ids: list[int] = []
        self.text, self.end = "", None
        self._tokenizer, self._stop = tokenizer, stop
        self._recent = [int(token) for token in prompt[-_BEFORE:]]
        self._written = len(self._recent)  # tokens of `_recent` whose text is in `text`
        self._shown = 0

    def add(self, token: int) -> str:
        """The text that `token` makes certain: text that may begin a stop string is kept back."""
        assert self.end is None
        if token == self._tokenizer.eod:
            return self.finish("eos")
        self.ids.append(token)
        self._recent.append(token)
        self._write(self._new_text())
        if self.end == "stop":
            return self._show(len(self.text))
        return self._show(len(self.text) - _kept_back(self.text, self._stop))

    def finish(self, end: str = "length") -> str:
        """Ends the text; returns what was kept back."""
        if self.end is None:
            self._write(self._new_text(whole=True))
            self.end = self.end or end
        return self._show(len(self.text))

    def _new_text(self, whole: bool = False) -> str:
        """The text of the tokens that are not written yet; empty while its last character is incomplete."""
        before = self._tokenizer.decode(np.array(self._recent[: self._written], np.int64))
        after = self._tokenizer.decode(np.array(self._recent, np.int64))
        if after.endswith(_INCOMPLETE) and not whole:
            return ""
        self._recent = self._recent[max(0, self._written - _BEFORE) :]
        self._written = len(self._recent)
        return after[len(before) :]

    def _write(self, new: str) -> None:
        begin = max(0, len(self.text) - max(map(len, self._stop), default=0))
        self.text += new
        places = [place for stop in self._stop if (place := self.text.find(stop, begin)) >= 0]
        if places:
            self.text, self.end = self.text[: min(places)], "stop"

    def _show(self, length: int) -> str:
        shown, self._shown = self._shown, max(length, self._shown)
        return self.text[shown : self._shown]


def _kept_back(text: str, stop: tuple[str, ...]) -> int:
    """Length of the longest end of `text` with which a stop string begins."""
    lengths = [n for word in stop for n in range(1, len(word)) if text.endswith(word[:n])]
    return max(lengths, default=0)
