"""From the shell command `headway train` to the first optimizer step, and what takes that long.

Writes a run file and random tokens, and runs `headway train` in a process of its own: first with an
empty compile cache, then again with the one that the first left. The job is a Llama of 1.1 billion
parameters (2,048 wide, 16 layers, 32 heads, 8 key-value heads, ffn 8,192, vocabulary 32,768) on
4,096 tokens x 4, bf16 autocast, fused AdamW, clip 1.0, compiled; `--tiny` is a small one on a CPU.

The total is measured from outside: from before the process is started to the end of the first step
on the device. The phases are those that `headway train` tells. After it, `--steps` more steps
give the time of a step. Each row of the table is a process; those in `--compare` are run last, each
with an empty cache of its own: the whole model compiled at once, and weights drawn on the host.
`--saves` adds a run that will save once, at its end: the memory for that is brought in by a thread
after the first step, and the column "slowest" tells whether a later step had to wait for it.

`--tree` runs once more with a warm cache and shows in which calls the time to the first step went
(start_samples.py); `--imports` does it for modules. `--probe` times what no trainer can do without,
each in a process of its own: Python, torch, its compiler, the driver, the first product on the
device, memory for saves, and whether a thread could make the context during the imports.

    python benchmarks/cold_start.py [--tiny] [--steps 30] [--rounds 1] [--compare] [--saves]
        [--tree] [--imports] [--probe] [--set args.key=value ...] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from start_samples import call_tree

JOB = {
    "model": {
        "vocab_size": 32_768,
        "hidden_size": 2_048,
        "num_layers": 16,
        "num_heads": 32,
        "num_kv_heads": 8,
        "intermediate_size": 8_192,
        "max_seq_len": 4_096,
    },
    "length": 4_096,
    "batch": 4,
    "args": {"mixed_precision": "bf16"},
}
TINY = {
    "model": {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 64,
        "max_seq_len": 64,
    },
    "length": 64,
    "batch": 4,
    "args": {"use_cpu": True},
}
COMMON = {
    "torch_compile": True,
    "torch_compile_dynamic": False,
    "construct_model_on": "device",
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "lr_scheduler_type": "cosine",
    "learning_rate": 3e-4,
    "logging_steps": 10,
    "save_strategy": "no",
    "seed": 0,
}
# Wall-clock times, since two processes compare them.
CALLBACK = '''
import json, time
import torch
from headway import TrainerCallback


class Marks(TrainerCallback):
    """Writes when the first step was done on the device, and how long the later ones took."""

    def __init__(self, path: str, warm_up: int) -> None:
        self.path, self.warm_up, self.first_s, self.since_s = path, warm_up, 0.0, 0.0
        self.first_cpu_s = self.last_s = self.slowest_s = 0.0
        self.peak_bytes = 0

    def on_step_end(self, state) -> None:
        now_s = time.perf_counter()
        if state.global_step > 2:  # nothing waits for the device here
            self.slowest_s = max(self.slowest_s, now_s - self.last_s)
        self.last_s = now_s
        if state.global_step == 1:
            self.first_s, self.first_cpu_s = self._now(), time.process_time()
        elif state.global_step == self.warm_up:
            self.since_s = self._now()

    def on_metrics(self, step) -> None:
        self._note_peak()  # before the loop resets it for its next record

    def _note_peak(self) -> None:
        if torch.cuda.is_available():
            self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated())

    def on_train_end(self, state) -> None:
        steps = max(1, state.global_step - self.warm_up)
        found = {"first_s": self.first_s, "step_ms": (self._now() - self.since_s) / steps * 1e3}
        found.update(first_cpu_s=self.first_cpu_s, slowest_ms=self.slowest_s * 1e3)
        if torch.cuda.is_available():
            self._note_peak()
            found["peak_gib"] = self.peak_bytes / 2**30
            found["device"] = torch.cuda.get_device_name()
        from torch._dynamo.utils import counters
        found["graphs"] = counters["stats"]["unique_graphs"]
        found["caches"] = {
            name: {key: count for key, count in counters[name].items() if "cache" in key}
            for name in ("inductor", "aot_autograd")
        }
        with open(self.path, "w") as file:
            json.dump(found, file)

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.time()
'''
WARM_UP = 6
_DRIVER = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
assert cuda.cuInit(0) == 0
"""
_CONTEXT = "context = ctypes.c_void_p(); assert not "
_CONTEXT += "cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)"
# What is done first in a process, and then timed.
PROBES = {
    "Python": ("", ""),
    "import torch": ("", "import torch"),
    "the compiler, after torch": ("import torch", "import torch._dynamo"),
    "its code generator, after that": ("import torch._dynamo", "import torch._inductor.compile_fx"),
    "Headway, after torch": ("import torch._dynamo", "import headway.trainers.from_config"),
}
DEVICE_PROBES = {
    "the driver": ("", _DRIVER),
    "a context, after the driver": (_DRIVER, _CONTEXT),
    "the first tensor, after torch": ("import torch", "torch.zeros(1, device='cuda').item()"),
    "the first product, after that": (
        "import torch; x = torch.ones(64, 64, device='cuda')",
        "(x @ x).sum().item()",
    ),
    "triton": ("import torch", "import triton"),
}
_IMPORTS = "import torch, torch._dynamo, torch._inductor.compile_fx; "
_FIRST_TENSOR = "torch.zeros(1, device='cuda').item()"
_CONTEXT_THREAD = f"""
import threading
def make():
    global cuda, context
    {_DRIVER.strip().replace(chr(10), chr(10) + "    ")}
    {_CONTEXT}
threading.Thread(target=make).start()
"""
_GIB = 4
_MEMORY = f"import ctypes, torch; size = {_GIB} << 30; torch.cuda.init(); "
_MEMORY += "x = torch.empty(size, dtype=torch.uint8)"
_TOUCH = "ctypes.memset(x.data_ptr(), 0, size)"
_LOCK = "assert not int(torch.cuda.cudart().cudaHostRegister(x.data_ptr(), size, 0))"
DEVICE_PROBES |= {
    "torch, its compiler, the first tensor": ("", _IMPORTS + _FIRST_TENSOR),
    "the same, a thread making the context": ("", _CONTEXT_THREAD + _IMPORTS + _FIRST_TENSOR),
    f"{_GIB} GiB of memory touched by one core": (_MEMORY, _TOUCH),
    f"{_GIB} GiB page-locked, after that": (f"{_MEMORY}; {_TOUCH}", _LOCK),
    f"{_GIB} GiB page-locked, untouched": (_MEMORY, _LOCK),
}
# Caches of the compilers, which the user of this script may have set.
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME")


