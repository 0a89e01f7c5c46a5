"""The run at Weights & Biases."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headway.callbacks.remote import credentials
from headway.callbacks.remote.tracker import (
    OUTCOMES,
    Ending,
    RunFacts,
    Tracker,
    ask_json,
    text_or_none,
    texts,
)
from headway.callbacks.watch.ranges import require_flag
from headway.errors import ConfigError, unknown

logger = logging.getLogger(__name__)

MODES = ("online", "offline", "disabled")
STEP = "train/global_step"
RESUMED = "headway/resumed_from_step"
_TAGS_QUERY = """
query RunTags($entity: String, $project: String!, $run: String!) {
  project(name: $project, entityName: $entity) { run(name: $run) { tags } }
}
"""


class WandBCallback(Tracker):
    """Logs every step's metrics, records and evaluations, and the outcome, to one W&B run.

    `mode` is `online`, `offline` (files in `<dir>/wandb`, for `wandb sync`) or `disabled`; None
    takes `WANDB_MODE`, else `online`. A resumed run goes on in the same W&B run: it is rewound to
    the checkpoint where the server can do that; where it cannot, later rows of the same
    `train/global_step` count, and `headway/resumed_from_step` marks the place.
    """

    service = "Weights & Biases"
    package = "wandb"
    extra = "wandb"
    key_variable = "WANDB_API_KEY"
    way_without_key = "mode='offline' (or WANDB_MODE=offline)"

    def __init__(
        self,
        enabled: bool = True,
        name: str | None = None,
        project: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        config: Mapping[str, Any] | None = None,
        cancel_tags: Sequence[str] | None = None,
        cancel_check_interval: int | None = None,
        mode: str | None = None,
        job_type: str | None = None,
        dir: str | None = None,
        rewind: bool = True,
        queue_size: int = 1000,
        close_timeout_s: float = 60.0,
    ) -> None:
        kind = type(self).__name__
        self.project = text_or_none(kind, "project", project)
        self.entity = text_or_none(kind, "entity", entity)
        self.group = text_or_none(kind, "group", group)
        self.tags = texts(kind, "tags", tags)
        self.notes = text_or_none(kind, "notes", notes)
        self.job_type = text_or_none(kind, "job_type", job_type)
        self.dir = text_or_none(kind, "dir", dir)
        if mode is not None and mode not in MODES:
            raise ConfigError(f"{kind}: " + unknown("mode", mode, MODES))
        require_flag(f"{kind}.rewind", rewind)
        self.mode = mode
        self.rewind = rewind
        super().__init__(
            enabled=enabled,
            name=name,
            config=config,
            cancel_tags=cancel_tags,
            cancel_check_interval=cancel_check_interval,
            queue_size=queue_size,
            close_timeout_s=close_timeout_s,
        )
        self._run: Any = None
        self._id: str | None = None
        self._offset = 0
        """What W&B's own step counter is ahead of the run's, after resumes without a rewind."""
        self._was_resumed = False

    @property
    def run(self) -> Any:
        """The W&B run; None before it is open."""
        return self._run

    @property
    def run_path(self) -> str | None:
        """entity/project/id."""
        return None if self._run is None else str(self._run.path)

    @property
    def resolved_mode(self) -> str:
        given = self.mode or credentials.variable("WANDB_MODE") or "online"
        if given == "dryrun" or credentials.switched_on("WANDB_DISABLED"):
            return "disabled" if given != "dryrun" else "offline"
        return given

    def check_access(self) -> None:
        mode = self.resolved_mode
        if mode not in MODES:
            raise ConfigError("WandBCallback: WANDB_MODE: " + unknown("mode", mode, MODES))
        super().check_access()

    def needs_key(self) -> bool:
        return self.resolved_mode == "online"

    def find_key(self) -> str | None:
        return super().find_key() or credentials.netrc_password(_base_url())

    def state_dict(self) -> dict[str, Any]:
        own = {"run_id": self._id, "offset": self._offset}
        return self._remembered(own, is_known=self._id is not None)

    # On the tracker's thread

    def open_run(self, facts: RunFacts) -> None:
        # Not before the callback is used: the package takes seconds to import.
        credentials.preset("WANDB_SILENT", "true")
        credentials.drop_blank("WANDB_MODE")  # which W&B would refuse
        import wandb

        saved = self._saved_of(facts)
        self._id = saved.get("run_id") or facts.run_id
        self._offset = int(saved.get("offset") or 0)
        self._was_resumed = bool(facts.resumed_step)
        options = {
            "project": self.project,
            "entity": self.entity,
            "name": facts.name,
            "group": self.group,
            "job_type": self.job_type,
            "tags": self.tags or None,
            "notes": self.notes,
            "config": facts.config,
            "dir": self.dir or facts.output_dir,
            "mode": self.resolved_mode,
            "id": self._id,
            "reinit": "create_new",
            "settings": wandb.Settings(
                silent=True,
                console="off",
                init_timeout=30,
                finish_timeout=self.close_timeout_s,
            ),
        }
        self._run = self._initialise(wandb, options, facts.resumed_step)
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)
        if facts.resumed_step:
            self._align(facts.resumed_step)
            self._mark(facts.resumed_step)

    def _initialise(self, wandb: Any, options: dict[str, Any], resumed_step: int | None) -> Any:
        if resumed_step and self.rewind and options["mode"] == "online":
            place = f"{self._id}?_step={resumed_step + self._offset}"
            try:
                return wandb.init(**{**options, "id": None}, resume_from=place)
            except Exception as error:
                logger.warning(
                    "WandBCallback: the run could not be rewound to step %d, so it goes on after "
                    "its last row and the later rows of a step count: %s",
                    resumed_step,
                    error,
                )
        return wandb.init(**options, resume="allow")

    def _align(self, resumed_step: int) -> None:
        """W&B takes no row before its own counter: move ahead of it where it is further."""
        ahead = int(getattr(self._run, "starting_step", 0) or 0)
        self._offset = max(self._offset, ahead - (resumed_step + 1))

    def _mark(self, step: int) -> None:
        self._run.log({RESUMED: step, STEP: step + 1}, step=step + 1 + self._offset)

    def send(self, step: int, figures: dict[str, float]) -> None:
        at, reached = step + self._offset, int(self._run.step)
        if at < reached:
            # W&B drops a row before its counter. What comes late, as the duration of a save, joins
            # the row that it has reached, which keeps its own step.
            self._run.log(figures, step=reached)
        else:
            self._run.log({**figures, STEP: step}, step=at)

    def mark_rewind(self, step: int) -> None:
        self._offset = max(self._offset, int(self._run.step) - step)
        self._mark(step)

    def finish_run(self, ending: Ending) -> None:
        self._run.summary["outcome"] = ending.label
        if ending.error is not None or self._was_resumed:
            # Nothing is an answer too: what ended the run before was overcome.
            self._run.summary["error"] = ending.error
        before = tuple(self._run.tags or ())
        tags = tuple(tag for tag in before if tag not in OUTCOMES or tag in self.tags)
        if ending.label != "completed":
            tags = (*tags, ending.label)
        if tags != before:
            self._run.tags = tags
        # W&B shows 255 as killed, 0 as finished and anything else as failed.
        self._run.finish(exit_code=1 if ending.is_failure else 255 if ending.is_cut_short else 0)

    # Tags

    def fetch_tags(self) -> Sequence[str]:
        run = self._run
        if run is None or self.resolved_mode != "online":
            return ()
        login = base64.b64encode(f"api:{self.find_key()}".encode()).decode()
        variables = {"entity": run.entity, "project": run.project, "run": run.id}
        found = ask_json(
            f"{_base_url()}/graphql",
            {"Content-Type": "application/json", "Authorization": f"Basic {login}"},
            {"query": _TAGS_QUERY, "variables": variables},
        )
        return found["data"]["project"]["run"]["tags"] or ()


def _base_url() -> str:
    return (credentials.variable("WANDB_BASE_URL") or "https://api.wandb.ai").rstrip("/")
