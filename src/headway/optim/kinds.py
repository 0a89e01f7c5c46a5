"""What each parameter of a model is: part of a norm, a bias, an embedding, an output head.

Owns: telling kinds by the module that holds a parameter, and all names of a tied one. Does not own:
what an optimizer makes of it (groups.py, muon.py).
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

Kinds = Mapping[str, frozenset[str]]

_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.LocalResponseNorm, _NormBase)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
# Of models that do not say which module makes their logits.
_HEADS = frozenset({"classifier", "embed_out", "head", "lm_head", "score", "unembed"})


def parameter_kinds(model: nn.Module) -> Kinds:
    """Kinds of every parameter by each of its names, frozen ones too.

    A parameter is `matrix` or `vector` (fewer than two dimensions) or neither; beside that `norm`,
    `bias`, `embedding` and `head`. A tied one is everything that it is under any of its names. A
    part of a model tells what its parameters are in the whole one, under `parameter_kinds`.
    """
    told = getattr(model, "parameter_kinds", None)
    if told is not None:
        return told  # type: ignore[no-any-return]
    heads = _find_heads(model)
    by_name: dict[str, frozenset[str]] = {}
    by_tensor: dict[int, set[str]] = {}
    owners: dict[str, int] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            kinds = by_tensor.setdefault(id(parameter), set())
            kinds |= _kinds_in(module, leaf, parameter, is_head=id(module) in heads)
            owners[f"{prefix}.{leaf}" if prefix else leaf] = id(parameter)
    for name, tensor in owners.items():
        by_name[name] = frozenset(by_tensor[tensor])
    return by_name


def all_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Every name of each parameter, by the first one, also names that other ranks have for it."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    found = {own[0]: own for own in names.values()}
    tied = getattr(model, "tied_keys", None)
    for alias, stored in (tied() if callable(tied) else {}).items():
        if stored in found and alias not in found[stored]:
            found[stored].append(alias)
    return {first: tuple(own) for first, own in found.items()}


def _kinds_in(
    module: nn.Module, leaf: str, parameter: nn.Parameter, *, is_head: bool
) -> frozenset[str]:
    kinds = set()
    if parameter.dim() < 2:
        kinds.add("vector")
    elif parameter.dim() == 2:
        kinds.add("matrix")
    if leaf == "bias" or leaf.endswith("_bias"):
        kinds.add("bias")
    named_so = "norm" in type(module).__name__.lower() and parameter.dim() < 2
    if isinstance(module, _NORMS) or named_so:
        kinds.add("norm")
    if isinstance(module, _EMBEDDINGS):
        kinds.add("embedding")
    if is_head:
        kinds.add("head")
    return frozenset(kinds)


def _find_heads(model: nn.Module) -> set[int]:
    """The modules that make the model's output, by `id`."""
    find = getattr(model, "get_output_embeddings", None)
    try:
        head = find() if callable(find) else None
    except (AttributeError, NotImplementedError):  # some models of transformers have none
        head = None
    if isinstance(head, nn.Module):
        return {id(head)}
    return {
        id(module)
        for name, module in model.named_modules()
        if name.rpartition(".")[2] in _HEADS and isinstance(module, nn.Linear)
    }
