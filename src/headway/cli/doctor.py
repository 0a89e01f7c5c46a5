"""`headway doctor`: what this machine has, and what to do about what it lacks.

Owns: the facts looked up and the list of known problems. Exit code 1 when something found will
stop training; a remark alone leaves it 0.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
from typing import Any

from headway.cli.launch import Ranks, add_launch_arguments, refuse_without_nproc

_EXTRAS = {
    "transformers": "transformers",
    "tokenizers": "tokenizers",
    "datasets": "datasets",
    "tensorboard": "tensorboard",
}
_NEEDED = ("torch", "numpy", "safetensors", "jsonargparse", "PyYAML", "tqdm", "rich", "xxhash")
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT",
    "MKL_NUM_THREADS", "NO_COLOR", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF", "RANK", "TOKENIZERS_PARALLELISM", "WORLD_SIZE",
)  # fmt: skip
_LITTLE_DISK_BYTES = 5 * 1024**3
_OLDEST_PYTHON = (3, 11)
_TORCH_RANGE = ((2, 11), (2, 16))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--cpu", action="store_true", help="with --nproc: leave accelerators alone")
    add_launch_arguments(parser, restarts=False)


def run(options: argparse.Namespace) -> int:
    """Print facts, problems and remarks."""
    from headway.cli.messages import print_json

    if options.nproc is None:
        refuse_without_nproc(options)
        facts = examine()
    else:
        from headway.cli.doctor_ranks import examine_ranks

        ranks = Ranks.from_options(options)
        facts = examine()
        facts["ranks"] = examine_ranks(ranks, use_cpu=options.cpu, quiet=options.quiet)
        facts["problems"] += facts["ranks"].pop("problems")
    if options.json:
        print_json(facts)
    else:
        _print(facts)
    return 1 if facts["problems"] else 0


def examine() -> dict[str, Any]:
    """Facts by name, with `problems` (training will fail) and `remarks` (it could be better)."""
    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": _num_cpus(),
        "packages": {name: _version(name) for name in _NEEDED},
        "extras": {name: _version(name) for name in _EXTRAS},
        "environment": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "disk": {"path": os.getcwd(), "free_bytes": shutil.disk_usage(os.getcwd()).free},
        "writable": os.access(os.getcwd(), os.W_OK),
        "accelerators": [],
        "bf16": None,
    }
    problems: list[str] = []
    facts.update(_ask_torch(problems))
    facts["problems"] = problems + _problems(facts)
    facts["remarks"] = _remarks(facts)
    return facts


def _num_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):  # a container may have fewer than the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask_torch(problems: list[str]) -> dict[str, Any]:
    try:
        import torch
    except Exception as error:
        problems.append(f"torch cannot be imported ({error}); install it anew: pip install torch")
        return {}
    cards = []
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(number)
            cards.append(
                {"device": f"cuda:{number}", "name": card.name, "memory_bytes": card.total_memory}
            )
        bf16 = torch.cuda.is_bf16_supported()
    elif torch.backends.mps.is_available():
        cards.append({"device": "mps", "name": "Apple GPU", "memory_bytes": None})
        bf16 = True
    else:
        bf16 = None
    return {
        "accelerators": cards,
        "bf16": bf16,
        "cuda_built_for": torch.version.cuda,
        "torch_threads": torch.get_num_threads(),
    }


def _problems(facts: dict[str, Any]) -> list[str]:
    problems = []
    if sys.version_info[:2] < _OLDEST_PYTHON:
        problems.append(f"Python {facts['python']} is too old; install 3.11 or newer")
    for name, version in facts["packages"].items():
        if version is None:
            problems.append(f"{name} is not installed; run: pip install headway")
    torch = facts["packages"]["torch"]
    if torch is not None:
        number = tuple(int(part) for part in torch.split("+")[0].split(".")[:2])
        low, high = _TORCH_RANGE
        if not low <= number < high:
            problems.append(
                f"torch {torch} is not supported; install one from {low[0]}.{low[1]} up to, "
                f"not including, {high[0]}.{high[1]}"
            )
    if facts.get("cuda_built_for") and not facts["accelerators"] and shutil.which("nvidia-smi"):
        problems.append(
            "there is an NVIDIA driver but torch sees no card; compare nvidia-smi's CUDA version "
            f"with torch's ({facts['cuda_built_for']}), and look at CUDA_VISIBLE_DEVICES"
        )
    world_size = facts["environment"].get("WORLD_SIZE", "1")
    if world_size not in ("", "1") and not facts["environment"].get("RANK"):
        problems.append(
            f"WORLD_SIZE={world_size} is set, but RANK is not: unset WORLD_SIZE, or start with a "
            "launcher, which sets both (headway train --nproc)"
        )
    return problems


def _remarks(facts: dict[str, Any]) -> list[str]:
    remarks = [
        f"{name} is absent; it comes with: pip install 'headway[{_EXTRAS[name]}]'"
        for name, version in facts["extras"].items()
        if version is None
    ]
    if not facts["accelerators"]:
        remarks.append("no accelerator: training runs on the CPU, which is fine for small models")
    if facts["bf16"] is False:
        remarks.append("this accelerator has no bfloat16 arithmetic; use float32 or fp16")
    threads, cpus = facts.get("torch_threads"), facts["cpus"]
    if threads and threads > cpus:
        remarks.append(f"{threads} threads on {cpus} CPUs are slow; set OMP_NUM_THREADS={cpus}")
    if facts["disk"]["free_bytes"] < _LITTLE_DISK_BYTES:
        remarks.append(
            f"little disk space in {facts['disk']['path']}: checkpoints go into args.output_dir, "
            f"which may be elsewhere; args.save_total_limit bounds them"
        )
    if not facts["writable"]:
        remarks.append(f"{facts['disk']['path']} is not writable; set args.output_dir elsewhere")
    return remarks


def _print(facts: dict[str, Any]) -> None:
    from headway.cli.messages import print_table, spell_bytes

    cards = [
        f"{card['device']}: {card['name']}"
        + (f", {spell_bytes(card['memory_bytes'])}" if card["memory_bytes"] else "")
        for card in facts["accelerators"]
    ]
    spell = {True: "yes", False: "no", None: "no accelerator"}
    rows = [
        ("python", f"{facts['python']} on {facts['system']}"),
        ("cpus", f"{facts['cpus']}, torch uses {facts.get('torch_threads', '?')} threads"),
        ("accelerators", "\n".join(cards) or "none"),
        ("bf16", spell[facts["bf16"]]),
        ("free disk", f"{spell_bytes(facts['disk']['free_bytes'])} in {facts['disk']['path']}"),
        ("packages", ", ".join(f"{n} {v or 'ABSENT'}" for n, v in facts["packages"].items())),
        ("extras", ", ".join(f"{n} {v or '(absent)'}" for n, v in facts["extras"].items())),
        ("environment", ", ".join(f"{n}={v}" for n, v in facts["environment"].items()) or "none"),
    ]
    print_table(rows)
    if "ranks" in facts:
        from headway.cli.doctor_ranks import print_ranks

        print_ranks(facts["ranks"])
    for text in facts["remarks"]:
        print(f"remark: {text}")
    for text in facts["problems"]:
        print(f"problem: {text}")
    if not facts["problems"]:
        print("ready to train")
