"""Commands on their way from the server's thread to the training thread, and their receipts.

Owns: the queue, idempotence by id, what became of each command. Does not own: what commands mean
(schema.py), nor when they are taken (callbacks).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from dataclasses import replace
from typing import Any

from headway.control.schema import BadRequest, Command, Receipt

_MOST_WAITING = 64
_MOST_RECEIPTS = 1024


class Inbox:
    """Filled by any thread; emptied by the training thread at the end of a step."""

    def __init__(self, most_waiting: int = _MOST_WAITING) -> None:
        self.pending = False
        """Whether something waits; read without a lock, once a step."""
        self._most_waiting = most_waiting
        self._changed = threading.Condition()
        self._waiting: deque[Command] = deque()
        self._receipts: OrderedDict[str, tuple[Command, Receipt]] = OrderedDict()
        self._closed: str | None = None

    def submit(self, command: Command) -> Receipt:
        """Take a command, once for each id; `BadRequest` says why it is not taken."""
        with self._changed:
            known = self._receipts.get(command.id)
            if known is not None:
                before, receipt = known
                if (before.name, dict(before.data)) != (command.name, dict(command.data)):
                    raise BadRequest(
                        409, f"the id {command.id} was used for another {before.name} command"
                    )
                return receipt
            if self._closed is not None:
                raise BadRequest(410, self._closed)
            if len(self._waiting) >= self._most_waiting:
                raise BadRequest(429, f"{len(self._waiting)} commands wait for the next step")
            receipt = Receipt(command.id, command.name, "accepted", accepted_at=time.time())
            self._receipts[command.id] = command, receipt
            self._forget_oldest()
            self._waiting.append(command)
            self.pending = True
            self._changed.notify_all()
            return receipt

    def _forget_oldest(self) -> None:
        """Receipts are kept for a while; those that are open stay."""
        for key in [k for k, (_, r) in self._receipts.items() if r.settled_at is not None]:
            if len(self._receipts) <= _MOST_RECEIPTS:
                break
            del self._receipts[key]

    def take(self) -> list[Command]:
        """All commands that wait, in the order in which they came."""
        with self._changed:
            taken = list(self._waiting)
            self._waiting.clear()
            self.pending = False
            return taken

    def take_messages(self) -> list[dict[str, Any]]:
        """The same, as JSON can carry it to other ranks."""
        return [command.to_dict() for command in self.take()]

    def wait_for_command(self, timeout_s: float) -> bool:
        """Sleep until a command waits (True) or the time is over."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._waiting), timeout_s)

    def settle(self, command_id: str, state: str, step: int, message: str = "") -> None:
        """Say what became of a command that was taken."""
        with self._changed:
            known = self._receipts.get(command_id)
            if known is None:
                return
            command, receipt = known
            settled = replace(
                receipt, state=state, step=step, message=message, settled_at=time.time()
            )
            self._receipts[command_id] = command, settled
            self._changed.notify_all()

    def receipt(self, command_id: str) -> Receipt | None:
        with self._changed:
            known = self._receipts.get(command_id)
            return None if known is None else known[1]

    def wait_for_receipt(self, command_id: str, timeout_s: float) -> Receipt | None:
        """The receipt once it is settled, or as it is when the time is over."""

        def settled() -> bool:
            known = self._receipts.get(command_id)
            return known is None or known[1].settled_at is not None

        with self._changed:
            self._changed.wait_for(settled, timeout_s)
            known = self._receipts.get(command_id)
            return None if known is None else known[1]

    def close(self, reason: str, step: int) -> None:
        """The run ends: what still waits is refused, and so is what comes later."""
        with self._changed:  # its lock may be taken again by the thread that has it
            self._closed = reason
            for command in self.take():
                self.settle(command.id, "refused", step, reason)
