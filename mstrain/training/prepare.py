"""Builds a run from its configuration: devices, corpus, plan.

Cheap checks come first. Nothing is compiled, written to run_dir or allocated on a device here.
"""

import dataclasses
import math
import os
import time
from pathlib import Path

import jax
from rich.console import Console

from mstrain import mesh as meshes
from mstrain.data import Corpus, Progress
from mstrain.data import prepare as prepare_corpus
from mstrain.data.tokenizers import TOKENIZER_FILE, Tokenizer, load_tokenizer, marked
from mstrain.hardware import Chip, chip_for, tpu_slice_of
from mstrain.hardware.pod import Pod, pod_of
from mstrain.job.job import ALONE, Job
from mstrain.models.config import ModelConfig
from mstrain.models.description import describe_plan
from mstrain.models.plan import ModelPlan
from mstrain.models.stages import PipelineConfig
from mstrain.models.transformer import Transformer
from mstrain.planner.plan_file import AUTO_PLAN
from mstrain.program.dtype import dtype_on
from mstrain.program.offload import check_offload
from mstrain.training.config import RunConfig
from mstrain.training.feed import Feed
from mstrain.training.prediction import check_calibration
from mstrain.training.resume import check, check_resolved, tokenizer_of
from mstrain.training.run import Run
from mstrain.training.tuned import best_mesh, cost_model, tuned, with_plan
from mstrain.training.weights_and_biases import check_wandb
from mstrain.tuning.compiled import on_present

PROGRESS_SECONDS = 30  # between lines of progress without a terminal
LONGEST_TOKENIZING = 7 * 86400  # seconds that the other processes wait for process 0
UNITS = ("documents", "tokens")
VALIDATION_SEED = 0  # the validation batches of every run of one corpus are the same


