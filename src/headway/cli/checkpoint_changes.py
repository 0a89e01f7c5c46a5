"""Commands that change checkpoints: prune, link, pin, unpin, modify, convert."""

from __future__ import annotations

import argparse
import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.cli.checkpoint import open_committed, require_folder
from headway.cli.messages import print_json, spell_bytes
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.checkpoint import CommittedCheckpoint
    from headway.checkpoint.convert import Kind
    from headway.checkpoint.modify import Edit

logger = logging.getLogger(__name__)


def run_prune(options: argparse.Namespace) -> int:
    """Delete what the retention rule lets go."""
    from headway.checkpoint import committed
    from headway.checkpoint.storage import open_storage

    require_folder(options.path)
    for option, least in (("keep", 1), ("keep_best", 0), ("keep_every", 1)):
        value = getattr(options, option)
        if value is not None and value < least:
            name = f"--{option.replace('_', '-')}"
            raise ConfigError(f"{name}: {value} given; allowed: {least} or more")
    storage = open_storage(options.path)
    storage.refresh()
    found = committed(storage.root)
    victims = _choose_victims(options, found)
    sizes = {c.path.name: sum(r.size for r in c.manifest.files.values()) for c in found}
    if options.yes:
        for name in victims:
            storage.remove_tree(storage.root / name)
    freed = sum(sizes[name] for name in victims)
    if options.json:
        kept = [name for name in sizes if name not in victims]
        facts = {"deleted": victims, "kept": kept, "bytes": freed, "dry_run": not options.yes}
        print_json(facts)
        return 0
    word = "deleted" if options.yes else "would delete"
    for name in victims:
        print(f"{word} {name} ({spell_bytes(sizes[name])})")
    print(f"{word} {len(victims)} of {len(found)} checkpoints, {spell_bytes(freed)}")
    if victims and not options.yes:
        print("nothing was deleted; say --yes to do it")
    return 0


def _choose_victims(options: argparse.Namespace, found: list[CommittedCheckpoint]) -> list[str]:
    """What may go so that the newest that stays is whole; a damaged one neither goes nor counts."""
    from headway.checkpoint import choose_deletions, is_pinned, verify
    from headway.checkpoint.retention import entry_of
    from headway.checkpoint.storage import is_url

    counting = list(found)
    while True:
        entries = [entry_of(c, pinned=is_pinned(c.path)) for c in counting]
        victims = choose_deletions(
            entries,
            limit=options.keep,
            num_best=options.keep_best,
            greater_is_better=options.greater_is_better,
            keep_every_n_steps=options.keep_every,
        )
        if not victims or is_url(options.path):  # there the files are not at hand
            return victims
        newest = [c for c in counting if c.kind == "training"][-1]
        problems = verify(newest.path)
        if not problems:
            return victims
        for problem in problems:
            logger.warning("passing over a damaged checkpoint: %s", problem)
        counting.remove(newest)


def run_link(options: argparse.Namespace) -> int:
    """Link the newest weights into the run directory."""
    from headway.checkpoint import create_pretrained_symlinks

    given = options.path or options.output_path
    require_folder(given)
    try:
        links = create_pretrained_symlinks(given, options.force, options.dry_run)
    except FileExistsError as error:
        raise ConfigError(f"{error} (--force)") from error
    if options.json:
        print_json({"links": links, "dry_run": options.dry_run})
        return 0
    for name, target in links.items():
        print(f"{name} -> {target}")
    return 0


def run_pin(options: argparse.Namespace) -> int:
    """Pin checkpoints."""
    return _mark(options, pinned=True)


def run_unpin(options: argparse.Namespace) -> int:
    """Unpin checkpoints."""
    return _mark(options, pinned=False)


def _mark(options: argparse.Namespace, *, pinned: bool) -> int:
    from headway.checkpoint import pin, unpin
    from headway.checkpoint.discovery import find_whole_checkpoint

    for given in options.path:
        require_folder(given)
    paths = [find_whole_checkpoint(given) or given for given in options.path]
    for path in paths:
        pin(path) if pinned else unpin(path)
        if not options.json:
            print(f"{path}: {'pinned' if pinned else 'not pinned'}")
    if options.json:
        print_json({"paths": paths, "pinned": pinned})
    return 0


