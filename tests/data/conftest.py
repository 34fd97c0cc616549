"""Small token files and corpora, made on disk."""

import numpy as np
import pytest

from mstrain.data import TokenFile
from mstrain.data.token_file import TokenWriter


@pytest.fixture
def make_file(tmp_path):
    """make_file(ids, vocab_size, text_bytes) -> TokenFile holding exactly these ids."""

    def make(ids, vocab_size=1 << 16, text_bytes=0, name="tokens.bin") -> TokenFile:
        with TokenWriter(tmp_path / name, vocab_size) as writer:
            writer.append(np.asarray(ids), text_bytes)
        return TokenFile.open(tmp_path / name)

    return make


@pytest.fixture
def folder(tmp_path):
    """A folder of forty text files of several hundred bytes each."""
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(40):
        (root / f"{number:02}.txt").write_text(f"The {number}th Straße, δοκιμή 😀.\n" * (10 + number))
    return root
