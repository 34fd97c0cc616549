"""The stored prediction that stands below a laptop's table."""

import re

from rich.console import Console

from mstrain.benchmarks.config import load
from mstrain.benchmarks.pod import pod_table, read_pod
from tests.docs.steps import pod_rows


def test_the_stored_rows_are_those_of_the_page_with_every_loss():
    assert sorted(read_pod(), key=str) == sorted(pod_rows(), key=str)


def test_the_table_prints_a_command_that_benchmark_takes():
    console = Console(width=200, record=True, file=open("/dev/null", "w"))
    console.print(pod_table())
    text = console.export_text()
    assert "Predicted" in text and "not measured" in text
    words = re.search(r"benchmark.py ((?:.|\n)*)", text)[1].replace("\n", " ").strip()
    keys = re.findall(r'(\w+)=("[^"]*"|\S+)', words)
    config = load([f"{key}={value.strip(chr(34))}" for key, value in keys])
    assert config.target == "v5p-512" and "meshslice" in config.algorithms.split()
