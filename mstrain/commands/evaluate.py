"""Computes the loss of a checkpoint of a run, or of a Hugging Face folder, on any mesh and data."""

import dataclasses
import json
import math
import time
from pathlib import Path
from typing import Any

from mstrain.checks import at_least, one_of
from mstrain.cli import Command
from mstrain.commands.recorded import Source, check_new_file, help_of, source_config

SPLITS = ("validation", "train", "all")


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(Source):
    """One evaluation. Keys of train choose mesh, algorithms and other data: mesh=4x2, data=text data.path=FILE."""

    split: str = "validation"
    """Part of the data: `validation`, `train`, or `all` of it."""
    batches: int | None = None
    """Number of validation batches, the same as in evaluations of the run; null evaluates every token of the split
    once."""
    documents: str | None = None
    """New file for the loss of every document, one JSON object each. Documents are then evaluated one by one, without
    preceding documents as context."""
    out: str | None = None
    """New file for the results, a JSON object."""

    def __post_init__(self):
        super().__post_init__()
        one_of("split", self.split, SPLITS)
        if self.batches is not None:
            at_least("", self, batches=1)
            if self.split != "validation" or self.documents:
                raise ValueError("batches= counts validation batches. Remove batches=, or split= and documents=.")
        check_new_file("documents", self.documents)
        check_new_file("out", self.out)
        if self.out is not None and self.out == self.documents:
            raise ValueError(f"out= and documents= both name {self.out}. Type two files.")


def load_config(arguments: list[str]) -> EvaluateConfig:
    return source_config(EvaluateConfig, arguments)[0]


def main(arguments: list[str]) -> int:
    from mstrain.job.job import joined
    from mstrain.job.process_info import find_process
    from mstrain.training.files import replace
    from mstrain.training.prepare import prepare

    own, given = source_config(EvaluateConfig, arguments)
    config = own.config(given)
    if own.documents and (config.data.mixture or config.data.source == "synthetic"):
        raise ValueError("documents= needs documents of one source. Remove documents=, or type another data=.")
    process, devices = find_process(config.coordinator, config.processes, config.process)
    with joined(process, config.hosts, config.run_dir, devices) as job:
        run = prepare(config, job, only_read=True)
        if own.split != "validation" and run.corpus.stream:
            raise ValueError(f"split={own.split} needs all tokens, but data.window keeps some. Remove data.window.")
        name, params = own.parameters(job, run.module)
        begun = time.perf_counter()
        results = _in_batches(own.batches, run, params) if own.batches else _measured(own, run, params)
        if not math.isfinite(results["loss"]):
            raise ValueError(f"the loss of {name} is not finite, so its weights are damaged. Type another checkpoint.")
        results |= {"model": name, "data": config.data.source, "split": own.split}
        results["seconds"] = time.perf_counter() - begun
        _show(results, run.console)
        if own.out and job.leads:
            listed = {key: value for key, value in results.items() if key != "documents"}
            replace(Path(own.out), (json.dumps(listed, indent=2) + "\n").encode())
        if own.documents and job.leads:
            lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in results["documents"]]
            replace(Path(own.documents), "".join(lines).encode())
    return 0


def _in_batches(batches: int, run, params) -> dict[str, Any]:
    """The batches of a run's own evaluations."""
    from mstrain.training.evaluate import EvalConfig, Evaluator
    from mstrain.training.measure import Measured

    evaluator = Evaluator(EvalConfig(batches=batches), run.module, run.corpus.validation, run.validation_feed)
    nats = evaluator.measure(params)
    found = Measured(nats * evaluator.targets, evaluator.targets).to_json()
    return found | {"bits_per_byte": evaluator.bits_per_byte, "unigram_loss": evaluator.unigram_nats}


