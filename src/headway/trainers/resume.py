"""Taking up a run again: which checkpoint, what of it, and what has changed since it was made.

Owns: the choice under `on_damaged_checkpoint`, the meaning of `checkpoint_components` and
`load_components`, and the resume report (`run/resume-<step>.json`). Does not own: the load itself
(saving.py, checkpoint) nor the fingerprints (fingerprints.py).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.args import TrainingArguments
from headway.checkpoint import CheckpointError, CheckpointManager, Manifest, read_manifest
from headway.checkpoint.discovery import find_latest_checkpoint
from headway.checkpoint.errors import DamagedError
from headway.checkpoint.jsonfile import read_json_object
from headway.checkpoint.storage import is_url, split_location
from headway.config.differences import ABSENT, differences
from headway.config.rules_values import LOADABLE
from headway.config.snapshot import versions, write_json
from headway.errors import ConfigError
from headway.optim.group_schedules import GROUP_KEY
from headway.optim.in_force import MACHINE_FLAGS, InForce
from headway.trainers.overruled import Overruled, is_told, setting_of
from headway.trainers.plan import Progress

logger = logging.getLogger(__name__)

CHECKPOINT, CURRENT = "checkpoint", "current"

# They say how to resume, or differ in every process; a change of them changes no training.
_NOT_COMPARED = {
    "args.logging_dir",
    "args.ddp_timeout",
    "args.resume_from_checkpoint",
    "args.load_components",
    "args.checkpoint_components",
    "args.on_damaged_checkpoint",
    "args.overwrite_output_dir",
}
_CURVE = (
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "lr_scheduler_unit",
    "warmup_ratio",
    "warmup_steps",
    "warmup_tokens",
)
_LENGTH = ("max_steps", "num_train_epochs", "train_for")
_COUNTERS: dict[str, Any] = {
    **dict.fromkeys(("global_step", "raw_epoch", "epoch_start_step", "num_input_tokens_seen"), int),
    **dict.fromkeys(("epoch", "total_flos", "train_seconds"), (int, float)),
}


@dataclass(frozen=True)
class Found:
    """The checkpoint to go on from, and what is wrong with newer ones, a line per file."""

    path: Path
    told: str
    """Where that is for people: its path or address."""
    damaged: Sequence[str] = ()


def find_checkpoint(
    manager: CheckpointManager, args: TrainingArguments, resume: bool | str | Path
) -> Found | None:
    """What to resume from; None for a fresh start.

    A folder that holds only damaged checkpoints is an error: a fresh start beside them would
    look like the run going on. Weights and optimizer are verified when they are loaded.
    """
    manager.clean_leftovers()
    if resume is False:
        listed = manager.list()
        # An address has no renames to set things aside by.
        movable = args.checkpoint_address is None
        option = "output_dir" if movable else "checkpoint_address"
        if listed and not (movable and args.overwrite_output_dir):
            way_out = ", or set overwrite_output_dir=True to let this run replace it"
            raise ConfigError(
                f"resume_from_checkpoint=False, but {option} already holds "
                f"{args.checkpoint_place}/{listed[-1].path.name}; choose another {option}"
                f"{way_out if movable else ''}"
            )
        return None
    if resume is not True:
        if not isinstance(resume, (str, Path)):
            raise ConfigError(
                f"resume_from_checkpoint must be true, false or a folder, got {resume!r}"
            )
        return _find_named(manager, args, resume)
    path, damaged = manager.find_intact(verify_tensors=False)
    told = "" if path is None else manager.storage.locate(path)
    if damaged and (path is None or args.on_damaged_checkpoint == "stop"):
        way_out = "no older one is whole" if path is None else f"the newest whole one is {told}"
        raise CheckpointError("\n".join([*damaged, _advice(way_out)]))
    for problem in damaged:
        logger.warning("passing over a damaged checkpoint: %s", problem)
    if path is None:
        _refuse_to_leave_behind(args)
        return None
    return Found(path, told, damaged)


def _refuse_to_leave_behind(args: TrainingArguments) -> None:
    """A run whose checkpoints were in `output_dir` until now would begin anew without a word."""
    here = (
        None
        if args.checkpoint_address is None
        else find_latest_checkpoint(args.output_dir, kind="training")
    )
    if here is not None:
        raise ConfigError(
            f"checkpoint_address={args.checkpoint_address!r} holds no checkpoint yet, and "
            f"output_dir holds {here}; set resume_from_checkpoint={here!r} for this one start to "
            "go on from there, or resume_from_checkpoint=False to start anew"
        )


def _find_named(manager: CheckpointManager, args: TrainingArguments, resume: str | Path) -> Found:
    place = args.checkpoint_place
    if is_url(resume) and split_location(resume)[0] != place.rstrip("/"):
        raise ConfigError(
            f"resume_from_checkpoint={resume!r} is an address, and no checkpoint in {place}; "
            "set checkpoint_address to where it is, or give a folder that it was copied to"
        )
    path = manager.resolve(resume, verify_tensors=False)
    assert path is not None, "resolve raises for a path that is not there"
    return Found(path, manager.storage.locate(path))


def find_older(
    manager: CheckpointManager, args: TrainingArguments, seed: int | None, error: DamagedError
) -> Found:
    """What to go on from after weights or optimizer of the newest were found damaged at the load.

    The model and the order of the data are there already, made with `seed`.
    """
    found = find_checkpoint(manager, args, True)
    if found is None:
        raise error
    if seed is not None and read_counters(found.path).seed not in (None, seed):
        way_out = f"the newest whole one, {found.told}, was saved with another seed"
        raise CheckpointError("\n".join([*error.problems, _advice(way_out)])) from error
    return found


def _advice(way_out: str) -> str:
    return (
        f"cannot resume (on_damaged_checkpoint): {way_out}; name the checkpoint to use with "
        f"resume_from_checkpoint, or start afresh with resume_from_checkpoint=False and "
        f"overwrite_output_dir=True"
    )


def kept_components(args: TrainingArguments) -> set[str]:
    """The parts that the run's checkpoints hold; `trainer` brings the callbacks along."""
    if args.checkpoint_components is None:
        return set(LOADABLE)
    kept = set(args.checkpoint_components)
    return kept | {"callbacks"} if "trainer" in kept else kept


