"""Proof that a command does its work without importing an expensive module.

Owns: running Python in a subprocess where importing one module is fatal.
Does not own: the list of modules that must stay light (tests/unit/test_structure.py).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

_EXIT_CODE = 97

# Python runs a module of this name at its start, before any import of the code under test.
# The process ends on the spot, because an ImportError could be caught and so go unseen.
_HOOK = """\
import os, sys, traceback

class _Guard:
    def find_spec(self, name, path=None, target=None):
        if name != {module!r} and not name.startswith({module!r} + "."):
            return None
        frames = [
            frame
            for frame in traceback.extract_stack()
            if "importlib" not in frame.filename and frame.filename != __file__
        ]
        with open({report!r}, "w") as report:
            report.write("".join(traceback.format_list(frames)))
        os._exit({code})

sys.meta_path.insert(0, _Guard())
"""


def assert_no_import(
    code_or_argv: str | Sequence[str],
    module: str = "torch",
    *,
    returncode: int | None = 0,
    timeout_s: float = 60,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python code, or a command, and fail if it imports `module` anywhere on the way.

    A string is code for `python -c`; a sequence is a command line, whose first word may be
    'python' or a script installed beside this interpreter ('headway'). `returncode` is the exit
    code to expect (None: any). Returns the finished process with `stdout` and `stderr` as text.
    """
    if isinstance(code_or_argv, str):
        argv = [sys.executable, "-c", code_or_argv]
    else:
        argv = [_find_program(code_or_argv[0]), *code_or_argv[1:]]
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory, "report.txt")
        hook = _HOOK.format(module=module, report=str(report), code=_EXIT_CODE)
        Path(directory, "sitecustomize.py").write_text(hook)
        environ = {**os.environ, **(env or {})}
        paths = [directory, environ.get("PYTHONPATH", "")]
        environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=timeout_s, cwd=cwd, env=environ
        )
        if report.exists():
            raise AssertionError(f"{module!r} was imported by {argv}, from:\n{report.read_text()}")
    if returncode is not None and done.returncode != returncode:
        raise AssertionError(
            f"{argv} ended with exit code {done.returncode}, expected {returncode}\n"
            f"stdout:\n{done.stdout}\nstderr:\n{done.stderr}"
        )
    return done


def _find_program(name: str) -> str:
    if name == "python":
        return sys.executable
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name
