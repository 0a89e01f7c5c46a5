"""The repeated blocks of a model, by a path or found by their looks.

Owns: reading `transformer_layers_path`, the search, and which blocks have parameters of their own.
Does not own: what is done with blocks.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Sequence

from torch import nn

from headway.checkpoint.model import clean_name
from headway.errors import ConfigError, nearest

OPTION = "fsdp2.transformer_layers_path"
DEFAULT_PATH = "causal_lm.layer_stack.layers"
"""The option's default; in a model without such a path the blocks are searched for."""

logger = logging.getLogger(__name__)

Blocks = list[tuple[str, nn.Module]]


def find_blocks(model: nn.Module, path: str) -> Blocks:
    """The blocks of a model with their names; none where `path` is empty.

    A path leads to the container of the blocks. Without one, they are the members of the longest
    list of modules of one class that is not itself inside such a list, and of all other lists of
    that class (the two halves of an encoder-decoder).
    """
    if not path:
        return []
    named = {clean_name(name): module for name, module in model.named_modules()}
    if path in named:
        return _members(path, named[path])
    if path != DEFAULT_PATH:
        raise ConfigError(_describe_lost(path, model, named))
    blocks = search_blocks(model)
    if not blocks:
        logger.warning(
            "%s has no list of blocks: its parameters are gathered all at once, which saves "
            "little memory (%s)",
            type(model).__name__,
            OPTION,
        )
    return blocks


def search_blocks(model: nn.Module) -> Blocks:
    """The blocks of a model as its looks tell them, with their names; perhaps none."""
    named = {clean_name(name): module for name, module in model.named_modules()}
    lists = _lists_of_blocks(named)
    if not lists:
        return []
    longest = max(lists.values(), key=len)
    kind = type(longest[0])
    return [
        (f"{name}.{key}", block)
        for name, blocks in lists.items()
        if type(blocks[0]) is kind
        for key, block in named[name].named_children()
    ]


def keep_apart(model: nn.Module, parts: Sequence[nn.Module]) -> list[nn.Module]:
    """Those parts of a model that can be gathered on their own; an inner one comes before an outer.

    A parameter that is used in two of them, or elsewhere too, has to be gathered with the whole.
    """
    kept = list(parts)
    while True:
        users: dict[int, set[int]] = defaultdict(set)
        _note_users(model, model, {id(part) for part in kept}, users)
        sharing = {user for those in users.values() if len(those) > 1 for user in those}
        first = next((part for part in kept if id(part) in sharing), None)
        if first is None:
            break
        # One at a time: what it shared may be shared inside of the part around it alone.
        kept = [part for part in kept if part is not first]
    if len(kept) < len(parts):
        held = {id(part) for part in kept}
        names = [
            clean_name(name)
            for name, module in model.named_modules()
            if id(module) not in held and any(module is part for part in parts)
        ]
        logger.warning(
            "%s: %d of %d parts share parameters with each other or with the rest of the model, "
            "and are gathered together with it, which saves less memory: %s",
            type(model).__name__,
            len(names),
            len(parts),
            ", ".join(names[:4]) + (" and more" if len(names) > 4 else ""),
        )
    return kept


def _note_users(
    module: nn.Module, part: nn.Module, parts: Collection[int], users: dict[int, set[int]]
) -> None:
    """By parameter: the innermost parts that have it, once for each place in the model."""
    for parameter in module.parameters(recurse=False):
        users[id(parameter)].add(id(part))
    for child in module.children():
        _note_users(child, child if id(child) in parts else part, parts, users)


def _describe_lost(path: str, model: nn.Module, named: dict[str, nn.Module]) -> str:
    paths = [name for name, module in named.items() if name and _is_container(module)]
    text = f"{OPTION}={path!r} leads to nothing in {type(model).__name__}"
    if not paths:
        return f"{text}, which has no list of modules; '' shards the model as one"
    hint = nearest(path, paths)
    asked = f"; did you mean {hint!r}?" if hint else "."
    return f"{text}{asked} Lists of modules in it: {', '.join(paths[:8])}"


def _is_container(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict)


def _members(path: str, container: nn.Module) -> Blocks:
    if not _is_container(container):
        raise ConfigError(
            f"{OPTION}={path!r} is a {type(container).__name__}, not a list of blocks "
            f"(ModuleList, Sequential or ModuleDict)"
        )
    return [(f"{path}.{name}", block) for name, block in container.named_children()]


def _lists_of_blocks(named: dict[str, nn.Module]) -> dict[str, list[nn.Module]]:
    """Outermost lists of modules of one class that have parameters."""
    found: dict[str, list[nn.Module]] = {}
    for name, module in named.items():
        if not name or not isinstance(module, nn.ModuleList):
            continue
        if any(name.startswith(f"{outer}.") for outer in found):
            continue  # for example the experts of one layer
        blocks = list(module)
        if len({type(block) for block in blocks}) == 1 and all(
            any(True for _ in block.parameters()) for block in blocks
        ):
            found[name] = blocks
    return found
