"""What all experiment trackers share: when they open, what they send, how they end.

Owns: the path from events to a service's thread, the names of figures, resume and the outcome.
Does not own: any service's API (one module each), the queue (sender.py), cancelling (cancel.py).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
import threading
import traceback
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from headway.callbacks.log.json_values import plain_value
from headway.callbacks.remote import credentials
from headway.callbacks.remote.cancel import CANCEL_TAGS, CancelWatch
from headway.callbacks.remote.sender import Sender
from headway.callbacks.watch.ranges import require_count, require_flag, require_positive
from headway.config.snapshot import redact
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, missing_extra

logger = logging.getLogger(__name__)

_LONGEST_WAIT_S = 60.0
_API_TIMEOUT_S = 5.0
OUTCOMES = ("stopped", "cancelled", "interrupted", "aborted", "failed")
"""What an ending may be called, but for one that needs no mark."""
_PREFIXES = {"eval_": "eval/", "test_": "test/"}
_COUNTERS = ("step", "global_step")


@dataclass(frozen=True)
class RunFacts:
    """What a service is told of a run when it is opened."""

    run_id: str
    name: str
    output_dir: str
    config: dict[str, Any]
    resumed_step: int | None
    """The step after which a resumed run goes on; None for a fresh one."""


@dataclass(frozen=True)
class Ending:
    """How a run ended: the outcome, the tag that cancelled it, the error that ended it."""

    outcome: str
    cancelled_by: str | None = None
    error: str | None = None

    @property
    def label(self) -> str:
        return self.outcome if self.cancelled_by is None else "cancelled"

    @property
    def is_failure(self) -> bool:
        return self.label in ("failed", "aborted")

    @property
    def is_cut_short(self) -> bool:
        """Ended from outside before it was through: neither a success nor a failure of its own."""
        return self.label in ("cancelled", "interrupted")


class Tracker(TrainerCallback, ABC):
    """Base of the trackers. A subclass says how to open a run, send figures and finish.

    All of these run on the tracker's own thread, one after the other; a service that fails or is
    away costs figures (the oldest of `queue_size` waiting ones first) and never the run.
    """

    failure_policy = "disable"
    priority = -1
    service: ClassVar[str]
    package: ClassVar[str]
    extra: ClassVar[str]
    key_variable: ClassVar[str] = ""
    """The environment variable that holds the key of the service, if it needs one."""
    way_without_key: ClassVar[str] = ""
    name: str | None = None  # type: ignore[assignment]
    """The run's name at the service. The callback goes by its class."""

    def __init__(
        self,
        *,
        enabled: bool = True,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
        cancel_tags: Sequence[str] | None = None,
        cancel_check_interval: int | None = None,
        queue_size: int = 1000,
        close_timeout_s: float = 60.0,
    ) -> None:
        kind = type(self).__name__
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(f"{kind}: config must be a mapping or None, not {config!r}")
        require_flag(f"{kind}.enabled", enabled)
        require_count(f"{kind}.queue_size", queue_size, least=1)
        require_positive(f"{kind}.close_timeout_s", close_timeout_s)
        self.enabled = enabled
        self.name = text_or_none(kind, "name", name)
        self.config = config
        self.queue_size = queue_size
        self.close_timeout_s = close_timeout_s
        self.cancel = CancelWatch(
            kind, CANCEL_TAGS if cancel_tags is None else cancel_tags, cancel_check_interval
        )
        self.finalized = False
        self._sender = Sender(kind, queue_size)
        self._closing = threading.Event()
        self._is_open = self._connected = False
        self._resumed_state: dict[str, Any] = {}
        self._error: str | None = None
        self._sent: tuple[int, set[str]] = (-1, set())
        if enabled and importlib.util.find_spec(self.package) is None:
            raise missing_extra(self.package, self.extra, kind)

    @property
    def callback_name(self) -> str:
        return type(self).__name__

    # What a service does; on the tracker's thread

    def check_access(self) -> None:
        """Raise a ConfigError when the service cannot be used as configured. On the main thread."""
        if self.needs_key() and self.find_key() is None:
            raise ConfigError(
                f"{type(self).__name__}: no API key was found; set the environment variable "
                f"{self.key_variable}, or keep the run on this machine with {self.way_without_key}"
            )

    def needs_key(self) -> bool:
        """Whether the service, used as configured, asks for a key."""
        return False

    def find_key(self) -> str | None:
        """The key of the service, where its own package would look for it."""
        return credentials.variable(self.key_variable)

    @abstractmethod
    def open_run(self, facts: RunFacts) -> None:
        """Begin the run at the service, or go on with it."""

    @abstractmethod
    def send(self, step: int, figures: dict[str, float]) -> None:
        """Deliver figures of a step."""

    @abstractmethod
    def mark_rewind(self, step: int) -> None:
        """Tell the service that a run it has open went back to `step`."""

    @abstractmethod
    def finish_run(self, ending: Ending) -> None:
        """End the run at the service."""

    def fetch_tags(self) -> Sequence[str]:
        """The tags that the run has now at the service. On a thread of its own."""
        return ()

    # The run

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self.enabled and state.is_world_process_zero:
            self.check_access()

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any
    ) -> None:
        if not self.enabled or not state.is_world_process_zero:
            return
        if self._sender.is_closed:  # the same trainer trains again
            self._sender = Sender(type(self).__name__, self.queue_size)
            self._closing.clear()
        self.finalized, self._error, self._sent = False, None, (-1, set())
        facts = self._facts(args, state, model)
        self._is_open, self._connected = True, False
        self._sender.submit(lambda: self._connect(facts), must_arrive=True)
        self.cancel.start(self.fetch_tags)

    def on_load(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._is_open:
            step = state.global_step
            self._sent = (-1, set())
            self._post(lambda: self.mark_rewind(step), must_arrive=True)

    def on_metrics(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        step: int,
        metrics: dict[str, float],
    ) -> None:
        self._submit(step, dict(metrics))

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        self._submit(state.global_step, rename(logs))

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, metrics: dict[str, Any]
    ) -> None:
        self._submit(state.global_step, rename(metrics))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._is_open and self.cancel.asks_to_stop(state.global_step):
            control.should_training_stop = True

    def on_error(
        self, args: Any, state: TrainerState, control: TrainerControl, exception: BaseException
    ) -> None:
        lines = traceback.format_exception_only(exception)
        self._error = "".join(lines).strip()

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if not self._is_open:
            return
        self._is_open = False
        cancelled_by = self.cancel.found if state.outcome == "stopped" else None
        self.cancel.close()
        ending = Ending(state.outcome or "failed", cancelled_by, self._error)
        self._post(lambda: self.finish_run(ending), must_arrive=True)
        self._closing.set()
        self.wait_at_close(self._end, self.close_timeout_s)

    def _end(self, within_s: float) -> None:
        self._sender.close(within_s)
        self.finalized = True

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resumed_state = dict(state)

    def _saved_of(self, facts: RunFacts) -> dict[str, Any]:
        """What the checkpoint that a run goes on from says of it; nothing for a fresh run."""
        return self._resumed_state if facts.resumed_step else {}

    def _remembered(self, own: dict[str, Any], *, is_known: bool) -> dict[str, Any]:
        """What a checkpoint holds: `own` if known, else what the last checkpoint held of it.

        A run may be saved before its service has answered; the next resume must find it again.
        """
        if not is_known:
            own = {key: self._resumed_state.get(key, value) for key, value in own.items()}
        return {"version": 1, **own}

    # Between the threads

    def _facts(self, args: Any, state: TrainerState, model: Any) -> RunFacts:
        settings = plain_value(args.to_dict())
        model_config = getattr(getattr(model, "config", None), "to_dict", None)
        if callable(model_config):
            settings["model"] = plain_value(model_config())
        settings.update(plain_value(self.config or {}))
        return RunFacts(
            run_id=str(state.run_id),
            name=self.name or args.run_name or Path(args.output_dir).resolve().name,
            output_dir=str(args.output_dir),
            config=redact(settings),
            resumed_step=state.global_step or None,
        )

    def _connect(self, facts: RunFacts) -> None:
        """Open the run; again after a while as long as the service is away."""
        wait_s = 1.0
        while True:
            try:
                self.open_run(facts)
                self._connected = True
                return
            except Exception as error:
                if self._closing.is_set():
                    raise
                logger.warning(
                    "%s: the run could not be opened, training goes on and it is tried again: "
                    "%s: %s",
                    type(self).__name__,
                    type(error).__name__,
                    error,
                )
                _forget_half_import(self.package)
                self._closing.wait(wait_s)
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    def _submit(self, step: int, record: Mapping[str, Any]) -> None:
        if not self._is_open:
            return
        at, names = self._sent
        if at != step:
            at, names = self._sent = (step, set())
        # Evaluations come as a record of the log and as an event: one of them is enough.
        figures = {name: n for name, n in numbers(record).items() if name not in names}
        if figures:
            names.update(figures)
            self._post(lambda: self.send(step, figures))

    def _post(self, call: Callable[[], None], *, must_arrive: bool = False) -> None:
        def run() -> None:
            if not self._connected:
                raise ConnectionError("the run was never opened")
            call()

        self._sender.submit(run, must_arrive=must_arrive)