def _measured(own: EvaluateConfig, run, params) -> dict[str, Any]:
    """Every token of the split, of each source of a mixture."""
    corpora = run.corpus.parts or (run.corpus,)
    weights = run.corpus.validation.weights if run.corpus.parts else [1.0]
    parts = [_of_corpus(own, corpus, run, params) for corpus in corpora]
    if len(parts) == 1:
        return parts[0]
    loss = sum(weight * part["loss"] for weight, part in zip(weights, parts, strict=True))
    text_bytes = None  # of a token of the mixture
    if all(part["bits_per_byte"] for part in parts):
        bits = [part["loss"] / math.log(2) for part in parts]
        text_bytes = sum(w * b / part["bits_per_byte"] for w, b, part in zip(weights, bits, parts, strict=True))
    paths = [part.path for part, _ in run.config.data.parts]
    sources = [{"path": path, "weight": w, **part} for path, w, part in zip(paths, weights, parts, strict=True)]
    from mstrain.training.measure import Measured

    tokens = sum(part["tokens"] for part in parts)
    return Measured(loss * tokens, tokens, text_bytes and text_bytes * tokens).to_json() | {"sources": sources}


def _of_corpus(own: EvaluateConfig, corpus, run, params) -> dict[str, Any]:
    import numpy as np

    from mstrain.data import unigram_nats_per_token
    from mstrain.data.in_order import InOrder
    from mstrain.data.recipes import document_names
    from mstrain.training.measure import Measured, measure, of_documents, of_file

    config, sides = run.config, ("train", "validation") if own.split == "all" else (own.split,)
    pack = "none" if own.documents else corpus.pack(config.pack)
    parts, documents = [], []
    names = document_names(config.data, corpus.tokenizer) if own.documents and config.data.source != "tokens" else {}
    for side in sides:
        file = getattr(corpus, side)
        rows = InOrder(file, config.seq, config.batch, pack)
        nats, targets = measure(run.module, params, rows, config.accumulate)
        parts.append(of_file(file, nats, targets))
        if own.documents:
            found = of_documents(rows, nats, targets, corpus.tokenizer)
            known = names.get(side, []) if len(names.get(side, [])) == len(found) else [None] * len(found)
            documents += [
                {"split": side, "number": number, "name": name} | one.to_json()
                for number, (name, one) in enumerate(zip(known, found, strict=True), 1)
            ]
    sizes = [part.text_bytes for part in parts]
    text_bytes = float(np.sum(sizes)) if all(sizes) else None
    targets = sum(part.targets for part in parts)
    if not targets:
        raise ValueError(f"{getattr(corpus, sides[-1]).path} has no token to predict. Type data.path= of other data.")
    found = Measured(sum(part.nats for part in parts), targets, text_bytes).to_json()
    if len(sides) == 1:
        found["unigram_loss"] = unigram_nats_per_token(getattr(corpus, sides[0]))
    return found | ({"documents": documents} if own.documents else {})


def _show(results: dict[str, Any], console) -> None:
    from rich.table import Table

    table = Table("Result", "Value", title=results["model"], title_justify="left")
    table.add_row("tokens", f"{results['tokens']:,} of {results['data']}, {results['split']}")
    table.add_row("loss", f"{results['loss']:.4f} nats/token")
    table.add_row("perplexity", f"{results['perplexity']:.3f}")
    if results["bits_per_byte"] is not None:
        table.add_row("bits per byte", f"{results['bits_per_byte']:.4f}")
    if results.get("unigram_loss") is not None:
        table.add_row("unigram model", f"{results['unigram_loss']:.4f} nats/token")
    for source in results.get("sources", []):
        table.add_row(source["path"], f"{source['loss']:.4f} nats/token, weight {source['weight']:.2f}")
    if documents := results.get("documents"):
        losses = sorted((one for one in documents if one["tokens"]), key=lambda one: one["loss"])
        table.add_row("documents", f"{len(documents):,}")
        for what, one in (("median", losses[len(losses) // 2]), ("lowest", losses[0]), ("highest", losses[-1])):
            table.add_row(f"{what} loss", f"{one['loss']:.4f}, {one['name'] or one['number']}")
    console.print(table)


def help_lines(_: list[str]) -> list[str]:
    return help_of(EvaluateConfig, "evaluate")


COMMAND = Command("evaluate", main, (__doc__ or "").strip(), load_config, help_lines, folder=None)
