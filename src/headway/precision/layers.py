"""Which linear layers of a model are changed, and why the others are not.

Owns: the choice by name, kind and shape, and telling it. Does not own: the change (fp8.py, qat.py).
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from headway.args import HEAD_LAYERS
from headway.errors import ConfigError, nearest

logger = logging.getLogger(__name__)

_MOST_NAMED = 6

Misfit = Callable[[nn.Linear], str | None]


@dataclass
class LayerChoice:
    """The linear layers of a module by what happens to them."""

    chosen: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    """Named by a pattern of the user's."""
    unfit: dict[str, list[str]] = field(default_factory=dict)
    """By the reason why they stay as they are."""

    @property
    def num_layers(self) -> int:
        """All linear layers that were looked at."""
        return len(self.chosen) + len(self.excluded) + sum(map(len, self.unfit.values()))

    def describe_rest(self, option: str) -> str:
        """The layers that stay as they are, by reason."""
        reasons = {f"named by {option}": self.excluded, **self.unfit}
        return "; ".join(
            f"{_spell(names)} ({reason})" for reason, names in reasons.items() if names
        )


def _spell(names: Sequence[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def choose_layers(
    module: nn.Module, exclude: Sequence[str], misfit: Misfit, *, option: str, own_class: str = ""
) -> LayerChoice:
    """Sort a module's linear layers; `exclude` are regular expressions searched in their names.

    `option` is what errors call the list of them. Layers that an earlier run with the same model
    made, of `own_class`, are made anew.
    """
    patterns = [_compile(pattern, option) for pattern in exclude]
    choice = LayerChoice()
    names_of = Counter(map(id, (m for _, m in module.named_modules(remove_duplicate=False))))
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        reason = misfit(layer)
        if names_of[id(layer)] > 1:
            reason = "one layer in several places"
        if "forward" in layer.__dict__ or layer._forward_hooks or layer._forward_pre_hooks:
            reason = "with a hook, or a forward of its own"
        if type(layer) is not nn.Linear and type(layer).__name__ != own_class:
            # What it computes would be lost with its class.
            reason = f"of the class {type(layer).__name__}"
        if any(pattern.search(name) for pattern in patterns):
            choice.excluded.append(name)
        elif reason is not None:
            choice.unfit.setdefault(reason, []).append(name)
        else:
            choice.chosen.append(name)
    return choice


def _compile(pattern: str, option: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{option}: {pattern!r} is no regular expression: {error}") from error


def warn_of_idle_patterns(module: nn.Module, exclude: Sequence[str], *, option: str) -> None:
    """Name the patterns that match no linear layer, with the nearest names.

    Those for heads are meant for models of many kinds; most of them never match.
    """
    names = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    for pattern in exclude:
        if pattern not in HEAD_LAYERS and not any(re.search(pattern, name) for name in names):
            logger.warning(
                "%s: %r matches no linear layer%s", option, pattern, _hint(pattern, names)
            )


def _hint(pattern: str, names: Sequence[str]) -> str:
    """The nearest of the names, or what the layers are called if none is near."""
    last_parts = list(dict.fromkeys(name.rpartition(".")[2] for name in names))
    found = nearest(pattern, [*names, *last_parts])
    if found is not None:
        return f"; the nearest name is {found}"
    return f"; they are called {_spell(last_parts)}" if last_parts else ""


def require_some(choice: LayerChoice, what: str, option: str, *, is_part: bool) -> None:
    """Refuse a model of which nothing would be changed; a part of one may have nothing to change.

    A part that has only layers which do not fit is refused as well.
    """
    if choice.chosen or (is_part and not choice.unfit):
        return
    if choice.num_layers == 0:
        raise ConfigError(f"{what}: the model has no linear layer to convert")
    raise ConfigError(
        f"{what}: none of the {choice.num_layers} linear layers can be converted: "
        f"{choice.describe_rest(option)}"
    )
