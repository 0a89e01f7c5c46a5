"""Notices a run in which nothing happens any more, names the rank that is stuck and shows where.

Owns: the thread that looks, the question that ranks ask each other before anyone raises an alarm,
the dumps of stacks, and ending a run that hangs. Does not own: whether a rank moves on
(progress.py), who is late of those that wait for each other (dist/waiting.py), and the store that
carries the answers (dist/watch.py).

A rank for which nothing moves asks all others. Each answers with what it does and where its main
thread stands, from its own thread, which a hung main thread does not keep from answering. Rank 0
decides: while any rank is at something that may take its time, nobody hangs. A handler that has not
moved for as long as a step may take is told of, but only ended when its own limit is over.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.callbacks.guard.progress import TRAINING, Limits, Progress, Status
from headway.callbacks.watch.ranges import require_positive
from headway.dist.agreement import spell_ranks
from headway.dist.waiting import MainThread, Standing, find_late
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerState
from headway.errors import ConfigError, unknown

if TYPE_CHECKING:
    from headway.dist.watch import Watch

logger = logging.getLogger(__name__)

ACTIONS = ("report", "abort")
_TURN_S = 1.0
_ANSWER_TURNS = 6
_ROUND = "hang/round"


class HangWatchdogCallback(TrainerCallback):
    """Raises an alarm when no step has ended for `limit_s` seconds, or for `step_factor` times the
    usual time of a step where that is longer.

    The first step, and the first batch of an evaluation, may take `first_step_limit_s`; saves,
    rollbacks and the handlers of other callbacks `other_limit_s`. Every rank then writes its stacks
    to `hang-rank<N>.txt` in the output folder, the stuck ones to stderr too. `action`: `report`
    leaves it at that, `abort` ends all ranks with exit code 1. A handler that does not move at all
    is told of after `limit_s` already, and ended after `other_limit_s`.
    """

    def __init__(
        self,
        limit_s: float = 300.0,
        action: str = "report",
        *,
        step_factor: float = 10.0,
        first_step_limit_s: float = 1800.0,
        other_limit_s: float = 1800.0,
    ) -> None:
        kind = type(self).__name__
        for option, seconds in (
            ("limit_s", limit_s),
            ("step_factor", step_factor),
            ("first_step_limit_s", first_step_limit_s),
            ("other_limit_s", other_limit_s),
        ):
            require_positive(f"{kind}: {option}", seconds)
        if action not in ACTIONS:
            raise ConfigError(f"{kind}: " + unknown("action", str(action), ACTIONS))
        self.limits = Limits(limit_s, step_factor, first_step_limit_s, other_limit_s)
        self.action = action
        self.alarms: list[str] = []
        """What was told so far."""
        self._progress: Progress | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any) -> None:
        from headway.dist.failure import current_watch

        _, name = self._registration()
        self._over.clear()
        self._progress = Progress(self.limits, trainer.timing, trainer.bus, name)
        self._progress.step = state.global_step
        watch = current_watch() if args.world_size > 1 else None
        patrol = Patrol(self, self._progress, watch, args.process_index, args.world_size)
        patrol.folder = Path(args.output_dir)
        self._thread = threading.Thread(
            target=patrol.run, args=(self._over,), name="headway-hang", daemon=True
        )
        self._thread.start()

    def on_step_begin(self) -> None:
        if self._progress is not None:
            self._progress.begin_step()

    def on_step_end(self, state: TrainerState) -> None:
        if self._progress is not None:
            self._progress.end_step(state.global_step)

    def on_prediction_step(self) -> None:
        if self._progress is not None:
            self._progress.end_batch()

    def on_close(self) -> None:
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self.wait_at_close(thread.join, 5.0)


class Patrol:
    """The thread of one rank."""

    def __init__(
        self,
        owner: HangWatchdogCallback,
        progress: Progress,
        watch: Watch | None,
        rank: int,
        world_size: int,
    ) -> None:
        self._owner, self._progress, self._watch = owner, progress, watch
        self._rank, self._world_size = rank, world_size
        self.folder = Path()
        self._turn_s = min(_TURN_S, owner.limits.step_s / 4)
        self._main = MainThread()
        self._ask_again_s = 0.0
        self._asked_late = False
        self._answered = self._judged = self._acted = 0
        self._moves_then = 0
        self._deadline_s = 0.0

    def run(self, over: threading.Event) -> None:
        if self._watch is not None:
            # What ranks asked in an earlier run of this process is over.
            self._answered = self._judged = self._watch.count_up(_ROUND, 0) or 0
            self._acted = self._answered
        num_moves = -1
        while not over.wait(self._turn_s):
            before, num_moves = num_moves, self._progress.num_moves
            if num_moves == before:
                self._main.look()
            else:
                self._main.note_move()
            status = self._progress.look(4 * self._turn_s + _TURN_S, self._main.still_s)
            if self._watch is None:
                self._decide_alone(status)
            elif not self._watch.ending:
                self._take_part(status, self._watch)

    def _is_worth_asking(self, status: Status) -> bool:
        """Not asked for a while, ever more seldom while nothing changes; or it is late now."""
        if not status.is_suspect:
            self._ask_again_s, self._asked_late = 0.0, False
            return False
        is_late_now = status.is_late and not self._asked_late
        if status.silent_s < self._ask_again_s and not is_late_now:
            return False
        self._ask_again_s, self._asked_late = status.silent_s * 2, status.is_late
        return True

    def _stand(self) -> Standing:
        agreements = 0 if self._watch is None else self._watch.num_agreements
        return self._main.stand(agreements, 2 * self._turn_s)

    # One rank, or ranks that cannot talk to each other

    def _decide_alone(self, status: Status) -> None:
        if not self._is_worth_asking(status):
            return
        text = tell(status, f"it is at {self._stand().place}")
        self._alarm(text, is_stuck=True, speaks=True)
        if self._owner.action == "abort" and status.is_late:
            from headway.dist.forced_end import end_process

            end_process(1, text, victim=False)

    # Ranks that can

    def _take_part(self, status: Status, watch: Watch) -> None:
        if self._is_worth_asking(status):
            watch.count_up(_ROUND)
        asked = watch.count_up(_ROUND, 0) or 0
        if asked > self._answered:
            answer = {"status": asdict(status), "standing": asdict(self._stand())}
            watch.leave_note(f"hang/{asked}/{self._rank}", json.dumps(answer))
            self._answered, self._moves_then = asked, self._progress.num_moves
            self._deadline_s = time.monotonic() + _ANSWER_TURNS * self._turn_s + 2
        if self._rank == 0 and self._answered > self._judged:
            self._judge(watch)
        if self._answered > self._acted:
            verdict = watch.read_notes([f"hang/{self._answered}/verdict"])
            if verdict:
                self._acted = self._answered
                self._act(json.loads(next(iter(verdict.values()))), watch)

    def _judge(self, watch: Watch) -> None:
        """On rank 0: decide once all have answered, or have had the time to."""
        keys = [f"hang/{self._answered}/{rank}" for rank in range(self._world_size)]
        notes = watch.read_notes(keys)
        if len(notes) < len(keys) and time.monotonic() < self._deadline_s:
            return
        self._judged = self._answered
        answers = {rank: json.loads(notes[key]) for rank, key in enumerate(keys) if key in notes}
        verdict = judge(answers, self._world_size)
        if verdict is not None:
            watch.leave_note(f"hang/{self._judged}/verdict", json.dumps(verdict))

    def _act(self, verdict: dict[str, Any], watch: Watch) -> None:
        stuck: list[int] = verdict["stuck"]
        is_stuck = self._rank in stuck or not stuck
        self._alarm(verdict["text"], is_stuck=is_stuck, speaks=self._rank == 0)
        if self._owner.action == "abort" and self._rank == 0 and verdict["is_final"]:
            from headway.dist.forced_end import say
            from headway.dist.watch import Failure

            # The others have a moment to write their stacks.
            time.sleep(2 * self._turn_s + 0.5)
            if self._progress.num_moves != self._moves_then:
                say("the run goes on after all, and is not ended", "hang")
                return
            watch.report(Failure(stuck[0] if len(stuck) == 1 else None, verdict["text"]))

    # What is left behind

    def _alarm(self, text: str, *, is_stuck: bool, speaks: bool) -> None:
        from headway.dist.forced_end import say

        self._owner.alarms.append(text)
        path = self.folder / f"hang-rank{self._rank}.txt"
        if speaks:
            say(f"{text}; stacks are in {path.with_name('hang-rank*.txt')}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n".encode())
                file.flush()
                faulthandler.dump_traceback(file=file, all_threads=True)
        except OSError as error:
            say(f"rank {self._rank}: {path} cannot be written ({error})", "warning")
        if is_stuck:
            say(f"the stacks of rank {self._rank}:", "hang")
            faulthandler.dump_traceback(file=2, all_threads=True)


def judge(answers: dict[int, dict[str, Any]], world_size: int) -> dict[str, Any] | None:
    """Who is stuck, and the words for it; None while there is somebody to wait for."""
    statuses = {rank: Status(**answer["status"]) for rank, answer in answers.items()}
    if not statuses or any(status.is_excused for status in statuses.values()):
        return None
    standings = {rank: Standing(**answer["standing"]) for rank, answer in answers.items()}
    silent = [rank for rank in range(world_size) if rank not in answers]
    longest = max(statuses.values(), key=lambda status: status.silent_s)
    # Ranks in a step wait for one in a handler, which may go on for longer.
    is_final = all(status.is_late or status.what == TRAINING for status in statuses.values())
    if silent:
        text = tell(longest, f"{spell_ranks(silent)} do not answer")
        return {"stuck": silent, "text": text, "is_final": is_final}
    ranks = sorted(standings)
    late = [ranks[i] for i in find_late([standings[rank] for rank in ranks], 0.0)]
    if late and len(late) < world_size:
        where = f"stuck is {spell_ranks(late)} of {world_size}, at {standings[late[0]].place}"
    else:
        late = []
        where = f"all ranks stand still, rank {ranks[0]} at {standings[ranks[0]].place}"
    return {"stuck": late, "text": tell(longest, where), "is_final": is_final}


def tell(status: Status, where: str) -> str:
    return (
        f"nothing has come of {status.what} for {status.silent_s:.0f} s (limit "
        f"{status.allowed_s:.0f} s) after step {status.step}: {where}"
    )
