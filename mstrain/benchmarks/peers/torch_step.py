"""The steps of PyTorch: torch.compile, scaled_dot_product_attention, fused AdamW, autocast to bf16."""

import contextlib

import torch
import transformers

from mstrain.benchmarks.peers.flax_model import check
from mstrain.benchmarks.peers.task import CLIP, LEARNING_RATE, WEIGHT_DECAY, Peer, Task
from mstrain.benchmarks.peers.torch_model import Model
from mstrain.models.hub.config import family_for


def make(task: Task) -> Peer:
    """The peer `torch`, a model written in PyTorch, or `transformers`, the class of that library.

    Raises ValueError for an architecture that it does not have.
    """
    torch.manual_seed(task.seed)
    torch.set_float32_matmul_precision("high")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    half = task.dtype == "bf16" or (task.dtype == "auto" and cuda)
    model, version = _own(task) if task.peer == "torch" else _library(task)
    model = model.to(device)
    parameters = groups_of(model, WEIGHT_DECAY)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)
    tokens = torch.randint(task.model.known_vocab_size, (task.batch, task.seq + 1), device=device)
    forward = torch.compile(lambda ids, targets: model(ids, targets))
    cast = torch.autocast(device.type, torch.bfloat16) if half else contextlib.nullcontext()

    def step():
        with cast:
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def wait(loss) -> None:
        if cuda:
            torch.cuda.synchronize()

    def memory() -> int | None:
        return torch.cuda.max_memory_allocated() if cuda else None

    name = torch.cuda.get_device_name() if cuda else "cpu"
    return Peer(name, f"{version}, {'bfloat16' if half else 'float32'}, torch.compile", step, wait, memory)


def _own(task: Task) -> tuple[torch.nn.Module, str]:
    check(task.model)
    return Model(task.model, task.seq), f"torch {torch.__version__}"


class _Loss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, targets):
        logits = self.model(ids).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _library(task: Task) -> tuple[torch.nn.Module, str]:
    _, values = family_for(task.model)
    config = transformers.AutoConfig.for_model(**values, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return _Loss(model.train()), f"transformers {transformers.__version__}, torch {torch.__version__}"


def groups_of(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """The parameters of `model` for an optimizer: matrices with weight decay, the others without."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
