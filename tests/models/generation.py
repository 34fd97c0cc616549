"""Greedy continuations against `generate` of transformers: every family on every mesh and algorithm, as a table.

python -m tests.models.generation [FAMILY ...]
"""

import dataclasses
import pathlib
import sys
import tempfile

import numpy as np
import torch

from mstrain.data.tokenizers import ByteTokenizer
from mstrain.mesh import emulate_devices, make_mesh, parse_mesh
from mstrain.models.hub.folder import Folder
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.inference import Draw
from mstrain.training.generate import Generator, Request
from tests.models.hub_models import CONFIGS, save

LENGTHS, NEW = (3, 13, 7), 60  # longer than every window; 13 + 60 are more than the context of 64
CASES = [
    ("1x1", "meshslice", "auto"), ("2x4", "meshslice", "auto"), ("2x4", "meshslice", "rs"), ("4x2", "meshslice", "ls"),
    ("2x4", "megatron", "auto"), ("2x4", "fsdp", "auto"), ("2x4", "gspmd", "auto"), ("2x2", "cannon", "os"),
    ("2x4", "wang", "auto"), ("2x4", "summa", "auto"), ("2x4", "collective", "auto"), ("2x2x2", "meshslice", "rs"),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    """A folder, and prompts with their greedy continuations by transformers."""

    folder: Folder
    prompts: list[np.ndarray]
    continuations: list[list[int]]

    @property
    def most(self) -> int:
        """New tokens that every prompt has positions for."""
        return min(map(len, self.continuations))


def model_of(name: str, place: pathlib.Path, new: int = NEW) -> Model:
    """The model of a family with its greedy continuations of `new` tokens, or as many as it has positions for."""
    torch_model, _ = save(name, place)
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, 61, length).astype(np.int32) for length in LENGTHS]
    found = []
    for prompt in prompts:
        tokens = torch.tensor(prompt[None], dtype=torch.long)
        most = min(new, 64 - len(prompt) + 1) if name == "gpt2" else new  # GPT-2 learns 64 positions
        out = torch_model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=most)
        found.append(out[0, len(prompt) :].tolist())
    return Model(Folder(place), prompts, found)


def continued(model: Model, mesh: str, algorithm: str, dataflow: str = "auto", shard: str = "none") -> list[list[int]]:
    """The same continuations by mstrain, all prompts in one batch."""
    devices = make_mesh(parse_mesh(mesh))
    parallel = ParallelConfig(algorithm, dataflow=dataflow)
    plan = make_plan(parallel, model.folder.model, devices, devices.size, 16, shard=shard)
    module = Transformer(model.folder.model, plan, 16)
    generator = Generator(module, model.folder.parameters(module), ByteTokenizer())
    request = Request(model.most, Draw(0))
    return [stream.ids for stream in generator(model.prompts, request)]


def equal(found: list[list[int]], model: Model) -> list[int]:
    """The number of tokens of each continuation that are equal from the first one on."""
    pairs = zip(found, model.continuations, strict=True)
    return [next((i for i, (a, b) in enumerate(zip(x, y)) if a != b), len(x)) for x, y in pairs]


def main(names) -> None:
    emulate_devices(8)
    print(f"{'family':11} {'mesh':6} {'algorithm':10} {'dataflow':8} equal tokens of each prompt")
    for name in names or CONFIGS:
        with tempfile.TemporaryDirectory() as place:
            model = model_of(name, pathlib.Path(place))
            for mesh, algorithm, dataflow in CASES:
                found = continued(model, mesh, algorithm, dataflow)
                same = ", ".join(f"{n}/{len(ids)}" for n, ids in zip(equal(found, model), found, strict=True))
                print(f"{name:11} {mesh:6} {algorithm:10} {dataflow:8} {same}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
