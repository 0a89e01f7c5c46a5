"""Finds ranks whose copies of the weights are no longer the same, down to a single bit.

Owns: when copies are compared, who differs in what, and bringing copies together again. Does not
own: the checksums (checksums.py), what a stop or a rollback is (recovery.py).

At a due step each rank adds up what it holds and begins to copy the sums to the host; at the end of
the next step, when they are there, all ranks exchange a few numbers. In between nothing waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.callbacks.guard.checksums import (
    Group,
    Held,
    add_up,
    add_up_each,
    find_held,
    fold,
    group_shared,
)
from headway.callbacks.guard.recovery import Recovery
from headway.callbacks.watch.ranges import require_count, require_flag
from headway.dist.agreement import exchange, spell_ranks
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

ACTIONS = ("stop", "abort", "rollback", "resync")
DIFFERENT = "guard/tensors that differ between replicas"
_NUM_SHOWN = 5


class ReplicaCheckCallback(TrainerCallback):
    """Compares the weights that ranks hold alike, every `interval` steps; with `optimizer_state`
    the optimizer's state too.

    `action`: `abort` ends the run without a save, `stop` with one; `rollback` returns to the last
    checkpoint before which all were equal; `resync` copies what differs from the rank that most
    others agree with (of two, from the lower one), and goes on. After `max_recoveries` of these the
    next difference aborts the run.
    """

    def __init__(
        self,
        interval: int = 90,
        action: str = "abort",
        *,
        optimizer_state: bool = False,
        max_recoveries: int = 3,
    ) -> None:
        kind = type(self).__name__
        require_count(f"{kind}: interval", interval, least=1)
        require_flag(f"{kind}: optimizer_state", optimizer_state)
        require_count(f"{kind}: max_recoveries", max_recoveries, least=1)
        self.interval, self.optimizer_state = interval, optimizer_state
        self.recovery = Recovery(
            kind,
            action,
            ACTIONS,
            max_rollbacks=max_recoveries,
            skip_batches="none",  # the data are not at fault
        )
        self.num_resyncs = 0
        self.differences: list[str] = []
        """What was found so far, in words."""
        self._active: bool | None = None
        """Whether there is anything to compare; not known before a run begins."""
        self._groups: dict[str, Group] | None = None
        self._under_way: _Sums | None = None
        self._equal_step = 0
        self._process_groups: dict[str, Any] = {}

    def _forget_run(self) -> None:
        self.num_resyncs, self.differences, self._active = 0, [], None
        self.recovery.forget()

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any) -> None:
        local = getattr(args, "post_local_sgd", None)
        if getattr(local, "enabled", False):
            raise ConfigError(
                "ReplicaCheckCallback: post_local_sgd.enabled=True lets ranks differ on purpose "
                "between averagings; leave one of the two out"
            )
        self.recovery.begin(args, state, trainer)
        self._groups, self._under_way = None, None
        self._process_groups.clear()
        self._equal_step = state.global_step
        self._active = args.world_size > 1 and self._find_any(trainer)
        if not self._active:
            self.recovery.let_go(trainer)
            if state.is_world_process_zero:
                logger.warning(
                    "ReplicaCheckCallback: no two ranks hold the same weights, so nothing is "
                    "compared"
                )

    def _find_any(self, trainer: Any) -> bool:
        own = find_held(trainer.strategy.unwrap())
        said = exchange([held.key for held in own])
        holders = Counter(key for keys in said for key in dict.fromkeys(keys))
        return any(count > 1 for count in holders.values())

    def on_step_end(
        self, state: TrainerState, control: TrainerControl, optimizer: Any, trainer: Any
    ) -> None:
        if not self._active:
            return
        self._compare(state, control, trainer)
        if state.global_step % self.interval == 0 and not self.recovery.pending:
            self._begin(state, optimizer, trainer)

    def on_run_settled(self, state: TrainerState, control: TrainerControl, trainer: Any) -> None:
        if self._active:
            self._compare(state, control, trainer)

    def on_save(self, step: int, checkpoint_path: str, trainer: Any) -> None:
        if self._active:
            self.recovery.note_save(step, checkpoint_path, trainer)

    def on_load(self, state: TrainerState, path: str, trainer: Any) -> None:
        if self._active is not False:
            self.recovery.note_load(state, trainer, path)
        self._under_way = None
        self._equal_step = min(self._equal_step, state.global_step)

    def _begin(self, state: TrainerState, optimizer: Any, trainer: Any) -> None:
        if self._groups is None:
            # Not earlier: an optimizer has its state after the first step.
            held = find_held(trainer.strategy.unwrap(), optimizer if self.optimizer_state else None)
            self._groups = group_shared(held, exchange([one.key for one in held]))
        self._under_way = _Sums(state.global_step, self._groups)

    def _compare(self, state: TrainerState, control: TrainerControl, trainer: Any) -> None:
        sums, self._under_way = self._under_way, None
        if sums is None:
            return
        said = exchange(sums.folded())
        names = dict.fromkeys(name for one in said for name in one)
        wrong = [
            name for name in names if len({tuple(one[name]) for one in said if name in one}) > 1
        ]
        found = find_different(exchange(sums.by_name(wrong))) if wrong else []
        trainer.record_metric(DIFFERENT, len(found), "max", None, "latest", step=sums.step)
        if not found:
            self._equal_step = sums.step
            self.recovery.note_good(sums.step, trainer)
            return
        why = f"after step {sums.step} {describe(found)}"
        self.differences.append(why)
        if self.recovery.action == "resync" and self.num_resyncs < self.recovery.max_rollbacks:
            self.num_resyncs += 1
            if state.is_world_process_zero:
                logger.error("%s: %s; action: resync", self.name, why)
            self._bring_together(found, trainer.env.rank)
            return
        used_up = self.recovery.action == "resync"
        self.recovery.act(
            why + f" (max_recoveries={self.recovery.max_rollbacks} is used up)" * used_up,
            control,
            state,
            good_step=self._equal_step,
            bad_step=sums.step,
            action="abort" if used_up else None,
        )

    def _bring_together(self, found: list[Difference], rank: int) -> None:
        """Overwrite what differs; every rank calls it with the same list."""
        assert self._groups is not None
        for one in found:
            spelled = ",".join(map(str, one.ranks))
            if spelled not in self._process_groups:
                self._process_groups[spelled] = make_group(one.ranks)
            if rank in one.ranks:
                members = self._groups[spelled].members
                held = next(held for held in members if held.name == one.name)
                copy_from(held, one.best_rank, self._process_groups[spelled])

    def state_dict(self) -> dict[str, Any]:
        return {"version": 1, "num_resyncs": self.num_resyncs, **self.recovery.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_resyncs = max(self.num_resyncs, int(state.get("num_resyncs") or 0))
        self.recovery.load_state_dict(state)


class _Sums:
    """The sums of one step, on their way to the host."""

    def __init__(self, step: int, groups: Mapping[str, Group]) -> None:
        import torch

        self.step, self._groups = step, groups
        self._copies: dict[str, Tensor] = {}
        self._event: Any = None
        with torch.no_grad():
            for name, group in groups.items():
                sums = add_up(group.members)
                on_cuda = sums.device.type == "cuda"
                copy = torch.empty(len(sums), dtype=torch.int64, pin_memory=on_cuda)
                self._copies[name] = copy.copy_(sums, non_blocking=True)
                if on_cuda:
                    self._event = torch.cuda.Event()
                    self._event.record()

    def folded(self) -> dict[str, list[int]]:
        """A few numbers of each group of ranks that this one belongs to."""
        if self._event is not None:
            self._event.synchronize()
        return {name: fold(copy.tolist()) for name, copy in self._copies.items()}

    def by_name(self, groups: list[str]) -> dict[str, dict[str, int]]:
        """Of some groups the sum of every tensor, as it is by now."""
        return {
            name: {
                held.name: total
                for held, total in zip(
                    self._groups[name].members, add_up_each(self._groups[name].members).tolist()
                )
            }
            for name in groups
            if name in self._groups
        }


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same on all ranks that should hold the same."""

    name: str
    ranks: list[int]
    odd_ranks: list[int]
    """Those that differ from most; empty where no value has a majority."""
    best_rank: int
    """The lowest rank of those that hold what most hold."""


