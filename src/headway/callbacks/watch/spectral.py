"""The largest singular value of matrices, by power iteration from where the last one ended.

Owns: what of a parameter is a matrix, the iteration, also over matrices whose rows are on several
ranks, and the vectors to go on from. Does not own: the exchange of results (sharing.py).

Shapes: k matrices in a stack, r rows (this rank's), c columns.
"""

from __future__ import annotations

import base64
import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.callbacks.watch.shards import Shard, Shards, norms_of, put_in_slots
from headway.callbacks.watch.sharing import add_up

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

_MOST_STORED_BYTES = 16 * 1024**2
"""Of vectors in a checkpoint. Without them a resumed run starts as the first one did."""
_TINY = 1.1754944e-38  # the smallest normal float32


@dataclass(frozen=True)
class _Matrix:
    """A parameter's part as a stack of matrices."""

    shard: Shard
    is_flat: bool
    """Whether it is one matrix, whose rows are the first dimension."""
    group: ProcessGroup | None
    """The ranks that hold the rows together."""

    @property
    def shape_krc(self) -> tuple[int, int, int]:
        shape = self.shard.local.shape
        if self.is_flat:
            return 1, shape[0], math.prod(shape[1:])
        return math.prod(shape[:-2]), shape[-2], shape[-1]

    @property
    def is_portable(self) -> bool:
        """Whether its vector means the same to every rank."""
        return self.is_flat or self.shard.is_whole

    def values_krc(self) -> Tensor:
        """In float32; not a copy if it is so already."""
        return self.shard.local.reshape(self.shape_krc).float()


