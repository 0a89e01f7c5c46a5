"""Feeding several ranks: each gets its windows, all of them equally many.

Owns: who reads, handing batches over, agreeing on the end of the data, stand-ins for ranks that
have less than others, counts over all ranks, passing on an error in reading.
Does not own: what a window is made of (loader), the bytes of a batch (parcels).

Either the first rank reads for all and hands out each window, point to point; or every rank reads
its own share and the ranks tell each other, once per window, what they have. Both leave the
loaders of all ranks at the same place, so that any of them describes where the data stands.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch import distributed as dist

from headway.data.counting import IGNORED_LABEL
from headway.data.loader import WindowLoader
from headway.data.parcels import pack, unpack
from headway.data.windows import Window, WindowTotals
from headway.dist.agreement import exchange, require_equal
from headway.dist.failure import PeerFailure
from headway.dist.watch import Failure
from headway.errors import ConfigError

logger = logging.getLogger("headway")


class Feeder:
    """Hands one rank its windows; every rank of `group` must take as many as the others do."""

    def __init__(self, loader: WindowLoader, group: dist.ProcessGroup, *, dispatch: bool) -> None:
        self._loader, self._group = loader, group
        self._rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        deal = loader.deal
        assert (deal.rank, deal.world_size) == (self._rank, self._num_ranks), "another group"
        if dispatch and loader.is_sharded:
            if self._rank == 0:
                logger.warning(
                    "dispatch_batches: %s gives each rank its own share, so every rank reads for "
                    "itself",
                    type(loader.dataset).__name__,
                )
            dispatch = False
        self._dispatch = dispatch
        self._spare: Any = None

    def windows(self) -> Iterator[Window]:
        """This rank's windows to the end of the epoch; the loader's position moves with them."""
        return self._feed(training=True)

    def batches(self) -> Iterator[Window]:
        """The micro-batches of an evaluation pass, each as a window; moves no position."""
        return self._feed(training=False)

    def _feed(self, *, training: bool) -> Iterator[Window]:
        self._check_equal()
        if not self._dispatch:
            return self._share(self._read((self._rank,), training=training), training=training)
        if self._rank:
            return self._receive(training=training)
        return self._hand_out(self._read(range(self._num_ranks), training=training))

    def _read(self, ranks: Sequence[int], *, training: bool) -> Iterator[list[Window]]:
        loader = self._loader
        return loader.rounds(ranks) if training else loader.evaluation_rounds(ranks)

    def _check_equal(self) -> None:
        """Ranks that count on different data would wait for each other for ever."""
        loader, deal = self._loader, self._loader.deal
        facts = {
            "kind of dataset": loader.kind,
            "is_sharded": loader.is_sharded,
            "length of the dataset": loader.num_samples,
            "batch size": deal.batch_size,
            "gradient accumulation": deal.accumulation,
            "drop_last": deal.drop_last,
            "seed of the data order": loader.seed,
            "shuffle": loader.shuffle,
            "epoch": loader.epoch,
            "data position": loader.position,
        }
        require_equal({name: str(value) for name, value in facts.items()}, self._group)

    # ---- the first rank reads for all

    def _hand_out(self, rounds: Iterator[list[Window]]) -> Iterator[Window]:
        """On the first rank: read, hand out, keep the first part."""
        while True:
            try:
                windows = next(rounds, None)
                parcels = self._wrap(windows)
            except Exception as error:
                text = [isinstance(error, ConfigError), _first_line(error)]
                self._send([pack(["error", *text])] * (self._num_ranks - 1))
                raise
            self._send(parcels)
            if windows is None:
                return
            yield windows[0]

    def _wrap(self, windows: list[Window] | None) -> list[Tensor]:
        """What the other ranks are sent: their window, or that there is none."""
        if windows is None:
            return [pack(["end", self._loader.place])] * (self._num_ranks - 1)
        batches = [batch for window in windows for batch in window.micro_batches]
        for window in windows:
            window.num_target_tokens = int(window.num_target_tokens)
        totals = WindowTotals(
            sum(int(window.num_target_tokens) for window in windows),
            sum(window.num_tokens for window in windows),
            sum(window.num_samples for window in windows),
        )
        width = max(len(window.micro_batches) for window in windows)
        for window in windows:
            _complete(window, totals, width, batches[0])
        return [
            pack(
                [
                    "window",
                    self._loader.place,
                    [totals.num_target_tokens, totals.num_tokens, totals.num_samples],
                    [window.num_target_tokens, window.num_tokens, window.num_samples],
                    window.num_fillers,
                    window.sample_ids,
                    window.micro_batches,
                ]
            )
            for window in windows[1:]
        ]

    def _send(self, parcels: list[Tensor]) -> None:
        pending = []
        for rank, parcel in enumerate(parcels, start=1):
            for message in (torch.tensor([parcel.numel()]), parcel):
                work = dist.isend(message, group=self._group, group_dst=rank)
                # The message must live as long as it is on its way.
                pending.append((work, message))
        for work, _ in pending:
            if work is not None:
                work.wait()

    def _receive(self, *, training: bool) -> Iterator[Window]:
        """On the other ranks: take what the first one hands out."""
        size, loader = torch.zeros(1, dtype=torch.int64), self._loader
        while True:
            dist.recv(size, group=self._group, group_src=0)
            parcel = torch.empty(int(size), dtype=torch.uint8, pin_memory=loader.pins_memory)
            dist.recv(parcel, group=self._group, group_src=0)
            kind, *content = unpack(parcel)
            if kind == "error":
                raise self._name_error(0, *content)
            if training:
                loader.move_to(*content[0])
            if kind == "end":
                return
            _, totals, own, num_fillers, ids, micro_batches = content
            targets, tokens, samples = own
            together = WindowTotals(*totals)
            yield Window(micro_batches, targets, tokens, samples, ids, together, num_fillers)

    # ---- every rank reads its share

    def _share(self, rounds: Iterator[list[Window]], *, training: bool) -> Iterator[Window]:
        """Read, tell the others what there is, fill up to what the fullest rank has."""
        loader = self._loader
        # By the map every rank knows the end; of a stream it knows only its own.
        knows_end = loader.num_samples is not None
        has_more, exhausted, all_exhausted = True, False, False
        while not all_exhausted:
            start, window, error = loader.position, None, None
            try:
                window = next(rounds, [None])[0] if has_more else None
                if window is None and knows_end:
                    return
                if not knows_end:
                    exhausted = exhausted or (loader.place[2] if training else window is None)
                    has_more = window is not None and not (training and loader.at_end)
                self._find_spare(window)
            except Exception as failure:
                error = failure
            reports = self._tell(window, exhausted=exhausted, failed=error is not None)
            if reports[:, 0].any():
                self._raise_together(error)
            width, position = int(reports[:, 1].max()), int(reports[:, 5].max())
            targets, tokens, samples = reports[:, 2:5].sum(0).tolist()
            if not knows_end:
                all_exhausted = bool(reports[:, 7].all())
                if training:
                    position = start + samples if loader.is_sharded else position
                    loader.move_to(position, int(reports[:, 6].max()), all_exhausted)
            if width == 0:
                return
            window = window or Window([], 0, 0, 0)
            _complete(window, WindowTotals(targets, tokens, samples), width, self._spare)
            yield window

    def _find_spare(self, window: Window | None) -> None:
        """Keep a batch at hand, in case another rank has more of them."""
        if window is not None and window.micro_batches:
            self._spare = window.micro_batches[-1]
        elif self._spare is None:
            self._spare = self._loader.read_one()
            if self._spare is None:
                deal = self._loader.deal
                raise ConfigError(
                    f"the data of this rank is empty: {type(self._loader.dataset).__name__} "
                    f"yields no batch (batch size {deal.batch_size}, drop_last {deal.drop_last}, "
                    f"{deal.world_size} ranks, dispatch_batches=False). Give every rank a share, "
                    "or set dispatch_batches=True"
                )

    def _tell(self, window: Window | None, *, exhausted: bool, failed: bool) -> Tensor:
        """All ranks' reports on this window, one row each."""
        counts = [0, 0, 0, 0]
        if window is not None and not failed:
            counts = [
                len(window.micro_batches),
                int(window.num_target_tokens),
                window.num_tokens,
                window.num_samples,
            ]
        position, num_batches, _ = self._loader.place
        own = torch.tensor([failed, *counts, position, num_batches, exhausted], dtype=torch.int64)
        reports = torch.empty(self._num_ranks, len(own), dtype=torch.int64)
        dist.all_gather(list(reports.unbind()), own, group=self._group)
        return reports

    def _raise_together(self, own: Exception | None) -> NoReturn:
        """An error in reading, on one rank or more: all end with it and name the first."""
        text = None if own is None else [isinstance(own, ConfigError), _first_line(own)]
        said = exchange(text, self._group)
        if own is not None and not isinstance(own, ConfigError):
            raise own
        rank = next(number for number, text in enumerate(said) if text is not None)
        raise self._name_error(rank, *said[rank]) from own

    def _name_error(self, rank: int, is_mistake: bool, text: str) -> Exception:
        rank = dist.get_global_rank(self._group, rank)
        if is_mistake:
            return ConfigError(text if self._dispatch else f"on rank {rank}: {text}")
        reason = f"it could not read the data: {text}"
        return PeerFailure(Failure(rank, reason, "error"), dist.get_world_size())


def _complete(window: Window, totals: WindowTotals, width: int, spare: Any) -> None:
    """Fill a window with stand-ins up to `width` micro-batches."""
    window.totals = totals
    window.num_fillers = width - len(window.micro_batches)
    if window.num_fillers:
        window.micro_batches += [_mask(spare)] * window.num_fillers


def _mask(batch: Any) -> Any:
    """The batch with nothing in it to predict, where it says what is to be predicted."""
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return batch
    return {**batch, "labels": torch.full_like(labels, IGNORED_LABEL)}


def _first_line(error: Exception) -> str:
    """What is said to the other ranks of an error."""
    if isinstance(error, ConfigError):
        return str(error)
    return f"{type(error).__name__}: {error}".partition("\n")[0]
