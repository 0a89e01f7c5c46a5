"""The configuration of an experiment, inside every checkpoint."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from headway.callbacks.log.json_values import plain_value
from headway.config.snapshot import git_state, redact, redact_command, resolved_config, versions
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

FOLDER = "experiment"
_ENVIRONMENT = "environment.json"
_DATA_PATHS = "data_paths.txt"


class ConfigSaverCallback(TrainerCallback):
    """Puts the configuration, the code's revision and the data's paths into each checkpoint.

    They are written with the checkpoint, before it counts as complete, to `run/experiment/`:
    `fname` holds `config` (or, where none was set, the run's own), `environment.json` the commit
    and the versions of all packages, `data_paths_fname` the files of the data. Values under names
    such as `api_key` or `webhook` are hidden. `save_data_paths`: None writes the paths where the
    data tells them, True warns where it does not, False leaves them out.

    Other callbacks that take a `config` and got none, such as trackers, get this one.
    """

    failure_policy = "disable"
    priority = 10
    """Before the callbacks that are given the configuration use it."""

    def __init__(
        self,
        fname: str = "config.json",
        save_data_paths: bool | None = None,
        data_paths_fname: str | None = None,
    ) -> None:
        if save_data_paths is not None and not isinstance(save_data_paths, bool):
            raise ConfigError(
                f"ConfigSaverCallback: save_data_paths must be true, false or None, "
                f"got {save_data_paths!r}"
            )
        self.fname = _check_name("fname", fname)
        self.save_data_paths = save_data_paths
        self.data_paths_fname = _check_name("data_paths_fname", data_paths_fname or _DATA_PATHS)
        if len({self.fname, self.data_paths_fname, _ENVIRONMENT}) < 3:
            raise ConfigError(
                f"ConfigSaverCallback: fname {self.fname!r} and data_paths_fname "
                f"{self.data_paths_fname!r} must differ from each other and from {_ENVIRONMENT!r}"
            )
        self._config: dict[str, Any] | None = None
        self._trainer: Any = None
        self._environment: Future[dict[str, Any]] | None = None
        self._told = False

    @property
    def config(self) -> dict[str, Any] | None:
        """What is saved; None: the run's own configuration."""
        return self._config

    @config.setter
    def config(self, config: Mapping[str, Any]) -> None:
        if not isinstance(config, Mapping):
            raise ConfigError(
                f"ConfigSaverCallback: config must be a mapping, got {type(config).__name__}"
            )
        self._config = plain_value(config)
        self._hand_on()

    def on_init_end(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self._trainer = trainer
        for callback in trainer.callbacks.values():
            if callback is not self and isinstance(callback, ConfigSaverCallback):
                raise ConfigError(
                    "ConfigSaverCallback: there are two of them, and both would write "
                    f"{FOLDER}/{_ENVIRONMENT}; one is enough"
                )
        self._hand_on()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        # Looking at every installed package takes a second or more; the first save is later.
        if state.is_world_process_zero and self._environment is None:
            self._environment = _begin(_describe_environment)

    def checkpoint_files(self, args: Any, state: TrainerState) -> dict[str, str]:
        """What goes into the checkpoint that is being written."""
        config = self._config
        if config is None:
            run = getattr(self._trainer, "_run_config", None)
            config = resolved_config(run) if run is not None else {"args": args.to_dict()}
        if self._environment is None:
            self._environment = _begin(_describe_environment)
        files = {
            self.fname: _json_text(redact(plain_value(config))),
            _ENVIRONMENT: _json_text(self._environment.result()),
        }
        paths = self._find_paths() if self.save_data_paths is not False else []
        if paths:
            files[self.data_paths_fname] = "".join(f"{path}\n" for path in paths)
        return {f"{FOLDER}/{name}": text for name, text in files.items()}

    def _find_paths(self) -> list[str]:
        datasets = (
            getattr(self._trainer, name, None) for name in ("train_dataset", "eval_dataset")
        )
        found = list(dict.fromkeys(path for one in datasets for path in _data_paths(one)))
        if not found and self.save_data_paths and not self._told:
            self._told = True
            logger.warning("ConfigSaverCallback: save_data_paths: the data does not tell its files")
        return found

    def _hand_on(self) -> None:
        if self._trainer is None or self._config is None:
            return
        for callback in self._trainer.callbacks.values():
            if callback is not self and getattr(callback, "config", self) is None:
                callback.config = redact(self._config)


def _data_paths(dataset: Any) -> Iterator[str]:
    if dataset is None:
        return
    files = getattr(dataset, "files", None)
    for file in files if isinstance(files, list | tuple) else ():
        path = getattr(file, "path", file)
        if isinstance(path, str | Path):
            yield str(path)
    for name in ("sources", "datasets", "dataset"):  # mixtures and torch's wrappers
        inner = getattr(dataset, name, None)
        for part in inner if isinstance(inner, list | tuple) else [inner]:
            if part is not dataset:
                yield from _data_paths(part)


def _begin(call: Callable[[], dict[str, Any]]) -> Future[dict[str, Any]]:
    """Call it in a thread that does not keep the process from exiting."""
    result: Future[dict[str, Any]] = Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=work, name="headway-environment", daemon=True).start()
    return result


def _describe_environment() -> dict[str, Any]:
    packages = {
        distribution.metadata["Name"]: distribution.version
        for distribution in importlib.metadata.distributions()
        if distribution.metadata["Name"]
    }
    return {
        "command": redact_command(sys.argv),
        "git": git_state(Path.cwd()),
        "headway_git": git_state(Path(__file__).parent),
        "versions": versions(),
        "packages": dict(sorted(packages.items(), key=lambda entry: entry[0].lower())),
    }


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _check_name(option: str, name: Any) -> str:
    if not isinstance(name, str) or not name or Path(name).name != name:
        raise ConfigError(
            f"ConfigSaverCallback: {option} must be the name of a file without a folder, "
            f"got {name!r}"
        )
    return name
