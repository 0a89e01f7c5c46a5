"""The GPU kernels where there is no GPU: their numbers, and that each compiles.

Each group of files runs in a process of its own: Triton reads TRITON_INTERPRET as it is imported,
and once imported it stays, with what torch does beside it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

HERE = Path(__file__).parent
# A build of torch for CPUs brings no Triton. Among the packages it would be loaded by torch in
# every process of every test, so it is kept in a folder beside them.
BESIDE = Path(sys.prefix) / "triton"


@pytest.fixture(scope="module")
def environ() -> dict[str, str]:
    """For a process that can import Triton, and sees no GPU where there is one."""
    paths = [os.environ.get("PYTHONPATH", "")]
    if importlib.util.find_spec("triton") is None:
        if not (BESIDE / "triton").is_dir():
            reason = f"Triton is neither installed nor in {BESIDE} (pip install --target)"
            if os.environ.get("HEADWAY_NEEDS_TRITON"):
                pytest.fail(reason)
            pytest.skip(reason)
        paths.insert(0, str(BESIDE))
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}


def run_tests(environ: dict[str, str], *names: str) -> None:
    files = [str(HERE / name) for name in names]
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", *files]
    made = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=380)
    assert made.returncode == 0, made.stdout[-8000:] + made.stderr[-2000:]


@pytest.mark.timeout(400)
def test_interpreted_kernels_compute_what_the_plain_forms_do(environ: dict[str, str]) -> None:
    if str(BESIDE) not in environ["PYTHONPATH"]:
        installed = importlib.metadata.version("triton")
        if Version(installed) < Version("3.7"):
            pytest.skip(f"the interpreter of Triton {installed} fails with numpy since 2.4")
    environ = {**environ, "TRITON_INTERPRET": "1"}
    names = ("models", "flash4", "adamw", "stochastic", "swiglu_fp8")
    run_tests(environ, *(f"interpreted_{name}.py" for name in names))


@pytest.mark.timeout(400)
def test_kernels_compile_for_gpus_that_are_not_here(
    environ: dict[str, str], tmp_path: Path
) -> None:
    environ = {**environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run_tests(environ, "compiled.py", "compiled_swiglu_fp8.py")
