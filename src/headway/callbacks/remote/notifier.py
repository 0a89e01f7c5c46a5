"""What all notifiers share: which moments of a run are told, and what is said of them.

Owns: the path from events to a message on the sender's thread, the address, who speaks when a rank
fails, and the end of a run with its outcome. Does not own: the form of a message (slack.py,
webhook.py), attempts (http_post.py), the queue (sender.py).
"""

from __future__ import annotations

import os
import socket
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from headway.callbacks.log.json_values import plain_value
from headway.callbacks.remote.credentials import variable
from headway.callbacks.remote.http_post import Make, check_url, post
from headway.callbacks.remote.sender import Sender
from headway.callbacks.watch.ranges import require_count, require_flag, require_positive
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

MOMENTS = ("start", "log", "evaluate", "save", "epoch", "end", "failure")
"""`end` is an end of any kind but a failure."""
FAILURES = ("failed", "aborted")
_MOST_LINES = 30


@dataclass(frozen=True)
class Report:
    """A moment of a run."""

    moment: str
    run_name: str
    run_id: str | None
    step: int
    max_steps: int
    epoch: float
    tokens: int
    loss: float | None
    outcome: str | None
    error: str | None = None
    trace: tuple[str, ...] = ()
    """The last lines of the traceback."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    host: str = field(default_factory=socket.gethostname)
    time_s: float = field(default_factory=time.time)


class Notifier(TrainerCallback, ABC):
    """Base of callbacks that tell somebody of a run.

    Only world rank 0 speaks; if that is lost, rank 1 does. Nothing is waited for but the last
    message, `close_timeout_s` at most, and a message that does not arrive is a warning.
    """

    failure_policy = "disable"
    priority = -1
    url_option: ClassVar[str] = "url"
    url_variable: ClassVar[str]
    """The environment variable that names the address if the option does not."""
    name: str | None = None  # type: ignore[assignment]
    """The run's name in messages. The callback goes by its class."""

    def __init__(
        self,
        *,
        url: str | None,
        name: str | None,
        enabled: bool,
        timeout_s: float,
        max_retries: int,
        queue_size: int,
        close_timeout_s: float,
    ) -> None:
        if name is not None and (not isinstance(name, str) or not name):
            raise ConfigError(f"name: {name!r} given; allowed: text that is not empty, or none")
        require_flag("enabled", enabled)
        require_positive("timeout_s", timeout_s)
        require_count("max_retries", max_retries)
        require_count("queue_size", queue_size, least=1)
        require_positive("close_timeout_s", close_timeout_s)
        self._url = None if url is None else check_url(type(self).__name__, self.url_option, url)
        self.name, self.enabled = name, enabled
        self.timeout_s, self.max_retries = timeout_s, max_retries
        self.queue_size, self.close_timeout_s = queue_size, close_timeout_s
        self._sender: Sender | None = None
        self._closing = threading.Event()
        self._loss: float | None = None
        self._error: BaseException | None = None
        self._is_running = False

    @property
    def callback_name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def wants(self, moment: str) -> bool:
        """Whether a moment (of `MOMENTS`) is to be told."""

    @abstractmethod
    def compose(self, report: Report) -> Make:
        """What makes the body and headers of a message, anew for each attempt."""

    def find_address(self) -> str:
        """Where messages go; a ConfigError when that is not known."""
        if self._url is not None:
            return self._url
        kind, url = type(self).__name__, variable(self.url_variable)
        if url is None:
            raise ConfigError(
                f"{kind}: no address; give {self.url_option}, set the environment variable "
                f"{self.url_variable}, or switch it off by enabled: false"
            )
        return check_url(kind, self.url_variable, url)

    def deliver(self, report: Report, address: str, closing: threading.Event) -> None:
        """Send a message. On the sender's thread."""
        post(
            address,
            self.compose(report),
            timeout_s=self.timeout_s,
            max_retries=self.max_retries,
            closing=closing,
        )

    # The run

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self.enabled and state.is_world_process_zero and any(map(self.wants, MOMENTS)):
            self.find_address()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._is_running, self._error, self._loss = True, None, None
        self._tell("start", args, state)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        if isinstance(logs.get("loss"), int | float):
            self._loss = float(logs["loss"])
        self._tell("log", args, state, figures=logs)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict[str, Any]
    ) -> None:
        if self._is_running:
            self._tell("evaluate", args, state, figures=metrics)

    def on_save(
        self, args: Any, state: TrainerState, control: TrainerControl, checkpoint_path: Any
    ) -> None:
        self._tell("save", args, state, checkpoint=str(checkpoint_path))

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._tell("epoch", args, state)

    def on_error(
        self, args: Any, state: TrainerState, control: TrainerControl, exception: BaseException
    ) -> None:
        self._error = exception

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        error, self._error = self._error, None
        # What still waits to be sent has no time for more attempts; how the run ended has.
        self._closing.set()
        self._closing = ending = threading.Event()
        if self._is_running or error is not None:
            self._is_running = False
            failed = state.outcome in FAILURES
            self._tell("failure" if failed else "end", args, state, error=error)
        sender, self._sender = self._sender, None
        if sender is None:
            return

        def wait(timeout_s: float) -> None:
            sender.close(timeout_s)
            ending.set()

        self.wait_at_close(wait, self.close_timeout_s)

    # Messages

    def _tell(
        self,
        moment: str,
        args: Any,
        state: TrainerState,
        *,
        figures: Mapping[str, Any] | None = None,
        checkpoint: str | None = None,
        error: BaseException | None = None,
    ) -> None:
        if not self.enabled or not self.wants(moment) or not _speaks(state, args, error):
            return
        try:
            address = self.find_address()
        except ConfigError:
            return  # which ends the run before its first step, and is told there
        told, trace = (None, ()) if error is None else _explain(error)
        report = Report(
            moment=moment,
            run_name=self.name or args.run_name or Path(args.output_dir).resolve().name,
            run_id=state.run_id,
            step=state.global_step,
            max_steps=state.max_steps,
            epoch=state.epoch,
            tokens=state.num_input_tokens_seen,
            loss=self._loss,
            outcome=state.outcome,
            error=told,
            trace=trace,
            figures=plain_value(dict(figures or {})),
            checkpoint=checkpoint,
        )
        if self._sender is None:
            self._sender = Sender(type(self).__name__, self.queue_size)
        closing = self._closing
        # Figures are many, and later ones make up for earlier ones; how a run ended is told once.
        must_arrive = moment not in ("log", "evaluate")
        self._sender.submit(lambda: self.deliver(report, address, closing), must_arrive=must_arrive)


def _speaks(state: TrainerState, args: Any, error: BaseException | None) -> bool:
    """Whether this rank tells of something: the first one, or the second where that is gone."""
    if state.is_world_process_zero:
        return True
    is_first_lost = getattr(error, "rank", None) == 0 and getattr(error, "kind", "") == "lost"
    return is_first_lost and args.process_index == 1


def _explain(error: BaseException) -> tuple[str, tuple[str, ...]]:
    """An error in one line, and the end of its traceback."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    first = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    return first, tuple(lines[-_MOST_LINES:])


def beaker_link() -> str | None:
    """Where the job is shown if Beaker runs it."""
    job, address = os.environ.get("BEAKER_JOB_ID"), os.environ.get("BEAKER_ADDR")
    return f"{(address or 'https://beaker.org').rstrip('/')}/job/{job}" if job else None
