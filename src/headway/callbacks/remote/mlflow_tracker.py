"""The run at MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headway.callbacks.remote import credentials
from headway.callbacks.remote.tracker import Ending, RunFacts, Tracker, flatten, text_or_none
from headway.errors import ConfigError

_RUN_ID_TAG = "headway.run_id"
_ERROR_TAG = "headway.error"
_LONGEST_VALUE = 500
_PARAMS_A_CALL = 100
_METRICS_A_CALL = 1000
_FALSE = ("", "0", "false", "no")


class MLflowCallback(Tracker):
    """Logs every step's metrics, records and evaluations, parameters and the outcome to one run.

    `tracking_uri` is a server, a database (`sqlite:///...`, needs the package sqlalchemy) or a
    folder; None takes `MLFLOW_TRACKING_URI`, else the folder `<output_dir>/mlruns`: nothing leaves
    the machine. A resumed run goes on in its MLflow run; MLflow drops no values, so of a repeated
    step the value that came last counts, and the tag `headway.resumed_from_step` marks the place.
    """

    service = "MLflow"
    package = "mlflow"
    extra = "mlflow"

    def __init__(
        self,
        enabled: bool = True,
        name: str | None = None,
        experiment: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        cancel_tags: Sequence[str] | None = None,
        cancel_check_interval: int | None = None,
        queue_size: int = 1000,
        close_timeout_s: float = 60.0,
    ) -> None:
        kind = type(self).__name__
        self.experiment = text_or_none(kind, "experiment", experiment)
        self.tracking_uri = text_or_none(kind, "tracking_uri", tracking_uri)
        if tags is not None and not isinstance(tags, Mapping):
            raise ConfigError(f"{kind}: tags must map names to texts, not {tags!r}")
        self.tags = {str(tag): str(value) for tag, value in (tags or {}).items()}
        super().__init__(
            enabled=enabled,
            name=name,
            config=config,
            cancel_tags=cancel_tags,
            cancel_check_interval=cancel_check_interval,
            queue_size=queue_size,
            close_timeout_s=close_timeout_s,
        )
        self._client: Any = None
        self._run_id: str | None = None

    @property
    def run_id(self) -> str | None:
        """The id that MLflow gave the run; None before it is open."""
        return self._run_id

    def state_dict(self) -> dict[str, Any]:
        return self._remembered({"run_id": self._run_id}, is_known=self._run_id is not None)

    # On the tracker's thread

    def open_run(self, facts: RunFacts) -> None:
        credentials.preset("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.tracking import MlflowClient

        uri = self.tracking_uri or credentials.variable("MLFLOW_TRACKING_URI")
        if uri is None:
            uri = (Path(facts.output_dir).resolve() / "mlruns").as_uri()
        elif "://" not in uri and uri not in ("databricks", "databricks-uc"):
            uri = Path(uri).resolve().as_uri()
        self._client = client = MlflowClient(tracking_uri=uri)
        experiment_id = _experiment_id(client, self._experiment_name())
        found = self._find_run(client, experiment_id, facts) if facts.resumed_step else None
        if found is None:
            tags = {**self.tags, _RUN_ID_TAG: facts.run_id}
            run = client.create_run(experiment_id, tags=tags, run_name=facts.name)
            self._run_id = run.info.run_id
            self._log_params(facts.config)
        else:
            self._run_id = found
            client.update_run(found, status="RUNNING")
        if facts.resumed_step:
            self.mark_rewind(facts.resumed_step)

    def _experiment_name(self) -> str:
        return self.experiment or credentials.variable("MLFLOW_EXPERIMENT_NAME") or "headway"

    def _find_run(self, client: Any, experiment_id: str, facts: RunFacts) -> str | None:
        """The run that the checkpoint names, else the one that carries this run's id."""
        from mlflow.exceptions import MlflowException

        saved = self._resumed_state.get("run_id")
        if isinstance(saved, str):
            try:
                return str(client.get_run(saved).info.run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
        query = f"tags.`{_RUN_ID_TAG}` = '{facts.run_id}'"
        runs = client.search_runs([experiment_id], query, max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _log_params(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        params = [
            Param(_allowed(name), str(value)[:_LONGEST_VALUE])
            for name, value in flatten(config).items()
        ]
        for start in range(0, len(params), _PARAMS_A_CALL):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_A_CALL])

    def send(self, step: int, figures: dict[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [Metric(_allowed(n), value, now_ms, step) for n, value in figures.items()]
        for start in range(0, len(metrics), _METRICS_A_CALL):
            some = metrics[start : start + _METRICS_A_CALL]
            self._client.log_batch(self._run_id, metrics=some)

    def mark_rewind(self, step: int) -> None:
        self._client.set_tag(self._run_id, "headway.resumed_from_step", str(step))

    def finish_run(self, ending: Ending) -> None:
        self._client.set_tag(self._run_id, "headway.outcome", ending.label)
        if ending.error is not None:
            self._client.set_tag(self._run_id, _ERROR_TAG, ending.error[:_LONGEST_VALUE])
        elif _ERROR_TAG in self._client.get_run(self._run_id).data.tags:
            # What ended the run before was overcome.
            self._client.delete_tag(self._run_id, _ERROR_TAG)
        status = "FINISHED"
        if ending.is_failure or ending.is_cut_short:
            status = "FAILED" if ending.is_failure else "KILLED"
        self._client.set_terminated(self._run_id, status)

    # Tags

    def fetch_tags(self) -> Sequence[str]:
        if self._client is None or self._run_id is None:
            return ()
        tags = self._client.get_run(self._run_id).data.tags
        return [tag for tag, value in tags.items() if value.strip().lower() not in _FALSE]


def _allowed(name: str) -> str:
    """A name that MLflow takes: letters, digits and a few signs."""
    return re.sub(r"[^\w\-. /]", "_", name)


def _experiment_id(client: Any, name: str) -> str:
    found = client.get_experiment_by_name(name)
    return str(client.create_experiment(name) if found is None else found.experiment_id)
