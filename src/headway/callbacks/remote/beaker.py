"""The state of a run in the description of its Beaker job.

Owns: what the description says and when it is written, the files in the job's results. Does not
own: Beaker's API (the package beaker-py), the thread (sender.py).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.callbacks.log.json_values import plain_value
from headway.callbacks.remote.credentials import variable
from headway.callbacks.remote.sender import Sender
from headway.callbacks.remote.tracker import Tracker
from headway.callbacks.watch.ranges import require_count, require_flag, require_positive
from headway.config.snapshot import redact, write_json
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, missing_extra

logger = logging.getLogger(__name__)

_LEAST_GAP_S = 10.0
_FOLDER = "olmo-core"
_SPEEDS = {
    "tok_per_sec": "tokens/s",
    "throughput/device/TPS": "TPS",
    "throughput/device/BPS": "BPS",
}
# To percent: the one is a share, the other is percent already.
_SHARES = {"mfu": 100.0, "throughput/device/MFU": 1.0}
_MOST_CHARACTERS = 300
clock: Callable[[], float] = time.monotonic


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

    step: int
    max_steps: int
    tokens: int
    eta_s: float | None
    speeds: Mapping[str, float]
    mfu: float | None


class BeakerCallback(TrainerCallback):
    """Writes percent, step, tokens, time left and speed into the description of a Beaker job.

    At most every 10 seconds, every `update_interval` steps (None: `metrics_collect_interval`), and
    at the end with the outcome. `enabled=None`: in a batch job of Beaker, and nowhere else.
    `experiment_id` is the variable `BEAKER_EXPERIMENT_ID` unless given. `description` stands before
    all that.
    `config` (None: the run's arguments) and the installed packages are written to `result_dir`.
    `client` is a `beaker.Beaker`, made from the environment unless given.
    """

    failure_policy = "disable"
    priority = -1

    def __init__(
        self,
        experiment_id: str | None = None,
        update_interval: int | None = None,
        description: str | None = None,
        enabled: bool | None = None,
        config: Mapping[str, Any] | None = None,
        result_dir: str | os.PathLike[str] = "/results",
        *,
        client: Any = None,
        close_timeout_s: float = 10.0,
    ) -> None:
        require_count("update_interval", update_interval, least=1, optional=True)
        require_positive("close_timeout_s", close_timeout_s)
        if enabled is not None:
            require_flag("enabled", enabled)
        for option, text in (("experiment_id", experiment_id), ("description", description)):
            if text is not None and (not isinstance(text, str) or not text):
                raise ConfigError(f"{option}: {text!r} given; allowed: text, or none")
        if config is not None and not isinstance(config, Mapping):
            raise ConfigError(f"config: {config!r} given; allowed: a mapping, or none")
        if not isinstance(result_dir, str | os.PathLike) or not str(result_dir):
            raise ConfigError(f"result_dir: {result_dir!r} given; allowed: the path of a folder")
        self.enabled = in_batch_job() if enabled is None else enabled
        self.experiment_id = experiment_id or variable("BEAKER_EXPERIMENT_ID")
        if self.enabled and self.experiment_id is None:
            raise ConfigError(
                "BeakerCallback: no experiment; give experiment_id or set the environment "
                "variable BEAKER_EXPERIMENT_ID"
            )
        if self.enabled and client is None and importlib.util.find_spec("beaker") is None:
            raise missing_extra("beaker", "beaker", "BeakerCallback")
        self.update_interval, self.description = update_interval, description
        self.config, self.result_dir = config, Path(result_dir)
        self.close_timeout_s = close_timeout_s
        self._client, self._workload = client, None
        self._owns_client = client is None
        self._sender: Sender | None = None
        self._last_update: float | None = None
        self._figures: dict[str, float] = {}
        self._error: str | None = None
        self._trackers: list[Any] = []
        self._began = (0.0, 0)

    @property
    def url(self) -> str | None:
        """Where Beaker shows the experiment."""
        if self.experiment_id is None:
            return None
        address = variable("BEAKER_ADDR") or "https://beaker.org"
        return f"{address.rstrip('/')}/ex/{self.experiment_id}"

    # The run

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if not self.enabled or not state.is_world_process_zero:
            return
        self._trackers = [cb for cb in trainer.callbacks.values() if isinstance(cb, Tracker)]
        place = {"beaker_experiment_url": self.url, "beaker_experiment_id": self.experiment_id}
        for tracker in self._trackers:
            tracker.config = {**place, **(tracker.config or {})}

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if not self.enabled or not state.is_world_process_zero:
            return
        self._sender = Sender("BeakerCallback", capacity=10)
        self._last_update, self._error, self._figures = None, None, {}
        self._began = (clock(), state.global_step)
        config = redact(plain_value(dict(self.config or args.to_dict())))
        self._sender.submit(lambda: self._write_files(config), must_arrive=True)
        self._update(state)

    def on_log(
        self, args: Any, state: TrainerState, control: TrainerControl, logs: dict[str, Any]
    ) -> None:
        self._keep(logs)

    def on_metrics(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
    ) -> None:
        self._keep(metrics)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self._sender is None:
            return
        interval = self.update_interval or args.metrics_collect_interval
        due = self._last_update is None or clock() - self._last_update >= _LEAST_GAP_S
        if due and state.global_step % interval == 0:
            self._update(state)

    def on_error(
        self, args: Any, state: TrainerState, control: TrainerControl, exception: BaseException
    ) -> None:
        text = f"{type(exception).__name__}: {exception}".strip().partition("\n")[0]
        self._error = text[:_MOST_CHARACTERS]

    def on_close(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        if self.enabled and state.is_world_process_zero and self._sender is None and self._error:
            self._sender = Sender("BeakerCallback", capacity=10)  # it failed before it began
        sender = self._sender
        if sender is None:
            return
        self._update(state)
        self._sender = None
        sender.submit(self._release, must_arrive=True)
        self.wait_at_close(sender.close, self.close_timeout_s)

    # What is said

    def _keep(self, figures: Mapping[str, Any]) -> None:
        for name in (*_SPEEDS, *_SHARES):
            if isinstance(figures.get(name), int | float):
                self._figures[name] = float(figures[name])

    def _update(self, state: TrainerState) -> None:
        assert self._sender is not None
        self._last_update = clock()
        progress = self._progress(state)
        outcome, error = state.outcome, self._error
        must_arrive = outcome is not None
        self._sender.submit(
            lambda: self._send(self._describe(progress, outcome, error)), must_arrive=must_arrive
        )

    def _progress(self, state: TrainerState) -> Progress:
        began_s, first_step = self._began
        done, left = state.global_step - first_step, state.max_steps - state.global_step
        eta_s = (clock() - began_s) / done * left if done > 0 and left >= 0 else None
        known = self._figures
        mfu = next((known[name] * scale for name, scale in _SHARES.items() if name in known), None)
        speeds = {label: known[name] for name, label in _SPEEDS.items() if name in known}
        return Progress(
            state.global_step, state.max_steps, state.num_input_tokens_seen, eta_s, speeds, mfu
        )

    def _describe(self, progress: Progress, outcome: str | None, error: str | None) -> str:
        parts = []
        if progress.max_steps > 0:
            percent = 100 * progress.step / progress.max_steps
            parts.append(f"[{percent:.1f}%] step {progress.step:,} of {progress.max_steps:,}")
        else:
            parts.append(f"step {progress.step:,}")
        parts.append(f"{progress.tokens:,} tokens")
        if outcome is not None:
            parts.insert(0, outcome if error is None else f"{outcome} ({error})")
        elif progress.eta_s is not None:
            parts.append(f"ETA {_spell(progress.eta_s)}")
        parts += [f"{value:,.0f} {name}" for name, value in list(progress.speeds.items())[:1]]
        if progress.mfu is not None:
            parts.append(f"{progress.mfu:.1f}% MFU")
        urls = [url for tracker in self._trackers if (url := _url_of(tracker)) is not None]
        text = ", ".join(parts)
        return "\n".join([*([self.description] if self.description else []), text, *urls])

    # On the sender's thread

    def _send(self, text: str) -> None:
        if self._client is None:
            from beaker import Beaker

            self._client = Beaker.from_env(check_for_upgrades=False)
        if self._workload is None:
            self._workload = self._client.workload.get(self.experiment_id)
        self._client.workload.update(self._workload, description=text)

    def _release(self) -> None:
        client, self._workload = self._client, None
        if self._owns_client and client is not None:
            self._client = None
            client.close()

    def _write_files(self, config: dict[str, Any]) -> None:
        folder = self.result_dir / _FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        (self.result_dir / "requirements.txt").write_text(_requirements(), encoding="utf-8")


def in_batch_job() -> bool:
    """Whether this process is part of a batch job of Beaker."""
    named = variable("BEAKER_JOB_ID") is not None and variable("BEAKER_NODE_ID") is not None
    return named and variable("BEAKER_JOB_KIND") == "batch"


def _requirements() -> str:
    """The version of Python and of every installed package."""
    found = {
        str(package.metadata["Name"]): package.version
        for package in importlib.metadata.distributions()
    }
    lines = [f"{name}=={found[name]}" for name in sorted(found, key=str.lower)]
    return "\n".join([f"# python=={platform.python_version()}", *lines]) + "\n"


def _spell(seconds: float) -> str:
    minutes, hours = int(seconds // 60) % 60, int(seconds // 3600)
    return f"{hours // 24}d {hours % 24}h" if hours >= 48 else f"{hours}:{minutes:02d} h"


def _url_of(tracker: Any) -> str | None:
    """Where a tracker shows the run, if it says so by now."""
    for holder in (tracker, getattr(tracker, "run", None)):
        url = getattr(holder, "url", None)
        if isinstance(url, str) and url:
            return url
    return None
