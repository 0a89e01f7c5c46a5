"""What becomes of commands: one outcome for all ranks, told to whoever sent them.

Owns: the order of asking, doing and telling; commands that are done only when the loop has done
something. Does not own: what a command does (acts.py), nor the receipts' place (control/inbox.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headway.callbacks.control.acts import Acts, describe_failure
from headway.control.inbox import Inbox
from headway.control.schema import Command
from headway.control.status import StatusBoard
from headway.dist.agreement import spell_ranks

logger = logging.getLogger(__name__)

# Done when the loop has saved, evaluated, or come to wait.
_SAVES = ("save_checkpoint", "save_and_stop")
_EVALUATIONS = ("evaluate_now",)
_PAUSES = ("pause",)
# A rank that alone did these would not train the same any more.
_TEARING = ("set_learning_rate", "extend_max_steps")


@dataclass(frozen=True)
class _Open:
    """A command whose effect is under way."""

    command: Command
    step: int
    words: str
    """For a person, once it is done."""


class Desk:
    """Takes commands on every rank; that of the leading rank has an inbox to tell the outcome to.

    `exchange` gives every rank's value in rank order.
    """

    def __init__(
        self,
        acts: Acts,
        state: Any,
        exchange: Callable[[Any], list[Any]],
        inbox: Inbox | None = None,
        board: StatusBoard | None = None,
    ) -> None:
        self._acts, self._state, self._exchange = acts, state, exchange
        self._inbox, self._board = inbox, board
        self._open: list[_Open] = []

    @property
    def has_open(self) -> bool:
        """Whether a command waits for what the loop does."""
        return bool(self._open)

    def take(self, messages: list[dict[str, Any]], deaf: list[int]) -> None:
        """Follow commands, in order; all ranks together, after the same step."""
        for message in messages:
            command = Command.from_dict(message)
            if deaf:
                reason = f"there is no TrainerControlCallback on {spell_ranks(deaf)} of the run"
                self._settle(command, "refused", reason)
            else:
                self._follow(command)

    def _follow(self, command: Command) -> None:
        obstacle, failure = self._on_all(lambda: self._acts.find_obstacle(command))
        if obstacle or failure:
            self._settle(command, "failed" if failure else "refused", str(failure or obstacle))
            return
        step = self._state.global_step
        words, failure = self._on_all(lambda: self._acts.act(command))
        if failure:
            self._settle(command, "failed", failure)
            if command.name in _TEARING:
                raise RuntimeError(f"{command.name} was done by halves: {failure}")
        elif command.name in _SAVES + _EVALUATIONS + _PAUSES:
            self._open.append(_Open(command, step, str(words or "")))
        else:
            self._settle(command, "applied", str(words or ""))
            if command.name == "resume":
                self._close(_is_pause, "applied", "the run was told to go on before it waited")
            if command.name == "generate_now" and self._board is not None:
                self._board.announce("sample", step=step, samples=self._acts.samples)

    def _on_all(self, compute: Callable[[], Any]) -> tuple[Any, str | None]:
        """The first value that some rank has, and the first failure."""
        value, failure = None, None
        try:
            value = compute()
        except Exception as error:
            failure = describe_failure(error)
        said = self._exchange([value, failure])
        failures = [(rank, told) for rank, (_, told) in enumerate(said) if told is not None]
        if failures:
            rank, told = failures[0]
            return None, told if len(failures) == len(said) else f"rank {rank}: {told}"
        return next((value for value, _ in said if value is not None), None), None

    def _settle(self, command: Command, state: str, message: str, step: int | None = None) -> None:
        step = self._state.global_step if step is None else step
        if self._inbox is not None:
            if command.name != "status":
                told = f": {message}" if message else ""
                logger.info("command %s %s after step %d%s", command.name, state, step, told)
            self._inbox.settle(command.id, state, step, message)
        if self._board is not None:
            self._board.announce(
                "command",
                id=command.id,
                command=command.name,
                data=command.data,
                state=state,
                step=step,
                message=message,
            )

    # What the loop has done meanwhile

    def note_save(self, step: int, path: str) -> None:
        """A checkpoint is committed."""
        self._close(lambda one: one.command.name in _SAVES and one.step == step, "applied", path)

    def note_evaluation(self, message: str) -> None:
        """An evaluation is through."""
        self._close(lambda one: one.command.name in _EVALUATIONS, "applied", message)

    def note_held(self, trouble: str | None) -> None:
        """The run waits; `trouble` says why its state is not on the host, where it should be."""
        if trouble is not None:
            self._close(_is_pause, "failed", f"the run is held, but {trouble}")
        self._close(_is_pause, "applied")

    def note_step(self, last_save_step: int | None) -> None:
        """A step has ended: what the one before was to bring and did not will not come."""
        now = self._state.global_step
        self._close(
            lambda one: (
                one.step < now and not (one.command.name in _SAVES and one.step == last_save_step)
            ),
            "failed",
            "the run did something else after that step: it was rolled back, or is about to end",
        )

    def fail(self, error: BaseException) -> None:
        """The run has failed, and with it what it was about to do; a save may be the cause."""
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        self._close(lambda one: True, "failed", f"the run failed: {describe_failure(error)}{notes}")

    def end(self, reason: str) -> None:
        """The run is over."""
        self._close(lambda one: True, "failed", reason)
        if self._inbox is not None:
            # Told to streams too: nobody may be able to ask for a receipt any more.
            for command in self._inbox.take():
                self._settle(command, "refused", reason)
            self._inbox.close(reason, self._state.global_step)

    def _close(
        self, is_it: Callable[[_Open], bool], state: str, message: str | None = None
    ) -> None:
        for one in [one for one in self._open if is_it(one)]:
            self._open.remove(one)
            self._settle(one.command, state, one.words if message is None else message, one.step)


def _is_pause(one: _Open) -> bool:
    return one.command.name in _PAUSES
