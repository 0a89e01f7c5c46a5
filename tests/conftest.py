"""What every test runs under: no network, one thread, and a process left as it was found."""

from __future__ import annotations

import os
import random
import sys
import tracemalloc
from collections.abc import Iterator

# Before any import of torch or transformers, which read these once.
os.environ.update(
    {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "DO_NOT_TRACK": "1",
        "WANDB_MODE": "disabled",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
)
# Hundreds of processes, and every worker: none of them should compile all sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# A launcher around the test run must not make single-process tests believe they are ranks.
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
    os.environ.pop(_name, None)
for _name in [name for name in os.environ if name.startswith("SLURM_")]:
    del os.environ[_name]

import numpy as np  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)


_LONGEST = ("test_docs.py", "faults", "parity", "e2e", "contract", "dist", "browser")


def _deal(items: list[pytest.Item]) -> list[pytest.Item]:
    """Files to each worker in turn, and pages one by one, those that take longest first.

    Workers begin with equal stretches of the list, and one that is done takes from another's end:
    what takes a minute must not be there.
    """
    parts: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_page = item.path.name == "test_docs.py"
        parts.setdefault(item.nodeid if is_page else str(item.path), []).append(item)

    def length(part: list[pytest.Item]) -> int:
        named = [n for n, name in enumerate(_LONGEST) if name in part[0].path.parts]
        return named[0] if named else len(_LONGEST)

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    hands: list[list[pytest.Item]] = [[] for _ in range(workers)]
    for part in sorted(parts.values(), key=length):
        min(hands, key=len).extend(part)
    return [item for hand in hands for item in hand]


@pytest.hookimpl(trylast=True)  # after those that are not wanted are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = _deal(items)
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        # Several processes that each import torch: slow to start on a busy machine.
        slow = {"dist", "faults", "e2e"} & set(item.path.parts)
        if slow and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(400))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Environment, generators, default dtype and process groups are as before after each test."""
    environ = dict(os.environ)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    traced = tracemalloc.is_tracing()
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if tracemalloc.is_tracing() and not traced:
        tracemalloc.stop()  # a callback leaves it on where ending it beside threads is not safe
    torch.set_default_dtype(dtype)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    # pytest's own note of the running test is pytest's to change.
    environ.pop("PYTEST_CURRENT_TEST", None)
    os.environ.update(environ)