class SpectralNorms:
    """Estimates for the parameters of one model, better with every call.

    The last two dimensions of a parameter are a matrix, those before a stack of them (experts), of
    which the largest counts. Of a convolution all dimensions but the first are columns. Vectors
    are kept between calls, in float16: they are only where to start.
    """

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self._vectors: dict[str, Tensor] = {}
        self._matrices: list[_Matrix] = []
        self._others: list[Shard] = []

    def begin(self, model: nn.Module, shards: Shards) -> None:
        """Find the matrices among the parameters."""
        self._matrices, self._others, left_out = [], [], []
        convolutions = _convolution_weights(model)
        for shard in shards.held:
            if shard.parameter.dim() < 2:
                self._others.append(shard)
                continue
            try:
                group = _group_of_rows(shard.parameter)
            except _CutColumns:
                left_out.append(shard.name)
                continue
            is_flat = shard.parameter.dim() == 2 or id(shard.parameter) in convolutions
            if 0 not in shard.parameter.shape:
                self._matrices.append(_Matrix(shard, is_flat, group if is_flat else None))
        if left_out:
            logger.warning(
                "no spectral norm of %d parameters that are cut across their columns, such as %s",
                len(left_out),
                left_out[0],
            )

    def measure(self, num_slots: int) -> Tensor:
        """Estimates by name, and after them how much the last iteration changed any of them.

        Of what has fewer than two dimensions: its largest element, the norm of a diagonal matrix.
        """
        import torch

        slots: list[int] = []
        values: list[Tensor] = []
        for shard in self._others:
            if shard.answers and shard.local.numel():
                slots.append(shard.slot)
                values += norms_of([shard.local], math.inf)
        changes = []
        error: Exception | None = None
        for batch in self._batches():
            # A rank that failed alone must still meet the others in what they do together.
            try:
                sigmas, change = self._estimate(batch)
            except Exception as raised:
                error = error or raised
                continue
            slots += [matrix.shard.slot for matrix in batch]
            values += sigmas
            changes.append(change)
        if error is not None:
            raise error
        vector = put_in_slots(values, slots, num_slots)
        change = vector.new_zeros(1)
        if changes:
            change = torch.stack([c.to(vector) for c in changes]).amax().reshape(1)
        return torch.cat([vector, change])

    def _batches(self) -> list[list[_Matrix]]:
        """Matrices that go through the iteration side by side."""
        batches: dict[Any, list[_Matrix]] = {}
        for matrix in self._matrices:
            if matrix.group is not None:
                batches.setdefault(matrix.group.group_name, []).append(matrix)
            elif matrix.shard.answers and matrix.shard.local.numel():
                batches.setdefault(matrix.shard.local.device, []).append(matrix)
        return list(batches.values())

    def _estimate(self, batch: Sequence[_Matrix]) -> tuple[list[Tensor], Tensor]:
        """Sigma of each matrix of a batch, and the largest relative change of the last turn."""
        import torch

        iteration = _Iteration(batch)
        cold = iteration.start(self._vectors)
        for _ in range(self.num_steps * (2 if cold else 1)):
            iteration.turn()
        if iteration.error is not None:
            raise iteration.error
        for matrix, vector_kc in zip(batch, iteration.vectors_kc()):
            self._vectors[matrix.shard.name] = vector_kc.to(torch.float16)
        before, after = iteration.before, iteration.after
        change = (after - before) / after.clamp_min(_TINY)
        parts = after.split([matrix.shape_krc[0] for matrix in batch])
        return [part[0] if len(part) == 1 else part.amax() for part in parts], change.amax()

    # -- state ------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The vectors, in one transfer; nothing where they would be too large."""
        import torch

        portable = {m.shard.name for m in self._matrices if m.is_portable}
        portable |= self._vectors.keys() - {m.shard.name for m in self._matrices}
        kept = {name: v for name, v in sorted(self._vectors.items()) if name in portable}
        if not kept or sum(2 * v.numel() for v in kept.values()) > _MOST_STORED_BYTES:
            return {}
        device = next(iter(kept.values())).device
        host = torch.cat([v.to(device).reshape(-1) for v in kept.values()]).cpu()
        parts = host.split([v.numel() for v in kept.values()])
        return {
            name: {
                "shape": list(vector.shape),
                "float16": base64.b64encode(part.numpy().tobytes()).decode(),
            }
            for (name, vector), part in zip(kept.items(), parts)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over vectors; one that cannot be read is begun anew."""
        import torch

        self._vectors = {}
        for name, stored in state.items():
            try:
                raw = bytearray(base64.b64decode(stored["float16"], validate=True))
                vector = torch.frombuffer(raw, dtype=torch.float16).reshape(stored["shape"])
            except (KeyError, TypeError, ValueError, RuntimeError):
                continue
            self._vectors[name] = vector.clone()


class _Iteration:
    """Power iteration over many matrices side by side.

    The vectors of all of them are one; so there are few operations beside the products, and one
    collective in a turn where rows are on several ranks.
    """

    def __init__(self, batch: Sequence[_Matrix]) -> None:
        import torch

        self._batch, self._group = batch, batch[0].group
        self.error: Exception | None = None
        """What failed here. The turns go on without it: other ranks may be waiting in them."""
        self._device = batch[0].shard.local.device
        self._sizes = [c for m in batch for c in [m.shape_krc[2]] * m.shape_krc[0]]
        numbers, sizes = torch.arange(len(self._sizes)), torch.tensor(self._sizes)
        owner = numbers.repeat_interleave(sizes, output_size=sum(self._sizes))
        self._owner = owner.to(self._device, non_blocking=True)
        """By element of the joined vector: the number of its matrix."""

    def start(self, kept: Mapping[str, Tensor]) -> bool:
        """Begin where vectors were left; returns whether some had to be drawn."""
        import torch

        drawn, is_cold = [], False
        for matrix in self._batch:
            num_stacked, _, num_columns = matrix.shape_krc
            # A generator of its own: what training draws stays the same. The same vector on all
            # ranks, since they may hold rows of one matrix.
            generator = torch.Generator().manual_seed(zlib.crc32(matrix.shard.name.encode()))
            drawn.append(torch.randn(num_stacked, num_columns, generator=generator))
        flat = torch.cat([vector.reshape(-1) for vector in drawn])
        self._fresh = self._normalise(flat.to(self._device, non_blocking=True))[0]
        parts = []
        for matrix, fresh_kc, vector_kc in zip(self._batch, drawn, self._cut(self._fresh)):
            vector = kept.get(matrix.shard.name)
            if vector is None or vector.shape != fresh_kc.shape:
                is_cold = True
                vector = vector_kc
            parts.append(vector.to(self._fresh).reshape(-1))
        self._vectors = torch.cat(parts)
        return is_cold

    def _cut(self, flat: Tensor) -> list[Tensor]:
        shapes = [matrix.shape_krc for matrix in self._batch]
        parts = flat.split([k * c for k, _, c in shapes])
        return [part.view(k, c) for part, (k, _, c) in zip(parts, shapes)]

    def vectors_kc(self) -> list[Tensor]:
        """Where the iteration stands, by matrix."""
        return self._cut(self._vectors)

    def _normalise(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Every matrix's part at unit length, and the lengths."""
        import torch

        lengths = torch.stack(torch._foreach_norm(list(flat.split(self._sizes))))
        return flat * lengths.clamp_min(_TINY).reciprocal()[self._owner], lengths

    def turn(self) -> None:
        """One step of all matrices; `before` and `after` are the estimates around it."""
        import torch

        flat: Tensor | None = None
        if self.error is None:
            try:
                flat, self.before = self._multiply()
            except Exception as error:
                if self._group is None:
                    raise
                self.error = error
        if flat is None:
            flat = torch.zeros_like(self._vectors)
            self.before = flat.new_zeros(len(self._sizes))
        if self._group is not None:
            sums = add_up(torch.cat([flat, self.before.square()]), self._group)
            flat, squares = sums.split([len(self._vectors), len(self._sizes)])
            self.before = squares.sqrt()
        moved, lengths = self._normalise(flat)
        # Where nothing is left, as of a zero matrix, the next look begins somewhere else.
        self._vectors = torch.where((lengths > _TINY)[self._owner], moved, self._fresh)
        self.after = torch.maximum(self.before, lengths / self.before.clamp_min(_TINY))

    def _multiply(self) -> tuple[Tensor, Tensor]:
        """W^T W v over the rows that are here, and the lengths of W v over them."""
        import torch

        us: list[Tensor] = []
        ys: list[Tensor] = []
        for matrix, vector_kc in zip(self._batch, self.vectors_kc()):
            values_krc = matrix.values_krc()
            if values_krc.shape[0] == 1:
                u_r = torch.mv(values_krc[0], vector_kc[0])
                us.append(u_r if u_r.numel() else u_r.new_zeros(1))
                ys.append(torch.mv(values_krc[0].t(), u_r))
            else:
                u_kr1 = torch.bmm(values_krc, vector_kc.unsqueeze(2))
                us += u_kr1.unbind()
                ys.append(torch.bmm(values_krc.transpose(1, 2), u_kr1).reshape(-1))
        return torch.cat(ys), torch.stack(torch._foreach_norm(us))


def _convolution_weights(model: nn.Module) -> set[int]:
    from torch.nn.modules.conv import _ConvNd

    return {id(m.weight) for m in model.modules() if isinstance(m, _ConvNd)}


class _CutColumns(Exception):
    """A parameter's parts are not made of whole rows."""


def _group_of_rows(parameter: Tensor) -> ProcessGroup | None:
    """The ranks among which the first dimension is cut, if it is."""
    from headway.checkpoint.sharding import is_spread

    if not is_spread(parameter):
        return None
    cut = [axis for axis, p in enumerate(parameter.placements) if not p.is_replicate()]
    if not cut:
        return None
    if len(cut) > 1 or not parameter.placements[cut[0]].is_shard(0):
        raise _CutColumns
    group: ProcessGroup = parameter.device_mesh.get_group(cut[0])
    return group
