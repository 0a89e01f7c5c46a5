"""What a run knows about itself (`TrainerState`) and what may be asked of it (`TrainerControl`).

Owns the counters and flags that handlers see; field names follow Hugging Face's so that its
callbacks read them unchanged. Does not own when flags are acted on: only the loop reads them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any

from headway.engine.lifetimes import check_lifetime

# Facts about this process rather than the run; a resume must not take them from a checkpoint.
_PROCESS_FIELDS = (
    "is_local_process_zero",
    "is_world_process_zero",
    "outcome",
    "cancel_reason",
    "cancel_step",
    "stateful_callbacks",
)
# Follow from the arguments of the run that is starting, not of the one that saved.
_PLANNED_FIELDS = (
    "logging_steps",
    "eval_steps",
    "save_steps",
    "max_steps",
    "num_train_epochs",
    "train_batch_size",
    "max_eval_steps",
)


@dataclass
class TrainerState:
    """Progress of a run. `epoch` is fractional; `global_step` counts optimizer steps."""

    epoch: float = 0.0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: int = 500
    eval_steps: int = 500
    save_steps: int = 500
    max_eval_steps: int = -1
    train_batch_size: int | None = None
    num_train_epochs: float = 0
    num_input_tokens_seen: int = 0
    num_input_tokens_skipped: int = 0
    """Of the tokens seen, those of steps that were left out (`control.should_skip_step`)."""
    total_flos: float = 0.0
    train_seconds: float = 0.0
    """Seconds spent in the loop, over all resumes."""
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    chosen_checkpoint: str | None = None
    """What `set_best_checkpoint` named last, which retention leaves alone."""
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: dict[str, Any] | None = None
    stateful_callbacks: list[Any] = field(default_factory=list)
    rate_factor: float = 1.0
    """What rollbacks and commands have multiplied the base learning rates by."""
    temporary_rate_factor: float = 1.0
    """The part of it that a resume takes back."""
    lengths: list[int] | None = None
    """[planned, commanded] steps of a run whose length was changed while it ran. A resume with the
    planned length goes on to the commanded one; another length in its arguments counts more."""
    seed: int | None = None
    """The seed in use, drawn or given; a resume goes on with it."""
    raw_epoch: int = 0
    """Whole epochs finished."""
    epoch_start_step: int = 0
    """`global_step` at which the current epoch began."""
    run_id: str | None = None
    """Identifies the run; made at its first start, the same after every resume."""
    outcome: str | None = None
    """How the run ended: `completed`, `stopped` (a callback or a command asked for it), `canceled`
    (`cancel_run`), `interrupted` (a signal, `stop_at`), `aborted` (a callback asked for an end
    without a save) or `failed`. None while it runs; known when `on_train_end`, `on_error` and
    `on_close` fire."""
    cancel_reason: str | None = None
    """Why the run is canceled, the same on all ranks; None if it is not."""
    cancel_step: int | None = None
    """The step after which all ranks end a canceled run."""

    def to_dict(self) -> dict[str, Any]:
        """What a checkpoint stores: JSON-able, without facts about this process."""
        saved = {f.name: getattr(self, f.name) for f in fields(self)}
        return {key: value for key, value in saved.items() if key not in _PROCESS_FIELDS}

    def start_over(self) -> None:
        """Forget all progress, as of a run that was not this one."""
        fresh = type(self)()
        for f in fields(self):
            if f.name not in _PROCESS_FIELDS + _PLANNED_FIELDS:
                setattr(self, f.name, getattr(fresh, f.name))

    def restore(self, saved: dict[str, Any]) -> None:
        """Take the progress from a checkpoint; what the arguments decide stays as planned."""
        own_id = self.run_id
        for f in fields(self):
            if f.name in saved and f.name not in _PROCESS_FIELDS + _PLANNED_FIELDS:
                setattr(self, f.name, saved[f.name])
        if not isinstance(self.run_id, str):  # a checkpoint that was made before runs had one
            self.run_id = own_id
        self.log_history = list(saved.get("log_history", []))


def outcome_of(error: BaseException) -> str:
    """What an exception makes of a run: Ctrl-C is no failure of it."""
    return "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"


@dataclass
class TrainerControl:
    """Flags that callbacks raise; the loop acts on them at the end of the step and lowers them."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    save_lifetime: str = "regular"
    """`permanent` or `ephemeral` ask for a save by themselves; of all requests of a step, with
    `should_save` as a regular one, the strongest counts. Set by `request_save`."""
    should_evaluate: bool = False
    should_log: bool = False
    should_abort_without_save: bool = False
    """Stop at once and write no checkpoint."""
    should_skip_step: bool = False
    """Set in `on_step_begin` or `on_window`, on all ranks alike: the step that begins is counted,
    its data are passed over, and nothing is computed."""
    rollback: bool = False
    """Return to the newest checkpoint and go on from there."""
    rollback_skip_data: bool = False
    """With `rollback`: do not read again the data consumed since that checkpoint."""
    rollback_before_step: int | None = None
    """With `rollback`: to the newest checkpoint of this step or an earlier one."""
    rollback_rate_factor: float | None = None
    """With `rollback`: base learning rates are multiplied by this from then on."""

    def request_save(self, lifetime: str = "regular") -> None:
        """Ask for a save at the end of this step, never weakening what others asked for."""
        if check_lifetime(lifetime) == "regular":
            self.should_save = True
        elif self.save_lifetime != "permanent":
            self.save_lifetime = lifetime

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
