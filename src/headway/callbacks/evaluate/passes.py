"""One pass of an evaluator over its batches, on all ranks together.

Owns: which batches a duration allows, who takes which of them, stand-ins for ranks that have none
left, and ending all ranks alike when one fails or is asked to end.
Does not own: what is done with the scores (evaluator.py), when a pass is due
(evaluator_callback.py).

Batch i goes to share i modulo the number of shares, so a batch is the same whatever the number of
ranks is. A rank that has none left goes through another one's, which a sharded model needs it for,
and does not count it.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headway.callbacks.evaluate.evaluator import Evaluator
from headway.callbacks.evaluate.scoring import Scorer
from headway.callbacks.watch.sharing import num_ranks, on_all_ranks
from headway.config.duration import Duration
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

Fetch = Callable[[], Any]

_FAILED, _HAS_MORE, _AT_END, _ASKED, _LATE, _TIME_UP = (1 << n for n in range(6))
_JOINS, _COMPUTED = _HAS_MORE, _AT_END  # the same question, of joins in place of batches


class LostForward(RuntimeError):
    """A forward failed in which other ranks may be waiting: nobody can go on from here."""


@dataclass(frozen=True)
class Turn:
    """One rank's part of a round: a batch to go through, and whether it counts here."""

    fetch: Fetch
    counts: bool
    num_batches: int
    """In the round, over all ranks."""


@dataclass
class PassResult:
    """What a pass gave; `metrics` is None where it ended before it was through."""

    metrics: dict[str, float] | None
    num_batches: int
    """Over all ranks."""
    seconds: float
    ended_by: str | None = None
    """`asked`: whoever stops this process does not want to wait; `budget`: time was up."""


def count_tokens(batch: Any) -> int:
    """The tokens of a batch, padding included."""
    ids = batch["input_ids"] if isinstance(batch, dict) else batch
    return int(ids.numel() if hasattr(ids, "numel") else len(ids))


def plan_batches(evaluator: Evaluator, duration: Duration, order: int) -> Iterator[Fetch]:
    """The batches of a pass over all ranks, in order, to be fetched by whoever takes them."""
    if duration.unit == "seconds":
        return _go_through(evaluator, order)
    if duration.unit == "steps":
        return itertools.islice(_go_through(evaluator, order), int(duration.value))
    if duration.unit == "tokens":
        return _until_tokens(evaluator, order, int(duration.value))
    return _repeat(evaluator, order, duration.value)


def _go_through(evaluator: Evaluator, order: int) -> Iterator[Fetch]:
    """All batches once; of a sequence only those that are fetched are made."""
    evaluator.set_order(order)
    batches = evaluator.batches
    if hasattr(batches, "__len__") and hasattr(batches, "__getitem__"):
        for number in range(len(batches)):
            yield lambda number=number: batches[number]  # type: ignore[misc]
        return
    for batch in batches:
        yield lambda batch=batch: batch  # type: ignore[misc]


def _until_tokens(evaluator: Evaluator, order: int, num_tokens: int) -> Iterator[Fetch]:
    seen = 0
    tell = getattr(evaluator.batches, "num_tokens_of", None)
    for number, fetch in enumerate(_go_through(evaluator, order)):
        if seen >= num_tokens:
            return
        if tell is None:
            batch = fetch()
            seen += count_tokens(batch)
            yield lambda batch=batch: batch  # type: ignore[misc]
        else:
            seen += tell(number)
            yield fetch


def _repeat(evaluator: Evaluator, order: int, epochs: float) -> Iterator[Fetch]:
    whole = math.floor(epochs)
    for _ in range(whole):
        yield from _go_through(evaluator, order)
    if epochs > whole:
        batches: Any = evaluator.batches
        if not hasattr(batches, "__len__"):
            raise ConfigError(
                f"eval_duration: {epochs} epochs given, but the batches of evaluator "
                f"{evaluator.title!r} do not say how many they are; allowed: whole epochs, steps, "
                "tokens or seconds"
            )
        part = math.ceil((epochs - whole) * len(batches) - 1e-9)
        yield from itertools.islice(_go_through(evaluator, order), part)


def deal(plan: Iterable[Fetch], share: int, num_shares: int) -> Iterator[Turn]:
    """One share's turns; all shares have equally many."""
    batches = iter(plan)
    while round_ := list(itertools.islice(batches, num_shares)):
        own = share < len(round_)
        yield Turn(round_[share if own else 0], own, len(round_))