def _edits(options: argparse.Namespace) -> list[Edit]:
    from headway.checkpoint.modify import Edit

    edits = []
    for option, scale in (("set", False), ("scale", True)):
        for text in getattr(options, option):
            key, equals, value = text.partition("=")
            if not key or not equals:
                raise ConfigError(f"--{option} {text!r}: KEY=VALUE is needed")
            edits.append(Edit(key, _value(option, text, value), scale))
    if not edits:
        raise ConfigError("nothing to do: give --set KEY=VALUE or --scale KEY=FACTOR")
    return edits


def _value(option: str, text: str, value: str) -> Any:
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = value
    is_number = isinstance(parsed, int | float) and not isinstance(parsed, bool)
    if option == "scale" and not is_number:
        raise ConfigError(f"--scale {text!r}: a factor is a number")
    if isinstance(parsed, float) and not math.isfinite(parsed):
        raise ConfigError(f"--{option} {text!r}: a finite number is needed")
    return parsed


def run_modify(options: argparse.Namespace) -> int:
    """Edit values of a checkpoint and commit it anew."""
    from headway.checkpoint.modify import modify_checkpoint

    edits = _edits(options)
    if "://" in options.path:
        raise ConfigError(f"{options.path}: only checkpoints on a local disk are modified")
    with open_committed(options.path) as directory:
        changes, backup = modify_checkpoint(
            directory,
            edits,
            component=options.component,
            param_group=options.param_group,
            backup=not options.no_backup,
            dry_run=options.dry_run,
            force=options.force,
        )
    if options.json:
        facts = [vars(change) for change in changes]
        print_json({"changes": facts, "backup": backup, "dry_run": options.dry_run})
        return 0
    if options.quiet:
        return 0
    for change in changes:
        print(f"{change.file}: {change.key}: {change.before} -> {change.after}")
    if options.verbose:
        print(f"{directory}: {len(changes)} values in {len({c.file for c in changes})} files")
    if options.dry_run:
        print("nothing was changed (--dry-run)")
    elif backup is not None:
        print(f"the old one is kept as {backup}")
    return 0


def run_convert(options: argparse.Namespace) -> int:
    """Import or export."""
    from headway.checkpoint.convert import read_source, recognise
    from headway.checkpoint.export import export_file, export_folder, require_new

    source, target = _newest(Path(options.source)), Path(options.target)
    require_new(target)
    kind = recognise(source)
    to = options.to or _default_form(kind.name, target)
    if to == "checkpoint" and kind.name == "checkpoint":
        raise ConfigError(f"SRC: {source} is a Headway checkpoint already; choose another --to")
    if to != "checkpoint" or not _import_state(options, source, target, kind):
        weights = read_source(source, allow_legacy=options.allow_legacy)
        is_file = to == "safetensors" or (to == "bin" and target.suffix in (".bin", ".pt", ".pth"))
        if is_file:
            export_file(weights, target, dtype=options.dtype)
        else:
            export_folder(weights, target, dtype=options.dtype, to_bin=to == "bin")
    if options.json:
        print_json({"source": source, "source_kind": kind.name, "target": target, "to": to})
    else:
        print(f"{source} ({kind.name}) -> {target} ({to})")
    return 0


def _import_state(options: argparse.Namespace, source: Path, target: Path, kind: Kind) -> bool:
    """Import a training state of another tool; False if the source is weights alone."""
    from headway.checkpoint.convert import import_hf_trainer
    from headway.checkpoint.raw import import_raw

    with_optimizer = not options.no_optimizer
    if kind.name == "hf-trainer":
        if options.dtype:
            raise ConfigError("--dtype: a training state is imported as it is")
        import_hf_trainer(
            source, target, allow_legacy=options.allow_legacy, with_optimizer=with_optimizer
        )
        return True
    if not kind.needs_legacy or kind.name == "model folder" or not with_optimizer or options.dtype:
        return False
    return import_raw(source, target, allow_legacy=options.allow_legacy) is not None


def _newest(source: Path) -> Path:
    from headway.checkpoint.discovery import find_whole_checkpoint

    found = find_whole_checkpoint(source) if source.is_dir() else None
    return Path(found) if found else source


def _default_form(kind: str, target: Path) -> str:
    by_ending = {".safetensors": "safetensors", ".bin": "bin", ".pt": "bin", ".pth": "bin"}
    if target.suffix in by_ending:
        return by_ending[target.suffix]
    return "hf" if kind == "checkpoint" else "checkpoint"