def wanted_components(args: TrainingArguments) -> set[str]:
    """The parts that a resume restores; `trainer` stands for counters, history and best metric."""
    return kept_components(args) if args.load_components is None else set(args.load_components)


def require_parts(path: Path, needed: Collection[str]) -> None:
    """Refuse a checkpoint that lacks one of the parts to restore."""
    stored = {entry["key"] for entry in read_manifest(path).components}
    if read_json_object(path / "trainer_state.json"):
        stored.add("trainer")
    missing = sorted(set(needed) - stored)
    if missing:
        raise CheckpointError(
            f"{path} does not hold {', '.join(missing)}: name the parts to restore with "
            f"load_components, or leave them out of the run with checkpoint_components"
        )


@dataclass(frozen=True)
class SavedCounters:
    """What a run that goes on must know before anything is loaded, as far as it was told."""

    seed: int | None = None
    lengths: tuple[int, int] | None = None
    """The planned and the commanded length, where the run was made longer while it ran."""
    progress: Progress | None = None
    """Where the run stood."""


def read_counters(path: Path) -> SavedCounters:
    """Those of the run that wrote a checkpoint."""
    saved = read_json_object(path / "trainer_state.json")
    seed: Any = saved.get("seed")
    lengths: Any = saved.get("lengths")
    is_pair = isinstance(lengths, list) and [type(one) for one in lengths] == [int, int]
    stood: list[Any] = [saved.get(one.name) for one in dataclasses.fields(Progress)]
    return SavedCounters(
        seed=seed if isinstance(seed, int) else None,
        lengths=(lengths[0], lengths[1]) if is_pair else None,
        progress=Progress(*stood) if all(type(one) is int for one in stood) else None,
    )


def check_progress(saved: Mapping[str, Any], path: Path) -> None:
    """Refuse counters and a history that are none."""
    file = path / "trainer_state.json"
    for name, kinds in _COUNTERS.items():
        value: Any = saved.get(name, 0)
        # A rollback that kept the data position may lie before its epoch's first step.
        least = -math.inf if name == "epoch_start_step" else 0
        if isinstance(value, bool) or not isinstance(value, kinds) or not value >= least:
            raise CheckpointError(f"{file}: {name} is {value!r:.40}, which counts nothing")
    history = saved.get("log_history", [])
    if not isinstance(history, list) or not all(isinstance(record, dict) for record in history):
        raise CheckpointError(f"{file}: log_history is not a list of records")


@dataclass(frozen=True)
class Difference:
    """One option that is not what it was, and which of the two values counts now."""

    key: str
    saved: Any
    current: Any
    winner: str
    note: str = ""

    @property
    def is_of_one(self) -> bool:
        """Whether only one of the two runs has the option."""
        return ABSENT in (self.saved, self.current)


def compare_configs(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    loaded: Collection[str],
    overruled: Collection[Overruled] = (),
    in_force: InForce | None = None,
) -> list[Difference]:
    """Every option in which two run configurations differ, by its dotted name.

    Those that are among the `overruled` settings are left out: they have been told.
    """
    found = []
    plain = json.loads(json.dumps(current, default=str))
    for key, (old, new) in differences(saved, plain).items():
        if key in _NOT_COMPARED or is_told(key, overruled):
            continue
        decided = _decide_setting(key, loaded, overruled, in_force) or _decide(key, loaded)
        found.append(Difference(key, old, new, *decided))
    return found


def _compare_seed(
    kept: Any, config: Mapping[str, Any], loaded: Collection[str], told: Collection[Difference]
) -> list[Difference]:
    """A seed that did not count in an earlier resume either is in that run's configuration."""
    given = config.get("args", {}).get("seed", -1)
    if "trainer" not in loaded or given < 0 or kept in (None, given):
        return []
    if any(item.key == "args.seed" for item in told):
        return []
    return [Difference("args.seed", kept, given, *_decide("args.seed", loaded))]


def _decide_setting(
    key: str,
    loaded: Collection[str],
    overruled: Collection[Overruled],
    in_force: InForce | None,
) -> tuple[str, str] | None:
    """As `_decide`, for what optimizer and scheduler hold: they have been looked at."""
    if in_force is None:
        return None
    setting = setting_of(key)
    if setting is not None and "optimizer" in loaded:
        # Under a name that is none of a group's: an argument that a class makes settings of.
        is_known = in_force.knows(setting) or setting in (*MACHINE_FLAGS, GROUP_KEY)
        if is_known or not any(item.groups for item in overruled):
            return CURRENT, ""
        return CHECKPOINT, "settings of param groups are stored with the optimizer's state"
    group, _, name = key.partition(".init_args.")
    if group == "lr_scheduler" and "scheduler" in loaded and name not in in_force.schedule:
        return CHECKPOINT, "a scheduler's numbers are stored with its state"
    return None


def _decide(key: str, loaded: Collection[str]) -> tuple[str, str]:
    """Which value counts after the load, and why; `loaded` are the restored components."""
    group, _, name = key.partition(".")
    if group == "args":
        name = name.partition(".")[0]
        if name == "seed" and "trainer" in loaded:
            return CHECKPOINT, "a run keeps its seed"
        if name in _CURVE:
            return CURRENT, "the curve is drawn anew; the step on it is the stored one"
        if name in _LENGTH:
            return CURRENT, "a schedule that decays now aims at the new length"
    elif group == "optimizer_groups" and "optimizer" in loaded:
        return CURRENT, "parameters are grouped as configured; their state goes along"
    elif group == "data" and "dataset" in loaded:
        return CURRENT, "the position in the data is the stored one"
    elif group == "model" and "model" in loaded:
        return CURRENT, "the weights are the stored ones"
    return CURRENT, ""


@dataclass
class ResumeReport:
    """What a resume did, for people and for programs."""

    checkpoint: str
    step: int
    save_counter: int
    loaded: list[str]
    left_out: list[str]
    left_out_by: str
    damaged: list[str]
    differences: list[Difference]
    fingerprints: dict[str, dict[str, Any]]
    versions: dict[str, dict[str, str | None]]
    schedule: list[str] = field(default_factory=list)
    """How the learning-rate schedule differs from the saved one, with the rates; logged by it."""
    overruled: list[Overruled] = field(default_factory=list)
    """Settings of optimizer and scheduler that are configured and do not count."""
    regrouped: list[str] = field(default_factory=list)
    """Parameters that are in another param group than in the checkpoint."""

    @property
    def changed_parts(self) -> list[str]:
        """Of model, data and tokenizer, those whose fingerprint is another than the stored one."""
        return [name for name, facts in self.fingerprints.items() if facts["same"] is False]

    def log(self) -> None:
        """Say what the run goes on with; what is not as configured is a warning."""
        logger.info("resumed from %s (step %d)", self.checkpoint, self.step)
        if self.left_out:
            # checkpoint_components leaves it out of every checkpoint, which is no surprise.
            level = logging.WARNING if self.left_out_by == "load_components" else logging.INFO
            logger.log(level, "not restored (%s): %s", self.left_out_by, ", ".join(self.left_out))
        for name in self.changed_parts:
            logger.warning(
                "the %s is not the one of the checkpoint: %s, it was %s",
                name,
                self.fingerprints[name]["current"],
                self.fingerprints[name]["saved"],
            )
        for line in (*self.regrouped, *(setting.tell() for setting in self.overruled)):
            logger.warning("%s", line)
        other_trainer = any(item.key == "trainer" for item in self.differences)
        for item in self.differences:
            if other_trainer and item.is_of_one and item.key.startswith("args."):
                continue  # an option that one of the two trainers does not have
            level = logging.WARNING if item.winner == CHECKPOINT else logging.INFO
            note = f" ({item.note})" if item.note else ""
            logger.log(
                level,
                "%s was %r and is now %r; the %s value counts%s",
                item.key,
                item.saved,
                item.current,
                "checkpoint's" if item.winner == CHECKPOINT else "current",
                note,
            )

    def write(self, output_dir: str | Path) -> Path:
        """Write `run/resume-<step>.json`."""
        folder = Path(output_dir) / "run"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"resume-{self.step}.json"
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(path, {"created": created, **dataclasses.asdict(self)})
        return path


def make_report(
    found: Found,
    manifest: Manifest,
    saved_state: Mapping[str, Any],
    *,
    config: Mapping[str, Any],
    fingerprints: Mapping[str, Any],
    loaded: Collection[str],
    schedule: Collection[str] = (),
    overruled: Collection[Overruled] = (),
    regrouped: Collection[str] = (),
    in_force: InForce | None = None,
    left_out_by: str = "load_components",
) -> ResumeReport:
    """Compare a loaded checkpoint with the run that goes on from it."""
    file = found.path / "run" / "config.json"
    saved_config = read_json_object(file) if "run/config.json" in manifest.files else {}
    stored = saved_state.get("fingerprints")
    stored = stored if isinstance(stored, Mapping) else {}
    now = versions()
    differences = []
    if saved_config:
        differences = compare_configs(saved_config, config, loaded, overruled, in_force)
        differences += _compare_seed(saved_state.get("seed"), config, loaded, differences)
    return ResumeReport(
        checkpoint=found.told,
        step=manifest.step,
        save_counter=manifest.save_counter,
        loaded=sorted(loaded),
        left_out=sorted(set(LOADABLE) - set(loaded)),
        left_out_by=left_out_by,
        damaged=list(found.damaged),
        differences=differences,
        fingerprints={
            name: {
                "saved": stored.get(name),
                "current": current,
                "same": stored[name] == current if name in stored else None,
            }
            for name, current in fingerprints.items()
        },
        versions={
            "headway": {"saved": manifest.headway_version, "current": now["headway"]},
            "torch": {"saved": manifest.torch_version, "current": now["torch"]},
        },
        schedule=list(schedule),
        overruled=list(overruled),
        regrouped=list(regrouped),
    )
