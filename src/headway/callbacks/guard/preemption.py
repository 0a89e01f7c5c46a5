"""Saves and stops when the machine is about to be taken away.

Owns: which signals, files and servers announce it, and asking them while a run goes on. Does not
own: stopping. A notice counts as a SIGTERM (engine/signals.py): on whatever rank it comes, all
ranks stop after the same step, save, and end with its exit code.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from headway.callbacks.guard.notices import (
    CLOUDS,
    NoticeFile,
    NoticeURL,
    Source,
    cloud_source,
)
from headway.callbacks.remote.http_post import check_url
from headway.callbacks.watch.ranges import require_name, require_positive
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerState
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

_KIND = "PreemptionCallback"
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGXCPU")


class PreemptionCallback(TrainerCallback):
    """Watches for the notice that this machine goes away.

    `signals`: names of signals that are such a notice; none given: SIGUSR2, and in a job of Slurm
    (SLURM_JOB_ID) SIGUSR1, which elsewhere asks for a save only. SIGTERM always is one. `file`: a
    path that appears or is written anew. `cloud`: `aws`, `azure` or `gce`, whose server of metadata
    is asked, on each machine by one process; or `metadata_url`, with `metadata_headers`: a notice
    is an answer 200 in which `metadata_pattern`, a regular expression, is found. Files and servers
    are looked at every `poll_interval_s` by a thread of their own.
    """

    def __init__(
        self,
        signals: Sequence[str] | None = None,
        *,
        file: str | None = None,
        cloud: str | None = None,
        metadata_url: str | None = None,
        metadata_headers: Mapping[str, str] | None = None,
        metadata_pattern: str | None = None,
        poll_interval_s: float = 5.0,
    ) -> None:
        self.signals = _check_signals(signals)
        if file is not None:
            require_name(f"{_KIND}: file", file)
        if cloud is not None and cloud not in CLOUDS:
            raise ConfigError(f"{_KIND}: " + unknown("cloud", str(cloud), CLOUDS))
        if cloud is not None and metadata_url is not None:
            raise ConfigError(f"{_KIND}: cloud and metadata_url: both given; allowed: one of them")
        require_positive(f"{_KIND}: poll_interval_s", poll_interval_s)
        self.file, self.cloud, self.poll_interval_s = file, cloud, poll_interval_s
        self._server = _make_server(cloud, metadata_url, metadata_headers, metadata_pattern)
        self.notice: str | None = None
        """What this rank has noticed, in words."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._told_trouble = False

    def on_train_begin(self, state: TrainerState, trainer: Any) -> None:
        self.notice, self._told_trouble = None, False
        for name in self.signals:
            trainer.stop_on(signal.Signals[name], lambda name: self._note(name, state))
        if not trainer.saves_at_end and state.is_world_process_zero:
            logger.warning("PreemptionCallback: save_strategy='no', so it will stop without a save")
        sources: list[Source] = []
        if self.file is not None:
            try:
                watched = NoticeFile(self.file)
            except OSError as error:
                raise ConfigError(
                    f"{_KIND}: file: {self.file!r} given; it cannot be looked at ({error.strerror})"
                ) from None
            if watched.was_there and state.is_world_process_zero:
                logger.warning(
                    "PreemptionCallback: %s is there already; it counts once it is written anew",
                    self.file,
                )
            sources.append(watched)
        if self._server is not None and state.is_local_process_zero:
            sources.append(self._server)
        if sources:
            self._over.clear()
            self._thread = threading.Thread(
                target=self._watch,
                args=(sources, state, trainer),
                name="headway-preemption",
                daemon=True,
            )
            self._thread.start()

    def on_close(self) -> None:
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            self.wait_at_close(thread.join, 5.0)

    def _watch(self, sources: list[Source], state: TrainerState, trainer: Any) -> None:
        while not self._over.is_set():
            for source in sources:
                notice = self._look(source)
                if notice is not None and not self._over.is_set():
                    self._note(notice, state)
                    trainer.ask_to_stop(f"preemption: {notice}")
                    return
            self._over.wait(self.poll_interval_s)

    def _look(self, source: Source) -> str | None:
        try:
            return source.look()
        except Exception as error:  # whatever a server answers, the thread must live to ask again
            if not self._told_trouble:
                self._told_trouble = True
                logger.warning(
                    "PreemptionCallback: nobody can tell whether there is a notice (%s: %s); "
                    "asking on",
                    type(error).__name__,
                    error,
                )
            return None

    def _note(self, notice: str, state: TrainerState) -> None:
        if self.notice is None:
            self.notice = notice
            if not state.is_world_process_zero:
                # Warnings of such a rank are not shown, and no other rank knows why it stops.
                logger.error("a notice of preemption came to another rank than 0: %s", notice)


def _check_signals(given: Sequence[str] | None) -> list[str]:
    if given is None:
        given = ["SIGUSR2", *(["SIGUSR1"] if os.environ.get("SLURM_JOB_ID") else [])]
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise ConfigError(
            f"{_KIND}: signals: {given!r} given; allowed: a list of {', '.join(SIGNALS)}"
        )
    for name in given:
        if name not in SIGNALS:
            raise ConfigError(f"{_KIND}: signals: " + unknown("signal", str(name), SIGNALS))
    # A second SIGTERM ends a run at once, which stays as it is.
    return [name for name in dict.fromkeys(given) if name != "SIGTERM"]


def _make_server(
    cloud: str | None,
    url: str | None,
    headers: Mapping[str, str] | None,
    pattern: str | None,
) -> Source | None:
    if url is None:
        for option, value in (("metadata_headers", headers), ("metadata_pattern", pattern)):
            if value is not None:
                raise ConfigError(
                    f"{_KIND}: {option}: {value!r} given; allowed: only with metadata_url"
                )
        return None if cloud is None else cloud_source(cloud)
    if headers is not None and not (
        isinstance(headers, Mapping)
        and all(isinstance(text, str) for pair in headers.items() for text in pair)
    ):
        raise ConfigError(
            f"{_KIND}: metadata_headers: {headers!r} given; allowed: names with texts"
        )
    import re

    try:
        re.compile(pattern or "")
    except (re.error, TypeError) as error:
        raise ConfigError(
            f"{_KIND}: metadata_pattern: {pattern!r} given; allowed: a regular expression ({error})"
        ) from None
    return NoticeURL(check_url(_KIND, "metadata_url", url), headers, pattern)