def write_job(folder: Path, job: dict, steps: int) -> Path:
    """A run file, its data and its callback in a folder."""
    import numpy as np

    from headway.data import TokenFileWriter

    num_tokens = job["length"] * job["batch"] * (steps + 2)
    ids = np.random.default_rng(0).integers(0, job["model"]["vocab_size"], num_tokens)
    with TokenFileWriter(folder / "train.hwt", dtype="uint16") as file:
        file.add_document(ids)
    (folder / "cold_start_marks.py").write_text(CALLBACK)
    run = {
        "model": job["model"],
        "data": {
            "train": {
                "class_path": "TokenDataset",
                "init_args": {"paths": "train.hwt", "sequence_length": job["length"]},
            }
        },
        "callbacks": [
            {
                "class_path": "cold_start_marks.Marks",
                "init_args": {"path": "marks.json", "warm_up": WARM_UP},
            }
        ],
        "args": {
            "output_dir": "out",
            "max_steps": steps,
            "per_device_train_batch_size": job["batch"],
            **COMMON,
            **job["args"],
        },
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(run, indent=2))  # which is YAML as well
    return path


def measure(folder: Path, cache: Path, overrides: list[str], samples: Path | None = None) -> dict:
    """One process: seconds to the first step and of each phase, milliseconds of a step.

    With `samples` it is also noted there in which calls the main thread was.
    """
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "marks.json").unlink(missing_ok=True)
    environment = {k: v for k, v in os.environ.items() if k not in CACHES}
    # Kernels that Headway brings itself are kept by triton.
    environment |= {"XDG_CACHE_HOME": str(cache), "TRITON_HOME": str(cache)}
    program = ["-m", "headway"]
    if samples is not None:
        program = [str(Path(__file__).with_name("start_samples.py")), str(samples)]
    command = [sys.executable, *program, "train", "run.yaml", "--json"]
    began_s = time.time()
    done = subprocess.run(
        [*command, *(f"--{override}" for override in overrides)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(overrides) or 'the run'} failed:\n{done.stderr[-4000:]}")
    told, marks = json.loads(done.stdout), json.loads((folder / "marks.json").read_text())
    return {
        **marks,
        "total_s": marks["first_s"] - began_s,
        "told_s": told["first_step_s"],
        "phases_s": told["start_phases_s"],
        "loss": told["loss"],
    }


def show_imports(folder: Path, overrides: list[str]) -> str:
    """The most expensive imports up to the end of a short run."""
    command = [sys.executable, "-X", "importtime", "-m", "headway", "train", "run.yaml"]
    options = ["--args.max_steps=1", "--args.output_dir=imports", *(f"--{o}" for o in overrides)]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True)
    lines, packages = [], Counter[str]()
    for line in done.stderr.splitlines():
        parts = line.removeprefix("import time:").split("|")
        if len(parts) == 3 and parts[1].strip().isdigit():
            packages[parts[2].strip().partition(".")[0]] += int(parts[0])
            depth = (len(parts[2]) - len(parts[2].lstrip()) - 1) // 2
            if int(parts[1]) > 100_000 and depth < 6:
                lines.append(f"{int(parts[1]) / 1e3:8.0f} ms {'  ' * depth}{parts[2].strip()}")
    own = (f"{name} {used / 1e3:.0f}" for name, used in packages.most_common(12))
    return "\n".join([*reversed(lines), f"ms by package: {', '.join(own)}"])


