"""Signals: the first Ctrl-C or SIGTERM asks for a clean stop, the second stops at once.

Owns the handlers while a run is on and restores the ones it found. SIGUSR1 asks for a save. What
else announces the end of a machine, be it a signal or not, counts as a SIGTERM.
Does not own what follows: the loop reads the requests at a step boundary.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from headway.dist.exits import is_launched

logger = logging.getLogger(__name__)


@contextmanager
def ignore_save_requests() -> Iterator[None]:
    """Around the set-up of a run: SIGUSR1, which would end the process, finds nothing to save."""
    if not hasattr(signal, "SIGUSR1") or threading.current_thread() is not threading.main_thread():
        yield
        return
    found = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, found)


class SignalRequests:
    """Context in which signals become requests. Off the main thread it installs nothing."""

    def __init__(self) -> None:
        self.stop_signal: signal.Signals | None = None
        self._save_requested = False
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> SignalRequests:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._on_stop)
            if hasattr(signal, "SIGUSR1"):
                self._previous[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        else:
            logger.warning("training runs off the main thread: signals will not save and stop it")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._previous.clear()

    @property
    def save_requested(self) -> bool:
        """Whether a save was asked for and not taken."""
        return self._save_requested

    def take_save_request(self) -> bool:
        """Whether a save was asked for since the last call."""
        requested, self._save_requested = self._save_requested, False
        return requested

    def ask_to_stop(self, why: str) -> None:
        """Ask for a clean stop as a SIGTERM does; from any thread, as often as one likes."""
        if self.stop_signal is None:
            self.stop_signal = signal.SIGTERM
            logger.warning("%s: finishing this step, saving, stopping.", why)

    def stop_on(self, number: signal.Signals, noticed: Callable[[str], None]) -> bool:
        """Have a signal ask for a clean stop until the run is over; False off the main thread.

        `noticed` is called with its name. Unlike a SIGTERM, a second one changes nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return False

        def on_notice(number: int, frame: FrameType | None) -> None:
            if os.getpid() == self._pid:
                name = signal.Signals(number).name
                noticed(name)
                self.ask_to_stop(name)

        found = signal.signal(number, on_notice)
        self._previous.setdefault(number, found)
        return True

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked loader worker: its parent decides
            return
        if self.stop_signal is None:
            self.stop_signal = signal.Signals(number)
            logger.warning(
                "%s: finishing this step, saving, stopping. Once more stops at once.",
                self.stop_signal.name,
            )
            return
        if is_launched():
            # A scheduler signals the launcher and every rank, so that each of these hears of it
            # twice. The launcher ends them at a second request.
            return
        # A second request: the default action, now, whatever the loop is doing.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._pid:
            self._save_requested = True
            logger.warning("SIGUSR1: saving after this step.")
