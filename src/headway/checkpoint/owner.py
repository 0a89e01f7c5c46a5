"""Which process a temporary name belongs to, and whether that process still lives.

Owns: the nonce in names such as `checkpoint-5.tmp-<nonce>`. A nonce is
`<machine>-<pid>-<start time>-<random>`; machine covers host name, boot and process namespace, so a
process id is compared only where it means the same process.
Does not own: what is done with leftovers (leftovers.py).
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path
from typing import Literal

from headway.checkpoint.digest import digest_bytes

OwnerState = Literal["alive", "dead", "elsewhere"]

NONCE_PATTERN = r"[0-9a-f]{8}-\d+-\d+-[0-9a-f]+"


def _machine() -> str:
    facts = [socket.gethostname()]
    try:
        facts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        facts.append(os.readlink("/proc/self/ns/pid"))
    except OSError:
        pass  # not Linux: the host name alone has to do
    return digest_bytes("\n".join(facts).encode(), "xxh3_128")[:8]


def _start_time(pid: int) -> int:
    """Start time of a process in clock ticks since boot; 0 where the system does not tell."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    # The command name, in parentheses, may itself hold blanks and parentheses.
    return int(stat.rpartition(")")[2].split()[19])


def new_nonce() -> str:
    """A name part that is unique and tells that it belongs to this process."""
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_start_time(pid)}-{secrets.token_hex(4)}"


def owner_state(nonce: str) -> OwnerState:
    """Whether the process that made `nonce` lives; `elsewhere` if that cannot be seen from here."""
    machine, pid_text, start_text, _ = nonce.split("-", 3)
    if machine != _machine():
        return "elsewhere"
    pid = int(pid_text)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "dead"
    except PermissionError:
        pass  # it exists and belongs to another user
    return "alive" if _start_time(pid) == int(start_text) else "dead"