def find_different(said: list[dict[str, dict[str, int]]]) -> list[Difference]:
    """From what every rank says of each tensor in each group of ranks."""
    values: dict[tuple[str, str], dict[int, int]] = {}
    for rank, groups in enumerate(said):
        for group, sums in groups.items():
            for name, total in sums.items():
                values.setdefault((group, name), {})[rank] = total
    found = []
    for (_, name), by_rank in values.items():
        counts = Counter(by_rank.values())
        if len(counts) == 1:
            continue
        # Of equally many the value of the lowest rank, which was counted first.
        best, num_best = counts.most_common(1)[0]
        is_clear = num_best > len(by_rank) / 2
        odd = [rank for rank, value in by_rank.items() if value != best] if is_clear else []
        first = next(rank for rank, value in by_rank.items() if value == best)
        found.append(Difference(name, list(by_rank), odd, first))
    return found


def describe(found: list[Difference]) -> str:
    odd = sorted({rank for one in found for rank in one.odd_ranks})
    every = sorted({rank for one in found for rank in one.ranks})
    names = ", ".join(one.name for one in found[:_NUM_SHOWN])
    more = f" and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
    who = (
        f"{spell_ranks(odd)} of {len(every)} hold{'s' * (len(odd) == 1)} other values than most"
        if odd
        else f"{spell_ranks(every)} hold different values, and which are right cannot be told"
    )
    return f"{who}, in {names}{more}"


def make_group(ranks: list[int]) -> Any:
    """The process group of some ranks; made by all ranks together, None for all of them."""
    from torch import distributed

    from headway.dist.limits import collective_limit

    if len(ranks) == distributed.get_world_size():
        return None
    return distributed.new_group(ranks, timeout=collective_limit())


def copy_from(held: Held, source: int, group: Any) -> None:
    """Take over what another rank holds; all ranks of the group call it."""
    import torch
    from torch import distributed

    from headway.dist.group import host_group

    tensor = held.read()
    if group is None and tensor.device.type == "cpu":
        group = host_group()
    with torch.no_grad():
        whole = tensor.contiguous()
        distributed.broadcast(whole.reshape(-1).view(torch.uint8), source, group=group)
        if whole is not tensor:
            tensor.copy_(whole)
