"""A Hugging Face folder: config.json and safetensors files, checked by their headers before a value is read."""

import dataclasses
import os
import re
import shutil
from pathlib import Path

import ml_dtypes  # noqa: F401  NumPy then knows bfloat16
import numpy as np
from safetensors import SafetensorError, safe_open

from mstrain.json_files import read_json
from mstrain.models.hub.config import language_model, model_of
from mstrain.models.hub.families import MTP_KEYS
from mstrain.models.hub.quantized import BLOCK_SIZE, dequantized
from mstrain.models.hub.stored import Tensor
from mstrain.models.hub.tensors import Part, parameters_of
from mstrain.models.parameters import from_layers
from mstrain.models.transformer import Transformer

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
TOKENIZER, ADAPTER = "tokenizer.json", "adapter_config.json"
SMALL = (CONFIG, "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
         "merges.txt", "chat_template.jinja", "chat_template.json")  # fmt: skip
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")  # of older folders; no parameters
_WRAPPED = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
_VISION = ("vision_tower.", "model.vision_tower.", "multi_modal_projector.", "model.multi_modal_projector.")
_REMEDY = "Download the folder again, or type another init=."
_SHOWN = 3  # tensors in a message


class Folder:
    """A model in Hugging Face's format.

    Every error is a ValueError that names the file or the tensor.

    Attributes:
      path: the folder.
      config: the content of config.json.
      family, model: what config.json describes.
    """

    def __init__(self, path: str | Path, mtp_layers: int = 0):
        """Reads config.json. Raises ValueError for a folder without it or with a model that mstrain does not have.

        `mtp_layers` are read of those that predict further tokens.
        """
        self.path = Path(path).expanduser()
        if not self.path.is_dir():
            raise ValueError(f"init={path} is not a folder. Type the folder of a model with {CONFIG} and safetensors.")
        if (self.path / ADAPTER).is_file():
            raise ValueError(
                f"init={path} has an adapter ({ADAPTER}), which mstrain does not apply. Merge it (in PEFT "
                "model.merge_and_unload().save_pretrained(FOLDER)), or remove the file to take the model without it."
            )
        if not (self.path / CONFIG).is_file():
            if (self.path / "checkpoints").is_dir():
                raise ValueError(f"init={path} is the run_dir of a run of mstrain. Type init_from={path}.")
            raise ValueError(f"init={path} has no {CONFIG}. Type the folder of a model in Hugging Face's format.")
        self.config = language_model(read_json(self.path / CONFIG, "init:"))
        try:
            self.family, self.model = model_of(self.config, self.path.resolve().name)
        except ValueError as error:
            reason = str(error).rstrip(".")
            raise ValueError(f"{self.path / CONFIG}: {reason}. Type the folder of another model.") from None
        block = (self.config.pop("quantization_config", None) or {}).get(BLOCK_SIZE)
        self._block = (block[0], block[1]) if block else None
        stated = next((self.config[key] for key in MTP_KEYS if key in self.config), 0)
        self._mtp_layers = stated if self.family.mtp and isinstance(stated, int) else 0
        if mtp_layers > self._mtp_layers:
            raise ValueError(
                f"model.mtp_layers={mtp_layers}: {self.path / CONFIG} has {self._mtp_layers} multi-token prediction "
                f"layers. Type model.mtp_layers={self._mtp_layers}."
            )
        if mtp_layers and self.family.latent and not self.model.experts:
            raise ValueError(
                f"model.mtp_layers={mtp_layers}: the multi-token prediction layers of {self.path / CONFIG} have "
                "experts, the others have none. Type model.mtp_layers=0."
            )
        self.model = dataclasses.replace(self.model, mtp_layers=mtp_layers)
        self._tensors: dict[str, Tensor] = {}

    def check(self) -> None:
        """Compares the headers of the files with the architecture.

        Raises ValueError for a missing, truncated or damaged file, for missing and unknown tensors, and for tensors
        of another shape or dtype.
        """
        headers = {name: tensor for name, tensor in self._headers().items() if not name.startswith(_VISION)}
        self._tensors = {self._full_name(name): tensor for name, tensor in headers.items()}
        self._tensors = dequantized(self._tensors, self._block)
        if self.model.layers > len(self._tensors):
            found = f"{CONFIG} describes {self.model.layers} layers, and the files have {len(self._tensors)} tensors"
            raise ValueError(f"{self.path}: {found}. {_REMEDY}")
        parts = [part for p in parameters_of(self.model, self.family) for layer in p.layers for part in layer]
        wanted = {part.name: part.shape for part in parts if not part.copy_of}
        self._report(wanted.keys() - self._tensors.keys(), "is missing")
        others = self._tensors.keys() - {part.name for part in parts}
        unknown = [name for name in others if not self._is_redundant(name)]
        self._report(unknown, f"is not part of a {self.family.model_type} of this {CONFIG}")
        for name, shape in wanted.items():
            tensor = self._tensors[name]
            if tensor.shape != shape:
                found = f"has shape {list(tensor.shape)}, and {CONFIG} describes {list(shape)}"
                raise ValueError(f"{tensor.file}: tensor {name} {found}. {_REMEDY}")
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{tensor.file}: tensor {name} has dtype {tensor.dtype}, not {' or '.join(DTYPES)}.")

    def dtype_of(self, name: str) -> str:
        """NumPy's name of the dtype of a tensor; `check` comes first."""
        return DTYPES[self._tensors[name].dtype]

    @property
    def left_out(self) -> str | None:
        """What is in the files and not in the model, in one line; None for nothing. `check` comes first."""
        count = sum(map(self._is_of_next_tokens, self._tensors))
        if not count:
            return None
        return (
            f"{count} tensors of multi-token prediction layers are left out; model.mtp_layers={self._mtp_layers} "
            "reads them."
        )

    def parameters(self, module: Transformer):
        """The parameters in the layout of `module`, streamed tensor by tensor."""
        self.check()
        known = {p.path: p for p in parameters_of(self.model, self.family)}

        def read(path, layer, index):
            return self._read(known[path].layers[layer], known[path].shape, index)

        return from_layers(module, read)

    def keep_small_files(self, place: Path) -> None:
        """Copies configuration and tokenizer, so that an export does not need this folder."""
        place.mkdir(exist_ok=True)
        for path in sorted(self.path.iterdir()):
            if path.name in SMALL or path.match("tokenizer*"):
                shutil.copyfile(path, place / path.name)

    def _read(self, parts: tuple[Part, ...], shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        """The part `index` of a canonical parameter of one layer, float32."""
        ranges = [place.indices(size)[:2] for place, size in zip(index, shape, strict=True)]
        first, last = ranges[-1]
        out = np.zeros([stop - start for start, stop in ranges], np.float32)
        for part in (part for part in parts if not part.copy_of):
            if part.expert is not None and part.expert not in range(*ranges[0]):
                continue
            lead = [slice(*r) for r in (ranges if part.expert is None else ranges[1:])[:-1]]
            of_part = out if part.expert is None else out[part.expert - ranges[0][0]]
            for ours, columns in part.columns(first, last):
                order = (columns, *lead) if part.transposed else (*lead, columns)
                target = of_part[..., ours.start - first : ours.stop - first]
                self._tensors[part.name].read_into(target.T if part.transposed else target, order)
        return out

    def _headers(self) -> dict[str, Tensor]:
        if (self.path / WEIGHTS).is_file():
            return _header(self.path / WEIGHTS)
        if not (self.path / INDEX).is_file():
            pickled = any(self.path.glob("*.bin")) or any(self.path.glob("*.pt*"))
            hint = " Save the model with safetensors: model.save_pretrained(FOLDER)." if pickled else ""
            raise ValueError(f"{self.path} has neither {WEIGHTS} nor {INDEX}.{hint or ' ' + _REMEDY}")
        index = read_json(self.path / INDEX, "init:")
        places = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(places, dict) or not all(type(file) is str and file for file in places.values()):
            raise ValueError(f"{self.path / INDEX} has no weight_map of files. {_REMEDY}")
        found: dict[str, Tensor] = {}
        for file in sorted(set(places.values())):
            if os.path.basename(file) != file:
                raise ValueError(f"{self.path / INDEX}: {file} is not the name of a file in the folder. {_REMEDY}")
            if not (self.path / file).is_file():
                raise ValueError(f"{self.path / file} is missing; {INDEX} names it. {_REMEDY}")
            header = _header(self.path / file)
            if twice := sorted(header.keys() & found.keys()):
                other = found[twice[0]].file.name
                raise ValueError(f"{self.path / file}: tensor {twice[0]} is in {other}, too. {_REMEDY}")
            found |= header
        for name, file in places.items():
            if name not in found or found[name].file.name != file:
                raise ValueError(f"{self.path / file}: tensor {name} is missing; {INDEX} names it. {_REMEDY}")
        return found

    def _full_name(self, name: str) -> str:
        for wrapped, plain in _WRAPPED.items():
            if name.startswith(wrapped):
                return plain + name.removeprefix(wrapped)
        prefix = self.family.prefix
        return name if name.startswith((prefix, "lm_head.")) else prefix + name

    def _is_redundant(self, name: str) -> bool:
        """Whether a tensor adds nothing: a buffer, or a copy of the embedding table that the model ties."""
        if name.endswith(_BUFFERS) or self._is_of_next_tokens(name):
            return True
        table = f"{self.family.modules['embedding']}.weight"
        if name != "lm_head.weight" or not self.model.tied or table not in self._tensors:
            return False
        head, embedding = self._tensors[name], self._tensors[table]
        if head.shape != embedding.shape:
            return False
        rows = head.shape[0]
        pieces = [(slice(i, min(i + 4096, rows)), slice(0, head.shape[1])) for i in range(0, rows, 4096)]
        return all(np.array_equal(head.read(piece), embedding.read(piece)) for piece in pieces)

    def _is_of_next_tokens(self, name: str) -> bool:
        """Whether a tensor is of the layers behind the last one, which DeepSeek-V3 trains to predict further tokens."""
        match = re.match(r"model\.layers\.(\d+)\.", name)
        first, last = (self.model.layers + count for count in (self.model.mtp_layers, self._mtp_layers))
        return bool(match) and first <= int(match[1]) < last

    def _report(self, names, problem: str) -> None:
        if names := sorted(names):
            more = f" (and {len(names) - _SHOWN} more)" if len(names) > _SHOWN else ""
            raise ValueError(f"{self.path}: tensor {', '.join(names[:_SHOWN])}{more} {problem}. {_REMEDY}")


def _header(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "np") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {n: Tensor(path, n, tuple(s.get_shape()), s.get_dtype()) for n, s in slices.items()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is truncated or not a safetensors file ({error}). {_REMEDY}") from None
