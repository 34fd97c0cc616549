"""Summarizes a finished run: a table, the loss curve, a text sample, summary.json."""

import json
from pathlib import Path

import jax
from rich.markup import escape
from rich.table import Table

from mstrain.program.step import State
from mstrain.training import files
from mstrain.training.best_effort import BestEffort
from mstrain.training.curves import plot_loss
from mstrain.training.evaluate import Evaluator
from mstrain.training.guard import FILE as BAD_STEPS
from mstrain.training.run import Run
from mstrain.training.sample import sample

TRAINING = ("steps", "input", "evaluate", "save")  # kinds of the time between the first step and the last save
FILE = "summary.json"


def is_summarized(run: Run) -> bool:
    """Whether run_dir has the summary of all steps of `run`, which a process that is killed after the last save does
    not write."""
    try:
        found = json.loads(files.read(Path(run.config.run_dir) / FILE))
    except (OSError, ValueError):
        found = None
    complete = isinstance(found, dict) and found.get("steps") == run.config.steps
    return run.job.all_gather("summary", json.dumps(complete))[0] == json.dumps(True)


def summarize(
    run: Run, state: State, evaluator: Evaluator, step_seconds: float | None, observers: BestEffort, bad_steps: int
) -> None:
    """Prints and saves the results of a finished run; `step_seconds` is None where no step was measured."""
    config, tokenizer = run.config, run.corpus.tokenizer
    continuation = sample(config.sample, tokenizer, run.module, state["params"], config.seed)
    if jax.process_index() != 0:
        return
    directory = Path(config.run_dir)
    per_second = config.tokens / step_seconds if step_seconds else None
    account = run.goodput.account()
    results = {
        "steps": config.steps,
        "validation_loss": evaluator.nats,
        "bits_per_byte": evaluator.bits_per_byte,
        "unigram_bits_per_byte": evaluator.unigram_bits_per_byte,
        "tokens_per_second": per_second,
        "step_seconds": step_seconds,
        "predicted_step_seconds": run.prediction.seconds if run.prediction else None,
        "mfu": run.mfu(step_seconds) if step_seconds else None,
        "training_seconds": sum(account["seconds"][kind] for kind in TRAINING),
        "bad_steps": bad_steps,
        **account,
        "sample": continuation,
    }
    text = json.dumps(results, indent=2) + "\n"
    observers.do(FILE, files.replace, directory / FILE, text.encode())
    observers.do("loss.png", plot_loss, directory, evaluator.unigram_nats)
    table = Table("Result", "Value", title=f"{run.module.model.name}, {config.steps} steps", title_justify="left")
    table.add_row("validation loss", f"{evaluator.nats:.4f} nats/token")
    if evaluator.bits_per_byte is not None:
        table.add_row("", f"{evaluator.bits_per_byte:.3f} bits/byte")
        table.add_row("unigram model", f"{evaluator.unigram_bits_per_byte:.3f} bits/byte (no context)")
    if per_second:
        table.add_row("throughput", f"{per_second:,.0f} tokens/s")
    table.add_row("training time", f"{results['training_seconds']:,.0f} s")
    spent = results["seconds"]
    where = ", ".join(f"{kind} {spent[kind]:,.0f} s" for kind in spent if spent[kind] >= 1)
    restarts = f", {results['attempts'] - 1} restarts" if results["attempts"] > 1 else ""
    table.add_row("goodput", f"{results['goodput']:.1%} productive time{restarts} ({where})")
    if results["bad_steps"]:
        table.add_row("bad steps", f"{results['bad_steps']}, listed in {directory / BAD_STEPS}")
    if failures := results["observer_failures"]:
        table.add_row("not written", ", ".join(f"{name} {count} times" for name, count in failures.items()))
    table.add_row("loss curve", str(directory / "loss.png"))
    run.console.print(table)
    if continuation is not None:
        run.console.print(f"[bold]Sample[/]\n{escape(continuation)}")