def _forget_half_import(package: str) -> None:
    """An import that failed leaves parts of a package, with which the next one would fail too.

    Python 3.11 fails one now and then while another thread compiles something.
    """
    if package not in sys.modules:
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            sys.modules.pop(name, None)


def ask_json(url: str, headers: Mapping[str, str], body: Any = None) -> Any:
    """What a service answers; for a look at its API that must not take long."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, dict(headers))
    with urllib.request.urlopen(request, timeout=_API_TIMEOUT_S) as answer:
        return json.load(answer)


def rename(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record of the log under the names that trackers group by: train/, eval/, test/."""
    renamed = {}
    for name, value in record.items():
        if name in _COUNTERS:
            continue
        for prefix, group in _PREFIXES.items():
            if name.startswith(prefix):
                renamed[group + name.removeprefix(prefix)] = value
                break
        else:
            renamed[name if "/" in name else f"train/{name}"] = value
    return renamed


def numbers(record: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a record that are numbers; those of a list are numbered."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list | tuple):
            found.update(numbers({f"{name}/{index}": item for index, item in enumerate(value)}))
        elif value is not None and not isinstance(value, str | Mapping):
            try:
                found[name] = float(value)
            except (TypeError, ValueError):
                continue
    return found


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, with dotted names."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def text_or_none(kind: str, parameter: str, value: Any) -> str | None:
    """A parameter that is a text or absent."""
    if value is None or (isinstance(value, str) and value):
        return value
    raise ConfigError(f"{kind}: {parameter} must be a text that is not empty, or None: {value!r}")


def texts(kind: str, parameter: str, value: Any) -> list[str]:
    """A parameter that is a list of texts; None is an empty one."""
    if value is None:
        return []
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ConfigError(f"{kind}: {parameter} must be a list of texts, not {value!r}")
    for item in value:
        if not isinstance(item, str) or not item:
            raise ConfigError(f"{kind}: {parameter} must hold texts only, not {item!r}")
    return list(value)
