"""Imported models against transformers: every family on every mesh and algorithm, as a table.

python -m tests.models.hub_parity [FAMILY ...]
"""

import dataclasses
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import torch
from safetensors.numpy import load_file
from transformers.core_model_loading import revert_weight_conversion

from mstrain.gemm import find_algorithm
from mstrain.mesh import emulate_devices, make_mesh, parse_mesh
from mstrain.models.config import ModelConfig
from mstrain.models.hub.folder import Folder
from mstrain.models.hub.write import Target, tensors_of, write_model
from mstrain.models.parallel import ParallelConfig
from mstrain.models.plan import make_plan
from mstrain.models.transformer import Transformer
from mstrain.program.balance import take_loads
from mstrain.program.step import objective
from tests.models.hub_models import CONFIGS, COPIES, as_published, save
from tests.quick import QUICK

B, T = 4, 12  # longer than every window
BUFFER = "e_score_correction_bias"  # what no gradient trains
MESHES, ALGORITHMS = ("1x1", "2x4", "4x2"), ("meshslice", "megatron")


@dataclasses.dataclass(frozen=True)
class Parity:
    """Largest differences from transformers: logits, and gradients relative to the largest of their tensor.

    `tokens`: whether the most likely next tokens are equal, and in every layer the numbers of tokens of all experts.
    `identical`: whether an export equals the import bit for bit.
    """

    logits: float
    gradients: float
    tokens: bool
    identical: bool


def measure(name: str, mesh: str, algorithm: str) -> Parity:
    with tempfile.TemporaryDirectory() as place:
        given, back = pathlib.Path(place, name), pathlib.Path(place, "back")
        torch_models = save(name, given, max_shard_size="20KB")
        folder = Folder(given, getattr(torch_models[0].config, "num_mtp_layers", 0))
        slices = "2" if find_algorithm(algorithm).sliced else "auto"  # auto is one on CPUs
        plan = make_plan(ParallelConfig(algorithm, slices=slices), folder.model, make_mesh(parse_mesh(mesh)), B, T)
        module = Transformer(folder.model, plan, T)
        params = folder.parameters(module)
        target = Target(folder.family, folder.config, folder.dtype_of, 30_000)
        back.mkdir()
        write_model(back, module, params, target, leads=True)
        tokens, targets = np.random.default_rng(0).integers(0, 61, (2, B, T)).astype(np.int32)
        logits, gradients, counts = _ours(module, params, tokens, targets, target)
        want, slopes, chosen = _theirs(*torch_models, tokens, targets)
        gradients = {
            name: slope for name, slope in gradients.items() if not name.endswith(BUFFER) and not _is_copy(name)
        }
        differences = [np.abs(gradients[n] - slopes[n]).max() / (np.abs(slopes[n]).max() or 1.0) for n in slopes]
        assert gradients.keys() == slopes.keys()
        equal = bool((logits.argmax(-1) == want.argmax(-1)).all()) and counts == chosen
        identical = _tensors(given) == _tensors(back)
        return Parity(float(np.abs(logits - want).max()), float(max(differences)), equal, identical)


def _ours(module, params, tokens, targets, target):
    def loss(params):
        apply = {"params": params}
        logits = module.apply(apply, tokens.ravel())
        losses = module.apply(apply, tokens.ravel(), targets.ravel(), method="losses")
        return objective(module, jnp.mean(losses, axis=1)), logits

    program = jax.jit(jax.grad(loss, has_aux=True), compiler_options=QUICK)
    with jax.default_matmul_precision("highest"):
        slopes, logits = program(params)
    _, loads = take_loads(module, slopes)
    counts = [] if loads is None else (loads * B * T * module.model.experts_per_token / module.model.experts).round()
    return np.asarray(logits).reshape(B, T, -1), dict(tensors_of(module, slopes, target)), np.asarray(counts).tolist()


def _theirs(model, further, tokens, targets):
    tokens, targets = (torch.tensor(x, dtype=torch.long) for x in (tokens, targets))
    experts, chosen = getattr(model.config, "num_experts", getattr(model.config, "n_routed_experts", None)), []
    for module in model.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, __, out: chosen.append(out[2].flatten()))
    logits = model(tokens).logits
    counts = [torch.bincount(x, minlength=experts).tolist() for x in chosen]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    if further is not None:
        features = model.model(tokens).last_hidden_state
        loss = loss + ModelConfig.mtp_loss * _of_further_tokens(further, features, targets)
    loss.backward()
    slopes = {name: weight.grad for name, weight in model.named_parameters()}
    slopes = revert_weight_conversion(model, slopes)
    if further is not None:
        own = {name: weight.grad for name, weight in further.named_parameters() if name.startswith("layers.")}
        slopes |= as_published(own, model.config.num_hidden_layers)
    return logits.detach().numpy(), {name: slope.numpy() for name, slope in slopes.items()}, counts


def _of_further_tokens(further, features, targets):
    """The mean loss of the layers of an MtpModel, over all places, of which the last ones have no target."""
    losses, places = [], torch.arange(T)[None]
    for depth in range(further.num_mtp_layers):
        known = torch.nn.functional.pad(targets[:, depth:], (0, depth))
        features = further.forward_layer(depth, features, places, None, input_ids=known)
        logits, wanted = further._project_to_logits(features[:, : -depth - 1]), targets[:, depth + 1 :]
        losses.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum"))
    return sum(losses) / (len(losses) * targets.numel())


def _is_copy(name: str) -> bool:
    return name.startswith("model.layers.") and name.endswith(tuple(COPIES.values()))


def _tensors(folder: pathlib.Path) -> dict[str, tuple]:
    """Dtype, shape and bytes of every tensor of a folder."""
    found = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {n: (x.dtype.name, x.shape, x.tobytes()) for tensors in found for n, x in tensors.items()}


def main(names) -> None:
    emulate_devices(8)
    print(f"{'family':11} {'mesh':5} {'algorithm':10} {'logits':>9} {'gradients':>9}  tokens  export")
    for name in names or CONFIGS:
        for mesh in MESHES:
            for algorithm in ALGORITHMS:
                found = measure(name, mesh, algorithm)
                same = ("equal" if found.tokens else "DIFFER", "identical" if found.identical else "DIFFERS")
                numbers = f"{found.logits:9.1e} {found.gradients:9.1e}"
                print(f"{name:11} {mesh:5} {algorithm:10} {numbers}  {same[0]:6}  {same[1]}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
