"""What a run was: its resolved configuration and the circumstances it started in.

Owns: `run/config.json` and `run/environment.json` in a run's folder, and the redaction of secrets.
Does not own: the copy of the configuration inside a checkpoint (checkpoint).
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headway import __version__
from headway.config.components import is_component
from headway.config.schema import Component, RunConfig
from headway.config.secrets import names_secret
from headway.errors import ConfigError

_PACKAGES = ("torch", "numpy", "safetensors", "transformers", "tokenizers", "datasets")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+(?=@)")
# Whoever knows the address of a webhook may post to it.
_WEBHOOK = re.compile(r"(?i)(https?://(?=\S*hook)[^/\s]+/)\S+")
_HIDDEN = "<redacted>"
_TIMEOUT_S = 5


def resolved_config(run: RunConfig) -> dict[str, Any]:
    """A run as plain values; `load_run` reads it back."""
    resolved: dict[str, Any] = {}
    for field in dataclasses.fields(run):
        value = getattr(run, field.name)
        resolved[field.name] = value.to_dict() if field.name == "args" else _plain(value)
    return resolved


def take_snapshot(
    run: RunConfig | None, args: Any, argv: Sequence[str] | None = None
) -> dict[str, Any]:
    """What this run is: `config` and the circumstances, with secrets hidden. Writes nothing."""
    config = resolved_config(run) if run is not None else {"args": args.to_dict()}
    # All ranks have rank 0's, also where the run's own arguments were copied.
    config["args"]["logging_dir"] = args.logging_dir
    return {
        "config": redact(config),
        "command": redact_command(sys.argv if argv is None else argv),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "versions": versions(),
        "git": git_state(Path.cwd()),
        "hardware": hardware(),
    }


def write_snapshot(run_dir: str | Path, snapshot: dict[str, Any]) -> None:
    """Write a snapshot as `run/config.json` and `run/environment.json` under `run_dir`."""
    folder = Path(run_dir) / "run"
    environment = {key: value for key, value in snapshot.items() if key != "config"}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", snapshot["config"])
        write_json(folder / "environment.json", environment)
    except OSError as error:
        raise ConfigError(f"output_dir: {run_dir} cannot be written: {error}") from error


def redact(value: Any, key: str = "") -> Any:
    """A copy without secrets: text under a key that names one, logins in URLs, webhooks' paths."""
    if isinstance(value, dict):
        # What lies below a secret is secret too, whatever it is called there; but a component has
        # a name of the user's choice, and what is secret in it has a name of its own.
        hidden = names_secret(key) and not is_component(value)
        return {name: redact(item, key if hidden else str(name)) for name, item in value.items()}
    if isinstance(value, list):
        return [redact(item, key) for item in value]
    if isinstance(value, str) and value:
        if names_secret(key):
            return _HIDDEN
        return _WEBHOOK.sub(rf"\1{_HIDDEN}", _URL_LOGIN.sub("***", value))
    return value


def redact_command(argv: Sequence[str]) -> list[str]:
    """The command line with the values of secret options hidden."""
    shown: list[str] = []
    hide_next = False
    for word in argv:
        option, equals, value = word.partition("=")
        if hide_next and not word.startswith("-"):
            shown.append(_HIDDEN)
            hide_next = False
            continue
        is_option = bool(equals) or word.startswith("-")
        hide_next = is_option and not equals and redact("x", option) == _HIDDEN
        shown.append(f"{option}={redact(value, option)}" if equals else redact(word))
    return shown


def versions() -> dict[str, str | None]:
    """Versions of Python, Headway and the packages that shape a result."""
    found: dict[str, str | None] = {"python": platform.python_version(), "headway": __version__}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state(directory: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files are changed; None outside a repository."""
    commit = _run(["git", "rev-parse", "HEAD"], directory)
    if commit is None:
        return None
    changes = _run(["git", "status", "--porcelain", "--untracked-files=no"], directory)
    return {"commit": commit, "dirty": None if changes is None else bool(changes)}


def hardware() -> dict[str, Any]:
    """Processor, memory and GPUs of this machine, asked without torch."""
    gpus = None
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        gpus = _run(query, Path.cwd())
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "num_cpus": os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "gpus": gpus.splitlines() if gpus else [],
    }


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one."""
    name = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    # With the rights that the user's umask leaves to new files, from the first byte on.
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, default=str)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException as error:
        name.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)  # a full disk does not tell which
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, Component):
        return {"class_path": value.class_path, "init_args": _plain(value.init_args)}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _run(command: list[str], directory: Path) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=directory, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
