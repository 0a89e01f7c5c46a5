"""Which process a rank is, and whether it still lives, as far as that can be seen from here.

Owns: the identity of a process that other processes of the same machine can look up.
Does not own: what follows from a death (watch.py).
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

State = Literal["running", "stopped", "gone"]


@dataclass(frozen=True)
class ProcessIdentity:
    """A process, told apart from a later one that was given the same number."""

    pid: int
    host: str
    place: str
    """The machine as booted and the space of process numbers; empty where neither can be told."""
    started: str
    """When the process began, in the words of the operating system."""

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> ProcessIdentity:
        return cls(fields["pid"], fields["host"], fields["place"], fields["started"])


def identify(pid: int | None = None) -> ProcessIdentity:
    """The identity of a process of this machine, by default of this one."""
    number = os.getpid() if pid is None else pid
    try:
        stat = _read_stat(number)
    except OSError:
        stat = None
    return ProcessIdentity(number, socket.gethostname(), _place(), stat[1] if stat else "")


def look_at(process: ProcessIdentity) -> State | None:
    """What the process is doing; None where it cannot be seen: on another machine, not on Linux, or
    because this process has no file descriptor left to look with."""
    if not process.place or not process.started or process.place != _place():
        return None
    try:
        stat = _read_stat(process.pid)
    except OSError:
        return None
    if stat is None or stat[1] != process.started or stat[0] in "ZXx":
        return "gone"
    return "stopped" if stat[0] == "T" else "running"


def time_used_s(process: ProcessIdentity) -> float:
    """For how long all threads of a process have computed so far; 0 where that cannot be seen."""
    if look_at(process) != "running":
        return 0.0
    try:
        stat = _read_stat(process.pid)
    except OSError:
        return 0.0
    return stat[2] / os.sysconf("SC_CLK_TCK") if stat else 0.0


def _read_stat(pid: int) -> tuple[str, str, int] | None:
    """State, start and ticks used of a process, from the kernel's table; None where it has none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name of the program comes second, in brackets, and may hold anything.
    fields = text.rpartition(")")[2].split()
    return (fields[0], fields[19], int(fields[11]) + int(fields[12])) if len(fields) > 19 else None


@cache
def _place() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
