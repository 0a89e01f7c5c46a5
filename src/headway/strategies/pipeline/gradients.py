"""Gradients over ranks: sums over replicas and over copies of a tied weight, the norm of all.

Owns: the collectives on gradients. Does not own: making gradients (running.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch import distributed as dist

_BUCKET_BYTES = 64 * 1024**2


class Gradients:
    """The gradients of one rank's parameters."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        copies: Sequence[tuple[nn.Parameter, dist.ProcessGroup, bool]],
        *,
        pipeline: dist.ProcessGroup,
        replicas: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """`copies` are tied weights with the group that holds them, and whether this one counts."""
        self._parameters = list(parameters)  # those too that are frozen for now
        self._copies = [copy for copy in copies if copy[0].requires_grad]
        uncounted = {id(p) for p, _, counts in self._copies if not counts}
        self._counted = [p for p in self._parameters if id(p) not in uncounted]
        self._pipeline, self._replicas, self._device = pipeline, replicas, device

    @torch.no_grad()
    def sum(self) -> None:
        """Add up what replicas made of their data, and what the copies of a weight got."""
        if self._replicas is not None:
            for parameter in self._parameters:
                # Another replica may have one, and buckets have to be the same everywhere.
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            for bucket in self._buckets():
                flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
                dist.all_reduce(flat, group=self._replicas)
                parts = flat.split([gradient.numel() for gradient in bucket])
                for gradient, part in zip(bucket, parts):
                    gradient.copy_(part.view_as(gradient))
        for parameter, group, _ in self._copies:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)

    def _buckets(self) -> Iterator[list[Tensor]]:
        bucket: list[Tensor] = []
        size = 0
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if bucket and (bucket[0].dtype != gradient.dtype or size > _BUCKET_BYTES):
                yield bucket
                bucket, size = [], 0
            bucket.append(gradient)
            size += gradient.numel() * gradient.element_size()
        if bucket:
            yield bucket

    @torch.no_grad()
    def clip(
        self,
        max_norm: float | None,
        norms_of: Callable[[Sequence[nn.Parameter]], Sequence[Tensor]] | None = None,
    ) -> Tensor:
        """The norm over all stages, each tied weight once; gradients are scaled down above it.

        `norms_of` gives the norms where gradients are gone already.
        """
        norms = (norms_of or _norms)(self._counted)
        # In float64: a large norm of float32 has no square in it.
        square = torch.zeros((), dtype=torch.float64, device=self._device)
        if norms:
            square = torch.stack(list(norms)).double().square().sum()
        dist.all_reduce(square, group=self._pipeline)
        norm = square.sqrt().float()
        if max_norm:
            nn.utils.clip_grads_with_norm_(self._parameters, max_norm, norm, foreach=True)
        return norm


def _norms(parameters: Sequence[nn.Parameter]) -> Sequence[Tensor]:
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch._foreach_norm(gradients) if gradients else []