def prepare(config: RunConfig, job: Job = ALONE, only_read: bool = False) -> Run:
    """Checks and builds a run. Raises ValueError, with what to type instead, for a configuration that cannot run.

    With `only_read`, nothing is trained: a mesh without data-parallel replicas ignores `shard=`, one without stages
    ignores `pipeline.`, and allowed differences from the record are not printed.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=not job.leads)
    chip = _start_devices(config, job)
    check_offload(config.offload, jax.local_devices()[0])
    check_calibration(config)
    check_wandb(config.wandb)
    previous = check(config, job)
    corpus = _corpus(config, tokenizer_of(config, previous), job, console)
    job.agree("corpus", corpus.digest)
    for warning in corpus.warnings:
        console.print(f"[yellow]Corpus:[/] {warning}")
    model = _with_vocab_size(config.model, corpus)
    if config.plan == AUTO_PLAN:
        config = with_plan(config, model, _pod(chip, "plan=auto"), _dtype(config.dtype), console)
        check_offload(config.offload, jax.local_devices()[0])
    plan = _choose_plan(config, model, chip, console, shard_if_possible=only_read)
    job.agree("plan", f"{meshes.shape_of(plan.mesh)} {describe_plan(plan)}")
    mesh, step = plan.mesh, config.step_config(model, _dtype(config.dtype))
    feed, validation_feed = (
        Feed(corpus.batches(side, config.seq, config.batch, seed, config.pack), mesh, config.accumulate)
        for side, seed in (("train", config.seed), ("validation", VALIDATION_SEED))
    )
    module, optimizer = step.module(plan), step.make_optimizer(config.seed)
    run = Run(config, corpus, module, optimizer, feed, validation_feed, chip, console, job)
    check_resolved(run, previous, show=not only_read)
    return run


def _corpus(config: RunConfig, tokenizer: str, job: Job, console: Console) -> Corpus:
    """The corpus, which process 0 makes; the others then find it in a shared cache, or make their own."""
    vocab_size = config.vocab_size
    if config.data.source == "tokens" and tokenizer == "bytes":
        vocab_size = vocab_size or config.model.vocab_size
    shown, last = time.monotonic(), None

    def show(progress: Progress) -> None:
        nonlocal shown, last
        last = progress
        status.update(f"Tokenizing: {progress}")
        if not console.is_terminal and time.monotonic() > shown + PROGRESS_SECONDS:
            shown = time.monotonic()
            console.print(f"Tokenizing: {progress}")

    with console.status("Preparing the corpus") as status:
        corpus = None
        try:
            if job.leads:
                corpus = prepare_corpus(config.data, tokenizer, config.seed, vocab_size, show)
        finally:
            job.all_gather("corpus is made", "", LONGEST_TOKENIZING)
        corpus = corpus or prepare_corpus(config.data, tokenizer, config.seed, vocab_size, show)
    if last:
        documents, tokens = (sum(getattr(x, f"num_{y}") for x in (corpus.train, corpus.validation)) for y in UNITS)
        console.print(f"[bold]Corpus[/] {documents:,} documents, {tokens:,} tokens made from {last}")
    return corpus


def build_module(
    config: RunConfig, job: Job = ALONE, any_batch: bool = False
) -> tuple[Transformer, Tokenizer | None, Console]:
    """(model on its mesh, tokenizer, console) of a recorded run, whose data need not be here.

    With `any_batch`, the plan is that of a number of sequences that divides over any mesh, whatever `batch` is.
    """
    console = Console(highlight=False, soft_wrap=True, quiet=not job.leads)
    chip = _start_devices(config, job)
    previous = check(config, job)
    name = tokenizer_of(config, previous)
    trained = Path(config.run_dir) / TOKENIZER_FILE  # a bpe is trained on the corpus and kept in run_dir
    tokenizer = load_tokenizer(str(trained) if name == "bpe" else name) if config.data.has_tokenizer(name) else None
    if tokenizer and not config.data.eos.isdecimal():  # the number of a token of data=tokens
        marked(tokenizer, config.data.bos, config.data.eos)
    if any_batch:
        used = 1 if config.mesh == "auto" else meshes.parse_mesh(config.mesh).devices  # others may stay idle
        config = dataclasses.replace(config, batch=math.lcm(used, jax.device_count()), accumulate=1)
    plan = _choose_plan(config, config.model, chip, console, shard_if_possible=True, all_devices=False)
    step = dataclasses.replace(config.step_config(config.model, _dtype(config.dtype)), offload=None)
    return step.module(plan), tokenizer, console


def _start_devices(config: RunConfig, job: Job) -> Chip | None:
    """Emulates a mesh where there is only a CPU, each process its part; returns the chip, None if unknown."""
    wanted = meshes.EMULATED if config.mesh == "auto" else meshes.parse_mesh(config.mesh)
    _keep_compiled(config.compile_cache)
    meshes.emulate_devices(math.ceil(wanted.devices / job.processes))
    if job.processes > 1:
        here = f"{jax.local_device_count()} of {jax.device_count()} {jax.devices()[0].device_kind} devices"
        job.log(f"joined, {here} here")
        job.agree("configuration", repr(dataclasses.replace(config, process=None)))
    return chip_for(jax.devices()[0].device_kind)


def _keep_compiled(folder: str | None) -> None:
    """Points JAX's persistent compilation cache at `folder`, for every program however small."""
    jax.config.update("jax_compilation_cache_dir", folder and os.path.expanduser(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _choose_plan(
    config: RunConfig, model: ModelConfig, chip: Chip | None, console: Console, shard_if_possible: bool,
    all_devices: bool = True,
) -> ModelPlan:  # fmt: skip
    """The plan on the mesh asked for, or on the best by the cost model (tune=compile: by schedules).

    Devices beyond a mesh become data-parallel replicas; without `all_devices` those of a single process stay idle.
    """
    if config.tune == "compile":
        config = _compile_candidates(config, model, console)
    step, devices = config.step_config(model, _dtype(config.dtype)), jax.device_count()

    def plan_on(shape: meshes.MeshShape) -> ModelPlan:
        shard = "none" if shard_if_possible and shape.data * shape.context == 1 else config.shard
        pipeline = PipelineConfig() if shard_if_possible and shape.stage == 1 else config.pipeline
        here = dataclasses.replace(step, shard=shard, pipeline=pipeline)
        return here.plan(meshes.make_mesh(shape), tpu_slice_of(jax.devices()) or chip)

    if config.mesh != "auto":
        shape = meshes.parse_mesh(config.mesh)
        exact = not all_devices and jax.process_count() == 1
        return plan_on(shape if exact else meshes.fit_to_devices(shape, devices))
    if devices == 1 or jax.devices()[0].platform == "cpu":
        return plan_on(meshes.fit_to_devices(meshes.EMULATED if devices > 1 else meshes.MeshShape(), devices))
    pod = _pod(chip, "mesh=auto")
    best = best_mesh(config, model, pod, _dtype(config.dtype))
    if best.fullest.state > pod.memory_bytes:
        raise ValueError(
            f"mesh=auto finds no mesh of {devices} devices that holds {model.name}. Choose a smaller model=, "
            "or more devices."
        )
    console.print(f"[bold]Auto[/]   mesh {best.shape}, by {cost_model(config)}")
    return plan_on(best.shape)


def _pod(chip: Chip | None, key: str) -> Pod:
    """The devices present for the planner; raises ValueError about `key` if they are unknown."""
    if chip is None or chip.platform == "cpu":
        raise ValueError(
            f"{key}: the cost model has no {jax.devices()[0].device_kind}. Type a mesh, such as mesh=2x4, or plan for "
            "an absent TPU slice: check=true target=v5p-64."
        )
    return pod_of(tpu_slice_of(jax.devices()) or chip, jax.device_count())


def _compile_candidates(config: RunConfig, model: ModelConfig, console: Console) -> RunConfig:
    """With the mesh and slice count of the fastest schedule on the slice that is here."""
    tpu_slice = tpu_slice_of(jax.devices())
    if tpu_slice is None:
        raise ValueError(
            f"tune=compile compares schedules of the TPU compiler, and the devices here are not a TPU slice but "
            f"{jax.device_count()} x {jax.devices()[0].device_kind}. Type tune=model."
        )
    return tuned(config, model, tpu_slice, _dtype(config.dtype), on_present, console)


def _with_vocab_size(model: ModelConfig, corpus: Corpus) -> ModelConfig:
    if model.vocab_size is None:
        return dataclasses.replace(model, vocab_size=corpus.vocab_size)
    if model.vocab_size < corpus.vocab_size:
        raise ValueError(
            f"model.vocab_size={model.vocab_size} is less than the {corpus.vocab_size} tokens of the tokenizer. "
            "Type model.vocab_size=null to take the tokenizer's, or choose another tokenizer=."
        )
    return model


def _dtype(name: str):
    return dtype_on(jax.devices()[0].platform, name)