class Pass:
    """Runs one evaluator; every rank must run it with the same arguments.

    `asked_to_end` is this rank's alone, `deadline_s` counts on the first rank: the ranks agree on
    both before every batch.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        strategy: Any,
        scorer: Scorer,
        duration: Duration,
        *,
        order: int,
        leads: bool,
        asked_to_end: Callable[[], bool],
        deadline_s: float = math.inf,
        on_batch: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._evaluator, self._strategy, self._scorer = evaluator, strategy, scorer
        self._duration, self._order, self._leads = duration, order, leads
        self._asked, self._deadline_s, self._on_batch = asked_to_end, deadline_s, on_batch
        self._failure: Exception | None = None

    def run(self) -> PassResult:
        """Go through the batches and compute the figures; a duration of 0 has none."""
        if self._duration.value == 0:
            return PassResult({}, 0, 0.0)
        began_s = time.monotonic()
        shard = self._strategy.data_shard()
        turns: Iterator[Turn] | None = None
        num_batches = num_rounds = 0
        time_up_s = math.inf
        if self._duration.unit == "seconds":
            time_up_s = began_s + self._duration.value
        self._evaluator.reset_metrics()
        while True:
            turn, batch = None, None
            try:
                if turns is None:
                    plan = plan_batches(self._evaluator, self._duration, self._order)
                    turns = deal(plan, shard.rank, shard.world_size)
                turn = next(turns, None)
                batch = turn.fetch() if turn is not None else None
            except Exception as error:
                self._failure = self._failure or error
            agreed = self._agree(turn, num_batches, time_up_s)
            ended_by = "asked" if agreed & _ASKED else "budget" if agreed & _LATE else None
            if ended_by is not None:
                return PassResult(None, num_batches, time.monotonic() - began_s, ended_by)
            if turn is None or agreed & _TIME_UP:
                break
            self._take(turn, batch, speaks=shard.speaks)
            num_batches, num_rounds = num_batches + turn.num_batches, num_rounds + 1
            self._on_batch(num_rounds)
        if num_batches == 0:
            raise ConfigError(f"evaluator {self._evaluator.title!r}: its data yields no batch")
        metrics = self._compute()
        return PassResult(metrics, num_batches, time.monotonic() - began_s)

    def _compute(self) -> dict[str, float]:
        """The figures, on all ranks or on none.

        Every rank says before a join that it comes to one, and at the end that it is through: a
        rank that fails says that instead, where the others would wait for it.
        """
        agrees = True

        def settle(own: int) -> None:
            nonlocal agrees
            agrees = False
            agreed: int = self._strategy.agree(own)
            if agreed & _FAILED:
                on_all_ranks(self._raise)
            if agreed & _JOINS and agreed & _COMPUTED:
                raise ConfigError(
                    f"evaluator {self._evaluator.title!r}: compute_metrics joins different numbers "
                    "of tensors on different ranks; every rank must make the same joins"
                )

        def join(own: Tensor) -> Tensor:
            nonlocal agrees
            settle(_JOINS)
            total: Tensor = self._strategy.reduce(own, "sum")
            agrees = True
            return total

        try:
            metrics = self._evaluator.compute_metrics(join)
            settle(_COMPUTED)
        except Exception as error:
            if agrees:  # the others do not know of it yet
                self._failure = error
                settle(_FAILED)
            raise
        return metrics

    def _take(self, turn: Turn, batch: Any, *, speaks: bool) -> None:
        try:
            scores = self._scorer.score(self._strategy, batch, self._evaluator)
        except Exception as error:  # told to the others before the next batch, if they get there
            if self._strategy.forward_is_shared and num_ranks() > 1:
                if isinstance(error, ConfigError):
                    raise
                raise LostForward(
                    f"{type(error).__name__}: {error} (in a forward that ranks of "
                    f"{self._strategy.name} make together, so it cannot be left out)"
                ) from error
            self._failure = error
            return
        if scores is None or not turn.counts or not speaks:
            return
        try:
            self._evaluator.update_metrics(batch, scores)
        except Exception as error:
            self._failure = error

    def _agree(self, turn: Turn | None, num_batches: int, time_up_s: float) -> int:
        """What all ranks are to do next; what failed on one is raised on all."""
        failed, now_s = self._failure is not None, time.monotonic()
        agreed: int = self._strategy.agree(
            _FAILED * failed
            | _HAS_MORE * (turn is not None)
            | _AT_END * (turn is None and not failed)
            | _ASKED * self._asked()
            | _LATE * (self._leads and now_s > self._deadline_s)
            | _TIME_UP * (self._leads and now_s > time_up_s and num_batches > 0)
        )
        if agreed & _FAILED:
            on_all_ranks(self._raise)
        if agreed & _HAS_MORE and agreed & _AT_END:
            raise ConfigError(
                f"evaluator {self._evaluator.title!r}: ranks have different numbers of batches; "
                "every rank must be given the same ones in the same order"
            )
        return agreed

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure
