"""Edits of a committed checkpoint: learning rate, weight decay, counters.

Owns: where a key is found, what an edit of it means, the list of changes. Does not own: the
commit of the edited checkpoint (rewrite.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.checkpoint.contents import OPTIMIZER_STATE_NAME, TRAINER_STATE_NAME
from headway.checkpoint.errors import CheckpointError
from headway.checkpoint.jsonfile import encode_json, read_json_object
from headway.checkpoint.manifest import Manifest, read_manifest
from headway.checkpoint.rewrite import rewrite
from headway.errors import ConfigError, unknown

_SPELLINGS = {"learning_rate": "lr"}
_GROUP_KEY = re.compile(r"param_groups\[(\d+)\]\.(\w+)")
_NEVER_NEGATIVE = {
    *("lr", "initial_lr", "base_lrs", "_last_lr", "weight_decay", "eps", "momentum"),
    *("global_step", "epoch", "raw_epoch", "epoch_start_step", "num_input_tokens_seen"),
    *("total_flos", "train_seconds", "last_epoch"),
}


@dataclass(frozen=True)
class Change:
    """One value that an edit changes."""

    file: str
    key: str
    before: Any
    after: Any


@dataclass(frozen=True)
class Edit:
    """`key` becomes `value`, or is multiplied by it if `scale`."""

    key: str
    value: Any
    scale: bool = False
    force: bool = False
    group: int | None = None
    """The one optimizer group that is meant; None: each that has the key."""

    def apply(self, before: Any, where: str) -> Any:
        """The new value; one of another type than the old one, or without sense, is refused."""
        after = self._changed(before, where)
        is_number = isinstance(after, int | float) and not isinstance(after, bool)
        names = set(self.key.split("."))
        if is_number and after < 0 and names & _NEVER_NEGATIVE and not self.force:
            raise ConfigError(f"{where} would be {after}; allowed: 0 or more")
        return after

    def _changed(self, before: Any, where: str) -> Any:
        if not isinstance(before, int | float | str | None):
            raise ConfigError(f"{where} is not a plain value and cannot be edited")
        if not self.scale:
            return self._converted(before, where)
        if isinstance(before, bool) or not isinstance(before, int | float):
            raise ConfigError(f"{where} is {before!r}; only a number can be scaled")
        scaled = before * self.value
        if isinstance(before, int) and scaled != int(scaled):
            raise ConfigError(f"{where} is the whole number {before}; {self.value} makes {scaled}")
        return type(before)(scaled)

    def _converted(self, before: Any, where: str) -> Any:
        if type(before) is float and type(self.value) is int:
            return float(self.value)
        if before is not None and type(before) is not type(self.value):
            raise ConfigError(
                f"{where} is a {type(before).__name__} ({before!r}); "
                f"{self.value!r} is a {type(self.value).__name__}"
            )
        return self.value


def modify_checkpoint(
    path: str | Path,
    edits: list[Edit],
    *,
    component: str | None = None,
    param_group: int | None = None,
    backup: bool = True,
    dry_run: bool = False,
    force: bool = False,
) -> tuple[list[Change], Path | None]:
    """Carry out edits; returns what changes and the directory of the backup, if one is made.

    A key is looked for in the optimizer's groups, then in the trainer's counters, or only in
    `component` (`optimizer`, `trainer`, or the key of another one). A learning rate takes the
    rates that a schedule starts from with it, in proportion, so that the schedule does not undo
    the edit at its next step. Rates, decays and counters do not become negative, unless `force`.
    """
    directory = Path(path)
    manifest = read_manifest(directory)
    editor = _Editor(directory, manifest)
    for edit in edits:
        key, group = _of_group(edit.key, param_group)
        key = _SPELLINGS.get(key, key)
        editor.apply(dataclasses.replace(edit, key=key, force=force, group=group), component)
    if dry_run or not editor.changes:
        return editor.changes, None
    texts = {
        name: encode_json(editor.files[name], name)
        for name in {change.file for change in editor.changes}
    }
    saved = rewrite(directory, texts, backup=backup)
    return editor.changes, saved


def _of_group(key: str, param_group: int | None) -> tuple[str, int | None]:
    """A key and its optimizer group: `param_groups[1].lr` is how listings name one."""
    named = _GROUP_KEY.fullmatch(key)
    if named is None:
        return key, param_group
    if param_group not in (None, int(named[1])):
        raise ConfigError(f"{key} and --param-group {param_group} are two groups; give one")
    return named[2], int(named[1])


class _Editor:
    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self._directory = directory
        self._manifest = manifest
        self.files: dict[str, dict[str, Any]] = {}
        self.changes: list[Change] = []

    def _file(self, name: str) -> dict[str, Any]:
        if name not in self.files:
            self.files[name] = read_json_object(self._directory / name)
        return self.files[name]

    def apply(self, edit: Edit, component: str | None) -> None:
        if component in (None, "optimizer") and self._in_groups(edit):
            return
        if component == "optimizer":
            raise self._not_found(edit, "the optimizer's groups", self._group_keys())
        if edit.group is not None:
            raise self._not_found(edit, f"optimizer group {edit.group}", self._group_keys())
        if component in (None, "trainer"):
            name = TRAINER_STATE_NAME
        else:
            assert component is not None
            name = self._component_file(component)
        parent, last = self._walk(self._file(name), edit, name)
        self._put(name, parent, last, edit.key, edit.apply(parent[last], f"{name}: {edit.key}"))

    def _component_file(self, component: str) -> str:
        entry = self._manifest.component(component)
        if entry is None:
            keys = [e["key"] for e in self._manifest.components if e["key"] != "model"]
            raise ConfigError(unknown("component", component, ["trainer", *keys]))
        files = [name for name in entry["files"] if name.endswith(".json")]
        if len(files) != 1 or component == "model":
            raise ConfigError(f"component {component!r} has no single state to edit")
        found: str = files[0]
        return found

    def _groups(self) -> list[dict[str, Any]]:
        if self._manifest.component("optimizer") is None:
            return []
        encoded = self._file(OPTIMIZER_STATE_NAME)
        try:
            groups: list[dict[str, Any]] = encoded["rest"]["param_groups"]
        except (KeyError, TypeError) as error:
            path = self._directory / OPTIMIZER_STATE_NAME
            raise CheckpointError(f"{path} has no param_groups") from error
        return groups

    def _group_keys(self) -> list[str]:
        return sorted({key for group in self._groups() for key in group})

    def _in_groups(self, edit: Edit) -> bool:
        groups = self._groups()
        if edit.group is not None and not 0 <= edit.group < len(groups):
            raise ConfigError(
                f"--param-group {edit.group}: the optimizer has {len(groups)} groups, "
                "numbered from 0"
            )
        found = False
        for number, group in enumerate(groups):
            if edit.key not in group or edit.group not in (None, number):
                continue
            found = True
            where = f"param_groups[{number}].{edit.key}"
            before = group[edit.key]
            after = edit.apply(before, where)
            self._put(OPTIMIZER_STATE_NAME, group, edit.key, where, after)
            if edit.key == "lr":
                self._scale_start(number, group, before, after)
        return found

    def _scale_start(self, number: int, group: dict[str, Any], before: float, after: float) -> None:
        """Scale what the schedule multiplies: the group's initial rate and the base rates."""
        if "initial_lr" not in group or before == after:
            return
        if before == 0:
            raise ConfigError(
                f"param_groups[{number}].lr is 0 at this step, so its schedule cannot be scaled to "
                "it; edit initial_lr and the scheduler's base_lrs instead"
            )
        factor = after / before
        where = f"param_groups[{number}].initial_lr"
        self._put(OPTIMIZER_STATE_NAME, group, "initial_lr", where, group["initial_lr"] * factor)
        if self._manifest.component("scheduler") is None:
            return
        name = self._component_file("scheduler")
        state = self._file(name)
        for key, value in (("base_lrs", None), ("_last_lr", after)):
            rates = state.get(key)
            if isinstance(rates, list) and number < len(rates):
                new = rates[number] * factor if value is None else value
                self._put(name, rates, number, f"{key}.{number}", new)

    def _walk(self, state: dict[str, Any], edit: Edit, name: str) -> tuple[Any, Any]:
        """The container and the key of a dotted name."""
        *way, last = edit.key.split(".")
        parent: Any = state
        for part in way:
            parent = self._step(parent, part, edit, name)[0]
        return parent, self._step(parent, last, edit, name)[1]

    def _step(self, parent: Any, part: str, edit: Edit, name: str) -> tuple[Any, Any]:
        if isinstance(parent, Mapping) and part in parent:
            return parent[part], part
        if isinstance(parent, list) and part.isdigit() and int(part) < len(parent):
            return parent[int(part)], int(part)
        known = list(parent) if isinstance(parent, Mapping) else []
        raise self._not_found(edit, name, [*self._group_keys(), *known])

    def _not_found(self, edit: Edit, where: str, known: list[str]) -> ConfigError:
        return ConfigError(f"{where}: {unknown('key', edit.key, known)}")

    def _put(self, file: str, parent: Any, last: Any, key: str, after: Any) -> None:
        self.changes.append(Change(file, key, parent[last], after))
        parent[last] = after
