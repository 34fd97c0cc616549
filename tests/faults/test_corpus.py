"""A token file that changes while a run reads it: the run names the file, and loses no checkpoint."""

import sys

from mstrain.data import DataConfig, prepare
from mstrain.job.exit_codes import RESTART
from tests.job.processes import Job, arguments

TEXT = ("data=text", "tokenizer=bytes", "vocab_size=null", "data.num_tokens=4194304")
USUAL = ("steps=6", "mesh=1x2", "checkpoint.every=2", "eval.every=100")

# train.py whose fourth batch finds the token file truncated.
TRUNCATES = """
import os, sys
sys.path.insert(0, ".")
from mstrain.cli import run_command
from mstrain.commands.train import COMMAND
from mstrain.data import Batches
batch = Batches.batch
def truncates(self, step, rows=slice(None)):
    if step == 3:
        os.truncate(self.file.path, 5000)
    return batch(self, step, rows)
Batches.batch = truncates
run_command(COMMAND)
"""


def test_a_token_file_truncated_under_a_running_job_is_named_and_nothing_is_lost(tmp_path):
    folder, cache = tmp_path / "text", tmp_path / "cache"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"line {number} of the corpus\n" * 40)
    words = arguments(tmp_path / "run", cache, *USUAL, *TEXT, f"data.path={folder}")
    job = Job(tmp_path, words, command=[sys.executable, "-c", TRUNCATES])
    assert job.wait() == [RESTART], job.output[-3000:]
    assert "train.bin was truncated" in job.output and "Traceback" not in job.output
    saved = [folder.name for folder in (tmp_path / "run" / "checkpoints").iterdir()]
    assert max(int(name) for name in saved if name.isdigit()) == 2
    corpus = prepare(DataConfig("text", str(folder), cache_dir=str(cache)))
    assert f"token file {corpus.train.path} was truncated" in job.output and corpus.train.path.stat().st_size > 5000
