"""What a checkpoint costs: saving against writing the same bytes raw, loading against reading them.

Decoders of three sizes with AdamW state, each ten times the one before. The goals are those of the
middle one, a checkpoint of some hundred MiB; the small one shows what does not depend on the size,
the large one that nothing grows faster than the bytes. Each round every system takes its turn, so
that a slow moment of the machine hits them alike; the figure of each is its best round, and the
ratios are between figures of one run. `raw` writes files of the sizes that Headway writes, synced,
and reads them back once, by one thread, into memory that is there already. Reads are cold (the
pages dropped before) and warm. With a CUDA device also: how long a save holds up training, against
the copy of the same bytes to page-locked memory, and the ten steps after it.

    python benchmarks/checkpoint.py [--rounds 5] [--params-m 30] [--folder DIR] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from headway.checkpoint import CheckpointContents, CheckpointManager
from headway.checkpoint.background import BackgroundSaver
from headway.models import Decoder, DecoderConfig

GPU_DECODER = DecoderConfig(
    vocab_size=32768,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
)
NUM_STEPS_AFTER = 10


def make_state(num_params_m: float, device: str = "cpu") -> tuple[nn.Module, torch.optim.AdamW]:
    """A decoder of about so many million parameters, its optimizer with moments."""
    torch.manual_seed(0)
    # Models grow in width and depth: ten times the parameters are twice the width.
    hidden = int(256 * 2 ** round(math.log10(num_params_m / 30)))
    config = DecoderConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_layers=max(1, round(num_params_m * 1e6 / (16 * hidden**2))),
        num_heads=4,
    )
    model = Decoder(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def timed(act: Callable[[], Any]) -> float:
    gc.collect()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def drop_pages(folder: Path) -> None:
    """Have the system forget the content of files, so that reading them goes to the disk."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Raw:
    """Files of given sizes and nothing else."""

    def __init__(self, sizes: list[int]) -> None:
        self._sizes = sizes
        self._buffer = memoryview(bytearray(os.urandom(1 << 20) * (max(sizes) // (1 << 20) + 1)))

    def save(self, folder: Path) -> None:
        folder.mkdir()
        for number, size in enumerate(self._sizes):
            path = folder / str(number)
            with path.open("wb", buffering=0) as file:
                view = self._buffer[:size]
                while view.nbytes:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
        sync(folder)
        sync(folder.parent)

    def load(self, folder: Path) -> None:
        for number, size in enumerate(self._sizes):
            with (folder / str(number)).open("rb", buffering=0) as file:
                view = self._buffer[:size]
                while view.nbytes:
                    view = view[file.readinto(view) :]


class Headway:
    """A whole save, and a load with every digest checked."""

    def __init__(self, contents: CheckpointContents, root: Path) -> None:
        self._contents = contents
        self.manager = CheckpointManager(root, save_total_limit=None)
        self.manager.reserve(contents)
        self._step = 0

    def save(self, folder: Path) -> None:
        self._step += 1
        self.manager.save(self._contents, self._step).rename(folder)

    def load(self, folder: Path) -> None:
        self.manager.load(self._contents, folder)


class TorchSave:
    """`torch.save` of both state dicts, synced."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def save(self, folder: Path) -> None:
        folder.mkdir()
        state = {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}
        with (folder / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        sync(folder)

    def load(self, folder: Path) -> None:
        state = torch.load(folder / "state.pt", weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])


class Dcp:
    """`torch.distributed.checkpoint`, which syncs its files by default."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> None:
        dcp.save(self._state(), checkpoint_id=folder, no_dist=True)

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder, no_dist=True)
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def measure(
    num_params_m: float, folder: Path, rounds: int, names: list[str]
) -> tuple[int, dict[str, dict[str, float]]]:
    """Best times of saving and loading by system, and the bytes of a checkpoint."""
    model, optimizer = make_state(num_params_m)
    headway = Headway(CheckpointContents(model, optimizer), folder / "run")
    first = folder / "first"
    headway.save(first)
    sizes = [path.stat().st_size for path in first.rglob("*") if path.is_file()]
    shutil.rmtree(first)
    systems: dict[str, Any] = {
        "raw": Raw(sizes),
        "headway": headway,
        "torch.save": TorchSave(model, optimizer),
        "DCP": Dcp(model, optimizer),
    }
    times: dict[str, dict[str, list[float]]] = {}
    for _ in range(rounds):
        for name in names:
            system, place = systems[name], folder / "checkpoint"
            os.sync()
            mine = times.setdefault(name, {"save": [], "cold": [], "warm": []})
            mine["save"].append(timed(lambda system=system, place=place: system.save(place)))
            drop_pages(place)
            mine["cold"].append(timed(lambda system=system, place=place: system.load(place)))
            mine["warm"].append(timed(lambda system=system, place=place: system.load(place)))
            shutil.rmtree(place)
    best = {name: {k: min(v) for k, v in mine.items()} for name, mine in times.items()}
    return sum(sizes), best


def measure_gpu() -> list[str]:
    """How long a save holds up training on the device."""
    torch.manual_seed(0)
    model = Decoder(GPU_DECODER).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, GPU_DECODER.vocab_size, (4, 1024), device="cuda")
    folder = Path(tempfile.mkdtemp(prefix="headway-"))
    contents = CheckpointContents(model, optimizer)
    manager = CheckpointManager(folder, save_total_limit=1)
    saver = BackgroundSaver(manager)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(ids, labels=ids).loss
        loss.backward()
        manager.wait_before_update()
        optimizer.step()
        optimizer.zero_grad()

    def timed_step(before: Callable[[], Any] | None = None) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        if before is not None:
            before()
        step()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(5):
        step()
    manager.reserve(contents)
    state = [t for s in optimizer.state.values() for t in s.values() if t.is_cuda]
    tensors = [*model.state_dict().values(), *state]
    num_bytes = sum(t.numel() * t.element_size() for t in tensors)
    copy_s = min(time_pinned_copy(tensors) for _ in range(3))
    usual_s = statistics.median(timed_step() for _ in range(20))
    stalls, after = [], []
    for number in range(3):
        saving_s = timed_step(
            lambda number=number: saver.start(manager.stage(contents, number + 1))
        )
        stalls.append(saving_s - usual_s)
        after.append(statistics.mean(timed_step() for _ in range(NUM_STEPS_AFTER)))
        saver.collect()
    shutil.rmtree(folder)
    stall_s, after_s = min(stalls), min(after)
    gib = num_bytes / 2**30
    return [
        f"- state on the device: {gib:.1f} GiB; step {usual_s * 1e3:.1f} ms",
        f"- page-locked copy of it: {copy_s:.3f} s",
        f"- stall of a save: {stall_s:.3f} s, {stall_s / copy_s:.2f} times the copy (goal 1.3)",
        f"- ten steps after it: {100 * (after_s / usual_s - 1):+.1f} % (goal 3 %)",
    ]


def time_pinned_copy(tensors: list[torch.Tensor]) -> float:
    """Copy tensors to page-locked memory, made before and used again, as fast as it goes."""
    most = max(t.numel() * t.element_size() for t in tensors)
    target = torch.empty(most, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    began = time.perf_counter()
    for tensor in tensors:
        flat = tensor.detach().reshape(-1).view(torch.uint8)
        target[: flat.numel()].copy_(flat, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


GOALS = {"save": 1.25, "cold": 1.3, "warm": 1.3}


def table(num_bytes: int, times: dict[str, dict[str, float]], *, has_goals: bool) -> list[str]:
    kind = "the size the goals are for" if has_goals else "for comparison"
    lines = [
        f"**{num_bytes / 2**20:.0f} MiB a checkpoint** ({kind})",
        "",
        "| | save, s | x raw | load cold, s | x raw | load warm, s | x raw |",
        "|---|---|---|---|---|---|---|",
    ]
    raw = times["raw"]
    for name, mine in times.items():
        cells = [f"{mine[k]:.3f} | {mine[k] / raw[k]:.2f}" for k in GOALS]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    goals = " | ".join(f"| {goal}" for goal in GOALS.values())
    return [*lines, f"| goal for headway | {goals} |", ""]


def measure_cpu(options: argparse.Namespace) -> list[str]:
    everyone = ["raw", "headway", "torch.save", "DCP"]
    lines: list[str] = []
    saves: list[tuple[int, float]] = []
    for factor in (0.1, 1, 10):
        is_goal = factor == 1
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            num_bytes, times = measure(
                factor * options.params_m,
                Path(folder),
                options.rounds,
                everyone if is_goal else everyone[:2],
            )
        lines += table(num_bytes, times, has_goals=is_goal)
        saves.append((num_bytes, times["headway"]["save"]))
    for (small_bytes, small_s), (large_bytes, large_s) in itertools.pairwise(saves):
        lines.append(
            f"- {large_bytes / small_bytes:.1f} times the bytes cost {large_s / small_s:.1f} times "
            f"the save, from {small_bytes / 2**20:.0f} to {large_bytes / 2**20:.0f} MiB "
            "(goal 11 for ten)"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--params-m", type=float, default=30.0, help="parameters of the middle model, in millions"
    )
    parser.add_argument("--folder", default=".", help="where to write; must be on a real disk")
    parser.add_argument("--gpu-only", action="store_true")
    parser.add_argument("--write", action="store_true", help="add to benchmarks/results")
    options = parser.parse_args()
    lines = [] if options.gpu_only else measure_cpu(options)
    if torch.cuda.is_available():
        lines += ["", f"{torch.cuda.get_device_name()}, AdamW of 1.1 B parameters:", ""]
        lines += measure_gpu()
    lines += ["", f"{platform.platform()}, {os.cpu_count()} cores, torch {torch.__version__}, "]
    lines[-1] += f"{options.rounds} rounds, best of each."
    print("\n".join(lines))
    if options.write:
        date = datetime.date.today().isoformat()
        path = Path(__file__).parent / "results" / f"checkpoint-{date}.md"
        head = f"# Cost of a checkpoint, {date}\n\n`python benchmarks/checkpoint.py`\n\n"
        path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
