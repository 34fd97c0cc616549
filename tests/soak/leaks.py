"""Memory, descriptors and threads of a training process over many tiny steps: they should not grow.

    python -m tests.soak.leaks --steps 3000 --folder /tmp/leaks

Samples /proc of one `train.py` process (Linux) every 100 steps by its metrics, and prints the growth from the
first third to the last.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from tests.descriptors import descriptors

ROOT = Path(__file__).resolve().parents[2]
KEYS = [
    "model=tiny", "model.layers=1", "model.width=32", "model.mlp_dim=64", "mesh=1x2", "data=synthetic",
    "data.num_tokens=65536", "vocab_size=61", "seq=16", "batch=4", "eval.every=100", "checkpoint.every=100",
    "sample.tokens=0", "log_every=1",
]  # fmt: skip


def sample(pid: int) -> dict[str, int]:
    """Resident MiB, open descriptors and threads of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    return {
        "rss_mib": int(status["VmRSS"].split()[0]) // 1024,
        "descriptors": sum(1 for _ in descriptors(pid)),
        "threads": int(status["Threads"]),
    }


def last_step(metrics: Path) -> int:
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def watch(steps: int, folder: Path) -> list[dict[str, int]]:
    """Trains `steps` steps in `folder`; returns a sample about every 100 steps."""
    run = folder / "run"
    words = [*KEYS, f"steps={steps}", f"run_dir={run}", f"data.cache_dir={folder / 'cache'}"]
    process = subprocess.Popen([sys.executable, "train.py", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    rows, due = [], 100
    while process.poll() is None:
        step = last_step(run / "metrics.jsonl")
        if step >= due:
            rows.append({"step": step, **sample(process.pid)})
            due = step + 100
        time.sleep(1)
    assert process.returncode == 0, f"train.py ended with {process.returncode}"
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    rows = watch(options.steps, options.folder)
    for row in rows:
        print(*(f"{name} {value}" for name, value in row.items()), sep="  ")
    third = len(rows) // 3
    for name in ("rss_mib", "descriptors", "threads"):
        first, last = (statistics.median(row[name] for row in part) for part in (rows[:third], rows[-third:]))
        print(f"{name}: median {first:.0f} in the first third, {last:.0f} in the last")


if __name__ == "__main__":
    main()
