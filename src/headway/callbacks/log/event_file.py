"""A TensorBoard event file that is written in the background and marks where a session starts.

Owns: the file's name (which decides the order in which TensorBoard reads a folder), its records
and the session marks. Does not own: what a summary looks like (torch), nor when a run starts.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.callbacks.remote.sender import Sender

_PREFIX = "events.out.tfevents."
_CAPACITY = 20_000
_WAIT_S = 10.0


class EventFile:
    """Takes the place of TensorBoard's own event file writer below a `SummaryWriter`.

    Its own writer names files by the second, so that two sessions within one second, or on
    machines whose clocks differ, may be read in the wrong order; here a new file always comes last.
    """

    def __init__(self, log_dir: str) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._log_dir = log_dir
        folder = Path(log_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / _next_name(folder)
        self._file = open(self.path, "xb")  # noqa: SIM115 - lives as long as the writer
        self._records = RecordWriter(self._file)
        self._sender = Sender("TensorBoard", _CAPACITY)
        self.add_event(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self.flush()

    def get_logdir(self) -> str:
        return self._log_dir

    def add_event(self, event: Any) -> None:
        data = event.SerializeToString()
        self._make_room()
        self._sender.submit(lambda: self._records.write(data))

    def add_step(self, step: int, figures: Mapping[str, float]) -> None:
        """Figures of a step by tag, as one event; it is put together in the background."""
        wall_time = time.time()
        self._make_room()
        self._sender.submit(lambda: self._write_step(step, figures, wall_time))

    def _write_step(self, step: int, figures: Mapping[str, float], wall_time: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=n) for tag, n in figures.items()]
        event = Event(wall_time=wall_time, step=step, summary=Summary(value=values))
        self._records.write(event.SerializeToString())

    def mark_start(self, step: int) -> None:
        """Tell readers that nothing from `step` on, in this folder, has happened so far.

        TensorBoard takes the first mark that it sees in a folder for the start of all and drops
        nothing; the second one counts in any case.
        """
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        for _ in range(2):
            self.add_event(
                Event(
                    wall_time=time.time(),
                    step=step,
                    session_log=SessionLog(status=SessionLog.START),
                )
            )

    def flush(self) -> None:
        """Have everything in the file, so that the end of this process cannot lose it."""
        self._make_room()
        self._sender.submit(self._file.flush, must_arrive=True)
        self._sender.drain(_WAIT_S)

    def _make_room(self) -> None:
        # A file keeps up but for bursts; only a disk that hangs may cost a value.
        if self._sender.num_waiting >= _CAPACITY:
            self._sender.drain(_WAIT_S)

    def close(self) -> None:
        if self._sender.close(_WAIT_S):
            self._file.close()

    def reopen(self) -> None:
        """Nothing to do: a `SummaryWriter` makes a new file after `close`."""


def open_writer(log_dir: str, on_open: Callable[[str, EventFile], None]) -> Any:
    """A torch `SummaryWriter` over event files of ours; `on_open` hears of each folder and file.

    `add_scalars` has a file of its own, in a folder below, for each of its curves.
    """
    from torch.utils.tensorboard.summary import scalar
    from torch.utils.tensorboard.writer import FileWriter, SummaryWriter

    class Files(FileWriter):
        def __init__(self, folder: str) -> None:
            self.event_writer = EventFile(folder)
            on_open(folder, self.event_writer)

    class Writer(SummaryWriter):
        file_writer: Any
        all_writers: Any

        def _get_file_writer(self) -> Any:
            if self.file_writer is None or self.all_writers is None:
                self.file_writer = Files(log_dir)
                self.all_writers = {log_dir: self.file_writer}
            return self.file_writer

        def add_scalars(
            self,
            main_tag: str,
            tag_scalar_dict: Mapping[str, Any],
            global_step: int | None = None,
            walltime: float | None = None,
        ) -> None:
            self._get_file_writer()
            walltime = time.time() if walltime is None else walltime
            for tag, value in tag_scalar_dict.items():
                folder = f"{log_dir}/{main_tag.replace('/', '_')}_{tag}"
                if folder not in self.all_writers:
                    self.all_writers[folder] = Files(folder)
                summary = scalar(main_tag, value)
                self.all_writers[folder].add_summary(summary, global_step, walltime)

        def add_step(self, step: int, figures: Mapping[str, float]) -> None:
            self._get_file_writer().event_writer.add_step(step, figures)

    return Writer(log_dir)


def _next_name(folder: Path) -> str:
    """A name that sorts after those of all event files in the folder."""
    latest_s = 0
    for path in folder.glob(f"{_PREFIX}*"):
        stamp = path.name.removeprefix(_PREFIX).split(".")[0]
        if stamp.isdecimal():
            latest_s = max(latest_s, int(stamp))
    stamp_s = max(int(time.time()), latest_s + 1)
    return f"{_PREFIX}{stamp_s:010d}.{socket.gethostname()}.{os.getpid()}.0"
