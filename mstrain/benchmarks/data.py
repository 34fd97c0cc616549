"""bench=data: tokens per second that one core reads from a tokenized corpus, and the rate of tokenizing compared with
the library.

Rates are per second of CPU time, of all threads, because other processes do not change it. The text is that of the
running Python's standard library.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mstrain.benchmarks.config import BenchmarkConfig
from mstrain.data.batches import Batches
from mstrain.data.documents import Document, Skips
from mstrain.data.files import TextFiles
from mstrain.data.split import Split
from mstrain.data.token_file import TokenFile, TokenWriter
from mstrain.data.tokenizers import HuggingFaceTokenizer, train_bpe
from mstrain.data.writing import write_tokens

VOCAB_SIZE, NUM_TOKENS = 50257, 1 << 22
TEXT_BYTES, SAMPLE_BYTES = 1 << 20, 1 << 18
LEAST_TOKENS = 1 << 19  # read per repetition


def measure_data(config: BenchmarkConfig, console: Console) -> int:
    """Prints the table; returns the exit code."""
    table = Table("Measured", "Rate", title="Data", title_justify="left")
    with tempfile.TemporaryDirectory() as folder:
        for pack in ("concat", "segments", "none"):
            rate = _reading(Path(folder) / "tokens.bin", config, pack)
            table.add_row(
                f"reading, pack={pack}, seq={config.seq}, batch={config.batch or 16}",
                f"{rate / 1e6:,.1f} M tokens/s a core",
            )
        own, library = _tokenizing(Path(folder), config.repeats)
        table.add_row("tokenizing (BPE, 2048 tokens)", f"{own / 1e6:,.2f} MB/s a core")
        table.add_row(
            "the library `tokenizers` alone", f"{library / 1e6:,.2f} MB/s a core, so {own / library:.0%} of it"
        )
    console.print(table)
    return 0


def _reading(path: Path, config: BenchmarkConfig, pack: str) -> float:
    """Tokens per CPU second."""
    if not path.exists():
        random = np.random.default_rng(config.seed)
        with TokenWriter(path, VOCAB_SIZE) as writer:
            writer.append(random.integers(0, VOCAB_SIZE, NUM_TOKENS))
    batches = Batches(TokenFile.open(path, eod=0), config.seq, config.batch or 16, config.seed, pack=pack)
    tokens = batches.batch_size * config.seq
    steps = max(LEAST_TOKENS // tokens, 1)
    times = []
    for repeat in range(config.repeats):
        start = time.process_time()
        for step in range(repeat * steps, (repeat + 1) * steps):
            batches.batch(step)
        times.append(time.process_time() - start)
    return steps * tokens / statistics.median(times)


def _tokenizing(folder: Path, repeats: int) -> tuple[float, float]:
    """Bytes of text per second: of making the corpus, and of encoding by the library alone."""
    texts, size = [], 0
    for document in TextFiles.of_stdlib().documents(Skips("files")):
        texts.append("".join(document.chunks))
        size += document.num_bytes
        if size >= TEXT_BYTES:
            break
    tokenizer = train_bpe(["".join(texts)[:SAMPLE_BYTES]], 2048)
    documents = [Document(str(n), len(text.encode()), [text]) for n, text in enumerate(texts)]

    def write() -> None:
        pieces = (piece for document in documents for piece in Split(0.05).pieces(document))
        write_tokens(pieces, tokenizer, folder, False, lambda *_: None)

    return _rate(write, size, repeats), _rate(lambda: _encode(tokenizer, texts), size, repeats)


def _encode(tokenizer: HuggingFaceTokenizer, texts: list[str]) -> None:
    tokenizer.library.encode_batch_fast(texts, add_special_tokens=False)


def _rate(function: Callable[[], None], size: int, repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return size / statistics.median(times)
