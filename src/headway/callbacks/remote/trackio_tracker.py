"""The run at Trackio: on this machine, in a Hugging Face Space, or on a server of one's own."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Mapping
from typing import Any

from headway.callbacks.remote import credentials
from headway.callbacks.remote.tracker import Ending, RunFacts, Tracker, text_or_none

logger = logging.getLogger(__name__)

RESUMED = "headway/resumed_from_step"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class TrackioCallback(Tracker):
    """Logs every step's metrics, records and evaluations to one Trackio run.

    Without `space_id` and `server_url` (and without `TRACKIO_SPACE_ID`, `TRACKIO_SERVER_URL`) it is
    a database on this machine, in `TRACKIO_DIR`. A resumed run goes on under its name; of a
    repeated step the row that came last counts, and `headway/resumed_from_step` marks the place.
    Trackio has no tags, so a run cannot be cancelled there.
    """

    service = "Trackio"
    package = "trackio"
    extra = "trackio"
    key_variable = "HF_TOKEN"
    way_without_key = "space_id=None and no TRACKIO_SPACE_ID"

    def __init__(
        self,
        enabled: bool = True,
        name: str | None = None,
        project: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
        server_url: str | None = None,
        config: Mapping[str, Any] | None = None,
        queue_size: int = 1000,
        close_timeout_s: float = 60.0,
    ) -> None:
        kind = type(self).__name__
        self.project = text_or_none(kind, "project", project)
        self.group = text_or_none(kind, "group", group)
        self.space_id = text_or_none(kind, "space_id", space_id)
        self.server_url = text_or_none(kind, "server_url", server_url)
        super().__init__(
            enabled=enabled,
            name=name,
            config=config,
            cancel_tags=(),
            queue_size=queue_size,
            close_timeout_s=close_timeout_s,
        )
        self._run: Any = None
        self._run_name: str | None = None

    @property
    def run(self) -> Any:
        """The Trackio run; None before it is open."""
        return self._run

    def needs_key(self) -> bool:
        return (self.space_id or credentials.variable("TRACKIO_SPACE_ID")) is not None

    def find_key(self) -> str | None:
        return _hub_token()

    def state_dict(self) -> dict[str, Any]:
        own = {"run_name": self._run_name, "project": self.project}
        return self._remembered(own, is_known=self._run_name is not None)

    # On the tracker's thread

    def open_run(self, facts: RunFacts) -> None:
        import trackio

        _quieten_package()
        saved = self._saved_of(facts)
        # Trackio finds a run again by its name alone.
        self._run_name = saved.get("run_name") or f"{facts.name}-{facts.run_id[:6]}"
        self._run = trackio.init(
            project=self.project or credentials.variable("TRACKIO_PROJECT") or "headway",
            name=self._run_name,
            group=self.group,
            space_id=self.space_id,
            server_url=self.server_url,
            config=facts.config,
            resume="allow" if facts.resumed_step else "never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        if facts.resumed_step:
            self.mark_rewind(facts.resumed_step)

    def send(self, step: int, figures: dict[str, float]) -> None:
        self._run.log(figures, step=step)

    def mark_rewind(self, step: int) -> None:
        self._run.log({RESUMED: step}, step=step)

    def finish_run(self, ending: Ending) -> None:
        from trackio import AlertLevel

        # Trackio keeps no status of a run; an alert is what its dashboard shows beside the curves.
        level = AlertLevel.ERROR if ending.is_failure else AlertLevel.INFO
        self._run.alert(f"run {ending.label}", ending.error, level=level)
        self._run.finish()


def _hub_token() -> str | None:
    from huggingface_hub import get_token

    return get_token()


def _quieten_package() -> None:
    """What Trackio prints goes to the log: stdout is the user's, and Trackio has no such option."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "trackio":
            vars(module).setdefault("print", _print)


def _print(*words: object, **options: Any) -> None:
    """Takes the place of `print` in the package's modules; the main thread prints as ever."""
    if threading.current_thread() is threading.main_thread():
        print(*words, **options)
    else:
        logger.info("%s", _COLOURS.sub("", " ".join(map(str, words))).strip("* "))
