"""What int8 has left over of the pseudo-gradients that were sent, to be added to the next ones.

Owns: where it is kept: all of it on the leading rank, and on each rank its parts for checkpoints.
Does not own: how it comes about (compression.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from headway.diloco.parameters import ParameterView


class LeftOver:
    """Of one worker; empty unless it sends int8."""

    def __init__(self, view: ParameterView) -> None:
        self._view = view
        self.parts: dict[str, Tensor] = {}
        """Of what this rank holds of each parameter."""
        self.whole: dict[str, Tensor] = {}
        """On the leader, of whole parameters."""
        self._is_resumed = False

    def load(self, parts: dict[str, Tensor]) -> None:
        """What a checkpoint has of it."""
        self.parts, self.whole, self._is_resumed = parts, {}, True

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.parts.pop(name, None)
            self.whole.pop(name, None)

    def gather(self) -> None:
        """Collective: after a resume the leader has only its parts; together the ranks have all."""
        if not self._is_resumed:
            return
        self._is_resumed = False
        if any(self._view.ranks.exchange(bool(self.parts))):
            parts = {
                name: self.parts.get(name, torch.zeros(part.shape))
                for name, part in self._view.parts().items()
            }
            self.whole = self._view.gather_on_leader(parts)

    def keep(self, new: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Collective: the server has taken what left `new` over on the leader."""
        if self._view.leads:
            self.whole = {**self.whole, **new}
        for name, part in self._view.hand_out(new, names):
            self.parts[name] = part.clone().contiguous()
