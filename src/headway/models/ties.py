"""Tied weights: several names, one tensor, stored once.

Owns: which names share a tensor and under which of them it is stored, for every kind of file.
Does not own: restoring a tie; the live module is built with its ties, and loading copies into it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

_PLAIN_TYPES = (Tensor, nn.Parameter, nn.Buffer)


def tensor_identity(tensor: Tensor) -> object:
    """Equal for two tensors exactly when they are one tensor in memory."""
    # What has no memory of its own kind to share is the same only as the same object.
    if type(tensor) not in _PLAIN_TYPES or tensor.is_meta or tensor.layout != torch.strided:
        return id(tensor)
    pointer = tensor.untyped_storage().data_ptr()
    if pointer == 0 or tensor.numel() == 0:
        return id(tensor)
    layout = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
    return (str(tensor.device), pointer, *layout)


def _looks_like_input_embedding(name: str) -> bool:
    return "embed" in name and not any(word in name for word in ("out", "head", "unembed"))


def split_ties(
    named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    prefer: Collection[str] | None = None,
    avoid: Collection[str] = (),
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Separate the tensors to store from the names that are only aliases of them.

    Names share a tensor when memory, offset, shape and stride are the same. The stored name of a
    group is one that is not in `avoid`; among these the first in `prefer` (without it: one that
    looks like an input embedding, which is where Hugging Face models expect a tied weight), else
    the alphabetically first. Returns the stored tensors sorted by name and `{alias: stored name}`.
    """
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    groups: dict[object, list[tuple[str, Tensor]]] = {}
    for name, tensor in items:
        groups.setdefault(tensor_identity(tensor), []).append((name, tensor))

    def rank(item: tuple[str, Tensor]) -> tuple[bool, bool, str]:
        name = item[0]
        preferred = _looks_like_input_embedding(name) if prefer is None else name in prefer
        return (name in avoid, not preferred, name)

    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for members in groups.values():
        (canonical, tensor), *rest = sorted(members, key=rank)
        stored[canonical] = tensor
        aliases.update({name: canonical for name, _ in rest})
    return dict(sorted(stored.items())), dict(sorted(aliases.items()))


def input_embedding_names(model: nn.Module) -> set[str] | None:
    """Names of the model's input embedding weights; None if the model has no embedding."""
    embedding: object = None
    get_input_embeddings = getattr(model, "get_input_embeddings", None)
    if callable(get_input_embeddings):
        try:
            embedding = get_input_embeddings()
        except NotImplementedError:
            pass  # transformers' default for a model without one
    names = {
        f"{name}.weight" if name else "weight"
        for name, module in model.named_modules(remove_duplicate=False)
        if (module is embedding if embedding is not None else isinstance(module, nn.Embedding))
    }
    return names or None


def listed_ties(model: nn.Module) -> set[str]:
    """Names that the model itself (or a part of it) lists as aliases of another weight."""
    names: set[str] = set()
    for prefix, module in model.named_modules():
        listed = getattr(module, "_tied_weights_keys", None) or ()
        names |= {f"{prefix}.{name}" if prefix else name for name in listed}
    return names
