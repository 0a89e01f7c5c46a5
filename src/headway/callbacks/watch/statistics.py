"""Largest value, mean and variance of many tensors, over all ranks, without reading any of them.

Owns: statistics of parts of tensors and of batches, their sums over ranks, the names that all
ranks list alike. Does not own: which tensors are looked at (gap_monitor.py).

A statistic is kept as sums: of a tensor that is spread over ranks the count of its elements, their
sum and the sum of their squares; of activations the count of instances and the sums of each
instance's mean and variance. Beside these stands the largest absolute value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.callbacks.watch.sharing import num_ranks, on_all_ranks
from headway.dist.agreement import agree_bits

if TYPE_CHECKING:
    from torch import Tensor

PARAMS, GRADS = "params", "grads"
ACTIVATIONS, ACTIVATION_GRADS = "activations", "activation_grads"
_BY_ELEMENT = (PARAMS, GRADS)
FIGURES = ("max", "mean", "var")

Reduce = Callable[["Tensor", str], "Tensor"]


@dataclass(frozen=True)
class Entry:
    """One look at one tensor: scalars on the device."""

    key: tuple[str, str]
    """What it is (params, grads, ...) and its name."""
    count: int
    first: Tensor
    second: Tensor
    largest: Tensor


def look_at_elements(key: tuple[str, str], values: Tensor) -> Entry:
    """Statistics of the elements of a tensor, or of a part of one."""
    import torch

    values = values.detach()
    if values.dtype.itemsize < 4:
        values = values.float()
    count = values.numel()
    # The variance as such first: a sum of squares in float32 would lose it beside a large mean.
    var, mean = torch.var_mean(values, correction=0)
    var, mean = _wide(var), _wide(mean)
    largest = torch.linalg.vector_norm(values, torch.inf)
    return Entry(key, count, mean * count, (var + mean * mean) * count, largest)


def look_at_instances(key: tuple[str, str], values: Tensor) -> Entry | None:
    """Statistics of each row of a batch, summed; None where rows have nothing to vary."""
    import torch

    if values.dim() < 2 or values.shape[0] == 0 or values.numel() <= values.shape[0]:
        return None
    rows = values.detach().reshape(values.shape[0], -1)
    if rows.dtype.itemsize < 4:
        rows = rows.float()
    var, mean = torch.var_mean(rows, dim=1)
    largest = torch.linalg.vector_norm(rows, torch.inf)
    return Entry(key, rows.shape[0], _wide(mean).sum(), _wide(var).sum(), largest)


def scaled(entry: Entry, factor: float) -> Entry:
    """The entry as it would be of a tensor multiplied by `factor`, by instances."""
    return Entry(
        entry.key,
        entry.count,
        entry.first * factor,
        entry.second * factor**2,
        entry.largest * abs(factor),
    )


class StatisticsTable:
    """The statistics of all ranks by name. Names are learnt as they turn up, on all ranks alike."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, str], int] = {}

    def join(
        self, look: Callable[[], Sequence[Entry]], reduce: Reduce, device: object
    ) -> dict[str, Tensor]:
        """Metrics by name, as scalars on the device; all ranks must call it.

        `look` gives this rank's entries and may fail; then all ranks raise. `reduce` joins a
        tensor over the ranks.
        """
        entries = self._agree(look)
        if not self._slots:
            return {}
        import torch

        num_slots = len(self._slots)
        device = torch.device(str(device))
        wide = torch.float32 if device.type == "mps" else torch.float64
        sums = torch.zeros(num_slots, 3, dtype=wide, device=device)
        largest = torch.full((num_slots,), -torch.inf, dtype=wide, device=device)
        if entries:
            slots = torch.tensor([self._slots[entry.key] for entry in entries])
            slots = slots.to(device, non_blocking=True)
            counts = torch.tensor([float(entry.count) for entry in entries], dtype=wide)
            columns = [counts.to(device, non_blocking=True)]
            for part in ("first", "second", "largest"):
                values = [getattr(entry, part).to(device, wide) for entry in entries]
                columns.append(torch.stack(values))
            sums.index_add_(0, slots, torch.stack(columns[:3], dim=1))
            largest.scatter_reduce_(0, slots, columns[3], "amax")
        return self._figures(reduce(sums, "sum"), reduce(largest, "max"))

    def _agree(self, look: Callable[[], Sequence[Entry]]) -> Sequence[Entry]:
        """This rank's entries, all of which have a place in everybody's list of names."""
        entries: Sequence[Entry] = ()
        error: Exception | None = None
        try:
            entries = look()
        except Exception as raised:
            error = raised
        unknown = list(dict.fromkeys(e.key for e in entries if e.key not in self._slots))
        # What the host knows is told over the host's group: nothing waits for the device.
        if num_ranks() == 1 or agree_bits(int(error is not None or bool(unknown))):

            def tell() -> list[list[str]]:
                if error is not None:
                    raise error
                return [list(key) for key in unknown]

            for told in on_all_ranks(tell):
                for kind, name in told:
                    self._slots.setdefault((kind, name), len(self._slots))
        return entries

    def _figures(self, sums: Tensor, largest: Tensor) -> dict[str, Tensor]:
        import torch

        count, first, second = sums.unbind(1)
        mean = first / count
        by_element = torch.tensor([kind in _BY_ELEMENT for kind, _ in self._slots])
        by_element = by_element.to(sums.device, non_blocking=True)
        spread = (second - count * mean * mean).clamp_min(0) / (count - 1)
        var = torch.where(by_element, spread, second / count)
        rows = zip(largest.unbind(), mean.unbind(), var.unbind())
        return {
            f"{kind}/{name}/{figure}": value
            for (kind, name), values in zip(self._slots, rows)
            for figure, value in zip(FIGURES, values)
        }


def drop_unseen(metrics: dict[str, float], prefix: str) -> None:
    """Take out what was nowhere looked at in a step, as the gradient of a frozen parameter: the
    largest of no absolute values is below zero."""
    unseen = [
        n for n, v in metrics.items() if v < 0 and n.startswith(prefix) and n.endswith("/max")
    ]
    for name in unseen:
        for figure in FIGURES:
            metrics.pop(name.removesuffix("max") + figure, None)


def _wide(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()
