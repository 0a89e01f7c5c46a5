"""A process is told from a later one of the same number, and its end is seen."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, replace

import pytest

from headway.dist.processes import ProcessIdentity, identify, look_at

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's table")


def test_a_process_is_seen_running_stopped_and_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        identity = ProcessIdentity.from_json(json.loads(json.dumps(asdict(identify(child.pid)))))
        assert look_at(identity) == "running"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert look_at(identity) == "stopped"
    finally:
        child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert look_at(identity) == "gone", "dead, though its parent has not taken note of it"
    child.wait()
    assert look_at(identity) == "gone"


def test_a_number_given_anew_and_another_machine_are_not_mistaken_for_it() -> None:
    own = identify()
    assert look_at(own) == "running"
    assert look_at(replace(own, started="1")) == "gone"
    assert look_at(replace(own, place="another boot of another machine")) is None


def test_a_process_is_not_gone_because_no_file_can_be_opened() -> None:
    own = identify()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    # As in a process that has used up what it may open, if only for a moment.
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        seen = look_at(own)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert seen is None
    assert look_at(own) == "running"
