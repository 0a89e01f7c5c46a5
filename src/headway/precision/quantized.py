"""Weights that have few bits for good: made from trained ones, taken apart for files, put together.

Owns: which of torchao's tensor classes a file may ask for, and the names of their parts in it. The
form is the one in which transformers stores and loads torchao models. Does not own: files and
folders (checkpoint/quantized.py, models/hf.py), which layers are meant (qat.py).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.precision.qat import base_config
from headway.precision.recipes import QuantRecipe
from headway.precision.torchao_package import load_torchao, torchao_version

logger = logging.getLogger(__name__)

CONFIG_KEY = "quantization_config"
OWN_KEY = "headway"
_METHOD = "torchao"
_NAMES_KEY = "tensor_names"
# Of torchao's classes those that hold numbers and nothing else, and that a recipe of it makes.
ALLOWED = (
    "Float8Tensor",
    "Int4PlainInt32Tensor",
    "Int4Tensor",
    "Int4TilePackedTo4dTensor",
    "Int8Tensor",
    "IntxUnpackedToInt8Tensor",
)
_PLAIN = "Tensor"
_FORMS = "torchao.prototype.safetensors.safetensors_support"


class QuantizedFormError(ValueError):
    """A file whose quantized weights cannot be put together."""


def is_quantized(tensor: object) -> bool:
    """Whether a tensor is one of torchao's low-bit kinds."""
    return isinstance(tensor, Tensor) and type(tensor).__name__ in ALLOWED


def quantized_names(module: nn.Module) -> list[str]:
    """Names of a module's weights that are quantized."""
    return [n for n, value in module.state_dict(keep_vars=True).items() if is_quantized(value)]


def require_trainable(module: nn.Module) -> None:
    """Refuse a model whose weights no gradient can change."""
    names = quantized_names(module)
    if names:
        raise ConfigError(
            f"the model is quantized ({names[0]} and {len(names) - 1} more weights have few bits) "
            "and cannot be trained; start from the checkpoint that it was made of"
        )


# -- making them ------------------------------------------------------------------------------


def check_machine(recipe: QuantRecipe) -> None:
    """Refuse a recipe that torchao cannot carry out on this machine."""
    load_torchao(f"the recipe {recipe.name}", _FORMS)
    if recipe.weights != "float8":
        return
    has_device = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)
    if not has_device:
        raise ConfigError(
            f"{recipe.name}: torchao makes float8 weights only where a CUDA device of compute "
            "capability 8.9 or more is; run this on such a machine, or choose a recipe with int4 "
            "weights"
        )


@torch.no_grad()
def quantize_weight(weight: Tensor, recipe: QuantRecipe, group_size: int | None) -> Tensor:
    """A linear layer's weight in few bits."""
    quantize = load_torchao(f"the recipe {recipe.name}", "torchao.quantization").quantize_
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    quantize(layer, base_config(recipe, group_size), filter_fn=lambda *_: True)
    found = layer.weight.detach()
    assert is_quantized(found), "layers that do not fit are left out before"
    return found


def describe(
    recipe: QuantRecipe, group_size: int | None, left: Iterable[str], layout: str
) -> dict[str, Any]:
    """The block of config.json by which transformers and Headway know a quantized model."""
    config = load_torchao("its configuration", "torchao.core.config")
    return {
        "quant_method": _METHOD,
        "quant_type": {"default": config.config_to_dict(base_config(recipe, group_size))},
        "modules_to_not_convert": sorted(left),
        "include_input_output_embeddings": False,
        "untie_embedding_weights": False,
        OWN_KEY: {
            "recipe": recipe.name,
            "group_size": group_size,
            "layout": layout,
            "torchao_version": torchao_version(),
        },
    }


