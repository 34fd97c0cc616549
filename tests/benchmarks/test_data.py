"""bench=data prints the rates of reading and of tokenizing."""

import io

import pytest
from rich.console import Console

from mstrain.benchmarks import data
from mstrain.benchmarks.config import BenchmarkConfig


def test_every_rate_is_printed(monkeypatch):
    for name, value in {
        "NUM_TOKENS": 1 << 14,
        "TEXT_BYTES": 1 << 14,
        "SAMPLE_BYTES": 1 << 12,
        "LEAST_TOKENS": 1,
    }.items():
        monkeypatch.setattr(data, name, value)
    console = Console(file=io.StringIO(), width=120)
    assert data.measure_data(BenchmarkConfig(bench="data", repeats=1), console) == 0
    text = console.file.getvalue()
    assert text.count("M tokens/s a core") == 3 and text.count("MB/s a core") == 2
    with pytest.raises(ValueError, match="has no effect with bench=data"):
        BenchmarkConfig(bench="data", remat="full")