def show_probes(on_device: bool) -> str:
    lines = []
    for label, (before, timed) in {**PROBES, **(DEVICE_PROBES if on_device else {})}.items():
        code = f"{before}\nimport time\nbegan_s = time.perf_counter()\n{timed}\n"
        code += "print(time.perf_counter() - began_s)"
        began_s = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        whole_s = time.perf_counter() - began_s
        failed = done.returncode != 0
        seconds = whole_s if not timed or failed else float(done.stdout)
        why = f" (failed: {done.stderr.strip().splitlines()[-1]})" if failed else ""
        lines.append(f"{seconds:8.2f} s {label}{why}")
    return "\n".join(lines)


def tabulate(rows: list[tuple[str, dict]]) -> str:
    names: list[str] = []
    for _, row in rows:
        names += [name for name in row["phases_s"] if name not in names]
    head = ["", "first step", "CPU s", "beside", *names, "step ms", "slowest", "graphs", "loss"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for label, row in rows:
        cells = [label, f"**{row['total_s']:.1f} s**", f"{row['first_cpu_s']:.1f}"]
        cells.append(f"{row['total_s'] - row['told_s']:+.1f}")
        cells += [f"{row['phases_s'].get(name, 0.0):.1f}" for name in names]
        cells += [f"{row['step_ms']:.1f}", f"{row['slowest_ms']:.0f}", str(row["graphs"])]
        cells.append(f"{row['loss']:.4f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def show_tree(folder: Path, overrides: list[str]) -> str:
    """In which calls the time to the first step went, with a warm cache."""
    samples = folder / "samples.json"
    row = measure(folder, folder / "cache-1", overrides, samples)
    return call_tree(samples, row["first_s"])


def tell_caches(rows: list[tuple[str, dict]]) -> str:
    lines = []
    for label, row in rows:
        counts = [
            f"{key} {count}" for kind in row["caches"].values() for key, count in kind.items()
        ]
        lines.append(f"{label}: {', '.join(counts) or 'no look at a cache'}")
    return "\n".join(lines)


def collect(options: argparse.Namespace, folder: Path) -> list[tuple[str, dict]]:
    rows: list[tuple[str, dict]] = []

    def add(label: str, cache: Path, overrides: list[str]) -> None:
        rows.append((label, measure(folder, cache, [*options.set, *overrides])))
        print(f"{label}: {rows[-1][1]['total_s']:.1f} s", file=sys.stderr, flush=True)

    for number in range(1, options.rounds + 1):
        cache = folder / f"cache-{number}"
        suffix = f" ({number})" if options.rounds > 1 else ""
        add(f"empty cache{suffix}", cache, [])
        add(f"warm cache{suffix}", cache, [])
    if options.saves:
        add("saves at the end, warm", folder / "cache-1", ["args.save_strategy=steps"])
    if options.compare:
        model, host = ["args.torch_compile_scope=model"], ["args.construct_model_on=default"]
        add("whole model, empty", folder / "cache-model", model)
        add("whole model, warm", folder / "cache-model", model)
        add("weights drawn on the host, warm", folder / "cache-1", host)
        add("not compiled", folder / "cache-eager", ["args.torch_compile=false"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--compare", action="store_true", help="other ways to do it as well")
    parser.add_argument("--saves", action="store_true", help="a run that saves as well")
    parser.add_argument("--tree", action="store_true", help="show the calls that take long")
    parser.add_argument("--imports", action="store_true", help="show the expensive imports")
    parser.add_argument("--probe", action="store_true", help="time what nobody can do without")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the run file")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results")
    options = parser.parse_args()
    if options.steps <= WARM_UP:
        parser.error(f"--steps must be above {WARM_UP}")
    with tempfile.TemporaryDirectory(prefix="cold-start-") as name:
        folder = Path(name)
        write_job(folder, TINY if options.tiny else JOB, options.steps)
        # Files that were never read are another matter than caches that are empty.
        code = "import headway.trainers.from_config, torch._inductor.compile_fx"
        subprocess.run([sys.executable, "-c", code], check=True)
        rows = collect(options, folder)
        tree = show_tree(folder, options.set) if options.tree else ""
        imports = show_imports(folder, options.set) if options.imports else ""
    probes = show_probes("device" in rows[0][1]) if options.probe else ""
    import torch

    device = rows[0][1].get("device", platform.processor() or platform.machine())
    peak = max((row.get("peak_gib", 0.0) for _, row in rows), default=0.0)
    text = "\n\n".join(
        [
            f"{device}, {os.cpu_count()} CPUs, Python {platform.python_version()}, "
            f"torch {torch.__version__}, {datetime.date.today()}"
            + (f", peak {peak:.1f} GiB" if peak else ""),
            tabulate(rows),
            tell_caches(rows),
            *([f"```text\n{shown}\n```" for shown in (probes, tree, imports) if shown]),
        ]
    )
    print(text)
    for kind in ("empty", "warm"):
        found = [row["total_s"] for label, row in rows if label.startswith(f"{kind} cache")]
        print(f"median with {kind} cache: {statistics.median(found):.1f} s")
    if options.write:
        name = f"cold_start-{datetime.date.today()}.md"
        place = Path(__file__).parent / "results" / name
        title = "# From the command to the first step"
        place.write_text(f"{title}\n\n`python {' '.join(sys.argv)}`\n\n{text}\n")
        print(f"written: {place}", file=sys.stderr)


if __name__ == "__main__":
    main()