def described(hf_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization block of a config.json if it is torchao's, else None."""
    block = hf_config.get(CONFIG_KEY)
    if isinstance(block, Mapping) and block.get("quant_method") == _METHOD:
        return dict(block)
    return None


def check_versions(block: Mapping[str, Any], where: str) -> None:
    """Say so where the weights were made by a newer torchao than the one that reads them."""
    own = block.get(OWN_KEY)
    made_by = own.get("torchao_version") if isinstance(own, Mapping) else None
    if made_by is not None and _number(made_by) > _number(torchao_version()):
        logger.warning(
            "%s was quantized by torchao %s; %s is installed", where, made_by, torchao_version()
        )


def _number(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


# -- in files ---------------------------------------------------------------------------------


def take_apart(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Plain tensors by their names in a file, and what the file's metadata says of them."""
    flatten = load_torchao("storing quantized weights", _FORMS).flatten_tensor_state_dict
    plain, metadata = flatten({name: tensor.detach() for name, tensor in tensors.items()})
    return plain, metadata


class Parts:
    """The weights of files by their real names, from the parts that the files hold."""

    def __init__(self, metadata: Mapping[str, str], where: str) -> None:
        self._metadata = metadata
        self._where = where
        self._parts: dict[str, list[str]] = {}
        try:
            for name in json.loads(metadata[_NAMES_KEY]):
                self._parts[name] = self._list_parts(name, json.loads(metadata[name]))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            if isinstance(error, QuantizedFormError):
                raise
            raise QuantizedFormError(
                f"{where} describes its quantized weights in a way that is not understood: "
                f"{error!r}"
            ) from error

    def _list_parts(self, name: str, entry: Mapping[str, Any]) -> list[str]:
        kind = entry["_type"]
        if kind == _PLAIN:
            return [name]
        if kind not in ALLOWED:
            raise QuantizedFormError(
                f"{self._where} asks for a {kind} as {name}, which is not read; allowed: "
                f"{', '.join(ALLOWED)}"
            )
        owner, _, leaf = name.rpartition(".")
        prefix = f"{owner}._{leaf}_" if owner else f"_{leaf}_"
        return [f"{prefix}{part}" for part in entry["_tensor_data_names"]]

    @property
    def quantized(self) -> list[str]:
        """The real names of weights that consist of parts."""
        return [name for name, parts in self._parts.items() if parts != [name]]

    def shape_of(self, name: str, stored: Mapping[str, Sequence[int]]) -> list[int]:
        """The shape of a weight by the shapes of what is stored, as names in the file."""
        wanted = self.names_in_file(name)
        if wanted == [name]:
            return list(stored[name])
        told = json.loads(self._metadata[name]).get("_data")
        packed = told.get("shape") if isinstance(told, Mapping) else None
        if isinstance(packed, list):  # several values in each element
            return [int(size) for size in packed]
        values = next((part for part in wanted if part.endswith("_qdata")), wanted[0])
        if values not in stored:
            raise QuantizedFormError(f"{self._where} lacks {values}, a part of {name}")
        return list(stored[values])

    def names_in_file(self, name: str) -> list[str]:
        """Under which names the parts of a weight are stored."""
        return self._parts.get(name, [name])

    def real_names(self, names: Iterable[str]) -> list[str]:
        """The weights that stored names make up, in the same order."""
        owners = {part: name for name in self.quantized for part in self._parts[name]}
        return list(dict.fromkeys(owners.get(name, name) for name in names))

    def join(self, name: str, parts: Mapping[str, Tensor]) -> Tensor:
        """A weight from its parts, by their names in the file."""
        wanted = self.names_in_file(name)
        absent = [part for part in wanted if part not in parts]
        if absent:
            raise QuantizedFormError(f"{self._where} lacks {absent[0]}, a part of {name}")
        if wanted == [name]:
            return parts[name]
        unflatten = load_torchao("reading quantized weights", _FORMS).unflatten_tensor_state_dict
        metadata = {name: self._metadata[name], _NAMES_KEY: json.dumps([name])}
        try:
            joined = unflatten({part: parts[part] for part in wanted}, metadata)
            # Since some version with what is left over.
            found: Tensor = (joined[0] if isinstance(joined, tuple) else joined)[name]
        except (AssertionError, KeyError, TypeError, ValueError) as error:
            raise QuantizedFormError(
                f"{self._where}: the parts of {name} do not fit together: {error}"
            ) from error
        return found

    def join_all(self, parts: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """All weights that the given parts make up."""
        for name in self.real_names(parts):
            yield name, self.join(name, parts)


def find_parts(metadata: Iterable[Mapping[str, str] | None], where: str) -> Parts | None:
    """What the metadata of a folder's files say about quantized weights; None if nothing.

    All files count: the first may hold none of them.
    """
    names: list[str] = []
    entries: dict[str, str] = {}
    for own in metadata:
        if not own or _NAMES_KEY not in own:
            continue
        entries.update(own)
        try:
            names += json.loads(own[_NAMES_KEY])
        except (TypeError, ValueError) as error:
            raise QuantizedFormError(
                f"{where} describes its weights in a way that is not understood: {error!r}"
            ) from error
    if not names:
        return None
    return Parts({**entries, _NAMES_KEY: json.dumps(list(dict.fromkeys(names)))}, where)


def move(tensor: Tensor, device: str | torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of its own on a device; low-bit ones know no `copy`."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if not is_quantized(tensor):
        return tensor.to(device, wanted, copy=True)
    moved = tensor.to(device=device, dtype=wanted)
    return moved.clone() if moved is tensor else moved
