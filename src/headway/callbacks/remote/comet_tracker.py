"""The run at Comet."""

from __future__ import annotations

import configparser
import hashlib
import logging
import os
import urllib.parse
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from headway.callbacks.remote import credentials
from headway.callbacks.remote.tracker import (
    OUTCOMES,
    Ending,
    RunFacts,
    Tracker,
    ask_json,
    flatten,
    text_or_none,
    texts,
)
from headway.callbacks.watch.ranges import require_flag
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

# What the package would log by itself; the trainer's figures are enough, and git or code may hold
# more than the user wants to send.
_QUIET = {
    "log_code": False,
    "log_graph": False,
    "auto_param_logging": False,
    "auto_metric_logging": False,
    "auto_output_logging": False,
    "parse_args": False,
    "log_git_metadata": False,
    "log_git_patch": False,
    "log_env_details": False,
    "display_summary_level": 0,
}


class CometNotificationSetting(StrEnum):
    """Of what Comet sends a mail: start, end and failure; the end, well or not; failures; nothing.

    A run that was cancelled or interrupted is an end, not a failure.
    """

    all = "all"
    end_only = "end_only"
    failure_only = "failure_only"
    none = "none"


class CometCallback(Tracker):
    """Logs every step's metrics, records and evaluations, and the outcome, to one experiment.

    With `offline` (or `COMET_MODE=offline`) it is a zip file in `offline_directory`, by default
    `<output_dir>/comet`, for `comet upload`. With `auto_resume` a resumed run whose `name` is the
    same goes on in its experiment; the value that came last counts there, and `resumed_from_step`
    says from where.
    """

    service = "Comet"
    package = "comet_ml"
    extra = "comet"
    key_variable = "COMET_API_KEY"
    way_without_key = "offline=true (or COMET_MODE=offline)"

    def __init__(
        self,
        enabled: bool = True,
        name: str | None = None,
        project: str | None = None,
        workspace: str | None = None,
        tags: Sequence[str] | None = None,
        config: Mapping[str, Any] | None = None,
        cancel_tags: Sequence[str] | None = None,
        cancel_check_interval: int | None = None,
        notifications: CometNotificationSetting | str = CometNotificationSetting.none,
        failure_tag: str = "failed",
        auto_resume: bool = True,
        offline: bool | None = None,
        offline_directory: str | None = None,
        queue_size: int = 1000,
        close_timeout_s: float = 60.0,
    ) -> None:
        kind = type(self).__name__
        self.project = text_or_none(kind, "project", project)
        self.workspace = text_or_none(kind, "workspace", workspace)
        self.tags = texts(kind, "tags", tags)
        if offline is not None:
            require_flag(f"{kind}.offline", offline)
        require_flag(f"{kind}.auto_resume", auto_resume)
        self.offline = offline
        self.offline_directory = text_or_none(kind, "offline_directory", offline_directory)
        self.auto_resume = auto_resume
        if not isinstance(failure_tag, str) or not failure_tag:
            raise ConfigError(f"{kind}: failure_tag must be a text, not {failure_tag!r}")
        self.failure_tag = failure_tag
        allowed = [member.value for member in CometNotificationSetting]
        if notifications not in allowed:
            raise ConfigError(f"{kind}: " + unknown("notifications", notifications, allowed))
        self.notifications = CometNotificationSetting(notifications)
        super().__init__(
            enabled=enabled,
            name=name,
            config=config,
            cancel_tags=cancel_tags,
            cancel_check_interval=cancel_check_interval,
            queue_size=queue_size,
            close_timeout_s=close_timeout_s,
        )
        self._experiment: Any = None
        self._facts_open: RunFacts | None = None
        self._continues = False
        self._exp_key: str | None = None

    @property
    def experiment(self) -> Any:
        """The Comet experiment; None before it is open."""
        return self._experiment

    @property
    def is_offline(self) -> bool:
        if self.offline is not None:
            return self.offline
        return (credentials.variable("COMET_MODE") or "").lower() == "offline"

    def needs_key(self) -> bool:
        return not self.is_offline

    def find_key(self) -> str | None:
        return super().find_key() or _key_of_login()

    def state_dict(self) -> dict[str, Any]:
        own = {"experiment_key": self._exp_key, "name": self.name}
        return self._remembered(own, is_known=self._exp_key is not None)

    # On the tracker's thread

    def open_run(self, facts: RunFacts) -> None:
        credentials.preset("COMET_DISABLE_AUTO_LOGGING", "1")
        credentials.preset("COMET_LOGGING_CONSOLE", "ERROR")
        import comet_ml

        saved = self._saved_of(facts)
        wants = bool(saved) and self.auto_resume and saved.get("name") == self.name
        own_key = _make_key(facts.run_id)
        if wants:
            self._exp_key = saved.get("experiment_key") or own_key
        else:
            self._exp_key = _make_key(f"{facts.run_id} {facts.resumed_step}") if saved else own_key
        self._facts_open = facts
        make = self._make_offline if self.is_offline else self._make_online
        self._experiment, self._continues = make(comet_ml, facts, wants)
        if not self._continues:
            self._experiment.set_name(facts.name)
            if self.tags:
                self._experiment.add_tags(self.tags)
            self._experiment.log_parameters(flatten(facts.config))
        if facts.resumed_step:
            self.mark_rewind(facts.resumed_step)
        if self.notifications is CometNotificationSetting.all:
            self._notify("started", {})

    def _options(self) -> dict[str, Any]:
        return {
            **_QUIET,
            "experiment_key": self._exp_key,
            "project_name": self.project,
            "workspace": self.workspace,
        }

    def _make_offline(self, comet_ml: Any, facts: RunFacts, wants: bool) -> tuple[Any, bool]:
        folder = Path(self.offline_directory or os.path.join(facts.output_dir, "comet"))
        folder.mkdir(parents=True, exist_ok=True)
        # A process that is killed leaves no file: then there is nothing to add to.
        continues = wants and any(folder.glob(f"{self._exp_key}*.zip"))
        kind = comet_ml.ExistingOfflineExperiment if continues else comet_ml.OfflineExperiment
        return kind(**self._options(), offline_directory=str(folder)), continues

    def _make_online(self, comet_ml: Any, facts: RunFacts, wants: bool) -> tuple[Any, bool]:
        options = {**self._options(), "api_key": self.find_key()}
        if wants:
            try:
                return comet_ml.ExistingExperiment(**options), True
            except comet_ml.exceptions.ExperimentNotFound:
                logger.warning("CometCallback: the experiment is gone; it is begun anew")
        return comet_ml.Experiment(**options), False

    def send(self, step: int, figures: dict[str, float]) -> None:
        self._experiment.log_metrics(figures, step=step)

    def mark_rewind(self, step: int) -> None:
        self._experiment.log_other("resumed_from_step", step)

    def finish_run(self, ending: Ending) -> None:
        experiment = self._experiment
        experiment.log_other("outcome", ending.label)
        if self._continues:
            self._clear_marks()
        if ending.error is not None:
            experiment.log_other("error", ending.error)
        if ending.is_failure:
            experiment.add_tag(self.failure_tag)
        elif ending.label != "completed":
            experiment.add_tag(ending.label)
        wanted = self.notifications
        if wanted in (CometNotificationSetting.all, CometNotificationSetting.end_only) or (
            ending.is_failure and wanted is CometNotificationSetting.failure_only
        ):
            self._notify(ending.label, {"error": ending.error} if ending.error else {})
        experiment.end()

    def _clear_marks(self) -> None:
        """Take back what was said of an end that was not the last one.

        The package of Comet deletes tags online alone.
        """
        self._experiment.log_other("error", "")
        given = {self.failure_tag, *OUTCOMES} - set(self.tags)
        try:
            stale = [tag for tag in self.fetch_tags() if tag in given]
            if stale:
                from comet_ml import APIExperiment

                at_server = APIExperiment(
                    api_key=self.find_key(), previous_experiment=self._exp_key
                )
                at_server.delete_tags(stale)
        except Exception as error:
            logger.warning("CometCallback: tags of an earlier end could not be deleted: %s", error)

    def _notify(self, status: str, data: dict[str, Any]) -> None:
        assert self._facts_open is not None
        if not self.is_offline:
            title = f"{self._facts_open.name}: {status}"
            self._experiment.send_notification(title, status=status, additional_data=data)

    # Tags

    def fetch_tags(self) -> Sequence[str]:
        if self._experiment is None or self.is_offline:
            return ()
        query = urllib.parse.urlencode({"experimentKey": self._exp_key})
        url = f"{_base_url()}/api/rest/v2/experiment/tags?{query}"
        return ask_json(url, {"Authorization": self.find_key() or ""}).get("tags") or ()


def _make_key(text: str) -> str:
    """A key of the form that Comet asks for, the same for the same text."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _key_of_login() -> str | None:
    """The key in the file that `comet login` writes."""
    named = credentials.variable("COMET_CONFIG")
    for path in [Path(named)] if named else [Path(".comet.config"), Path.home() / ".comet.config"]:
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(path)
        except (OSError, configparser.Error, UnicodeDecodeError):
            continue
        if parser.has_option("comet", "api_key"):
            return parser.get("comet", "api_key") or None
    return None


def _base_url() -> str:
    given = credentials.variable("COMET_URL_OVERRIDE") or "https://www.comet.com/clientlib"
    return given.rstrip("/").removesuffix("/clientlib")
