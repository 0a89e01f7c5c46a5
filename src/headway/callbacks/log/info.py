"""What is about to be trained, told on the console."""

from __future__ import annotations

import sys
from typing import Any

from headway.callbacks.log.train_info import format_mapping, format_train_info
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError


class InfoCallback(TrainerCallback):
    """Prints what a run is when it begins: sizes, batches, precision, ranks, hardware, versions.

    `verbose` adds all arguments, the optimizer, the data and the model in full. Nothing of that is
    put together otherwise.
    """

    failure_policy = "disable"

    def __init__(self, verbose: bool = False) -> None:
        if not isinstance(verbose, bool):
            raise ConfigError(f"InfoCallback: verbose must be true or false, got {verbose!r}")
        self.verbose = verbose

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        info, extra = format_train_info(args, state, with_extra=self.verbose, **parts)
        text = format_mapping({key: value for key, value in info.items() if value is not None})
        if extra:
            text += "\n" + format_mapping(extra)
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
