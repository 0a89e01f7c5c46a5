"""What a speed comparison trains, and how its time and memory are taken.

Owns: the job and its count of operations, the stopwatch, the rate of matrix products, the data.
Does not own: the systems that are compared (bench_systems.py), processes and tables (bench.py).
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

STRETCH = 10
"""Steps between two looks at the clock, one log record among them."""
CLIP_NORM, SEED = 1.0, 0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model of Llama's shape and its batch."""

    name: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    length: int
    batch: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length

    @property
    def matmul_parameters(self) -> int:
        """Parameters of matrix products: the output head is among them, the embedding is not."""
        head = self.width // self.heads
        attention = self.width * head * 2 * (self.heads + self.kv_heads)
        block = attention + 3 * self.width * self.ffn
        return self.layers * block + self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        return self.matmul_parameters + self.vocabulary * self.width

    @property
    def flops_per_token(self) -> int:
        """Forward and backward; a token of a causal sequence sees half of it on average."""
        return 6 * self.matmul_parameters + 6 * self.layers * self.width * self.length

    def tell(self) -> str:
        """The shape in words."""
        return (
            f"{self.width} wide, {self.layers} layers, {self.heads} heads, {self.kv_heads} "
            f"key-value heads, ffn {self.ffn:,}, vocabulary {self.vocabulary:,}, "
            f"{self.length:,} tokens x {self.batch}"
        )


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One system's run: what it trains, how, and for how long."""

    system: str
    job: Job
    compiled: bool
    steps: int
    warmup: int
    """Steps before the first time that counts."""
    device: str
    precision: str = "bf16"
    """`bf16`: autocast over float32 weights. `no`: float32."""
    learning_rate: float = 1e-4
    warmup_rate_steps: int = 0
    """Steps over which the learning rate climbs."""
    text: bool = False
    """Train on the bytes of the standard library's source, not on random tokens."""
    started_s: float = field(default_factory=time.time)
    """When the process was started, by the clock on the wall."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Plan:
        return cls(**{**values, "job": Job(**values["job"])})

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"


class Stopwatch:
    """Times of a run's steps and the most memory it had.

    On a GPU by events in its queue, which nobody waits for before the run is over: a loop that
    waits for the device pays for it, and one that does not is not made to.
    """

    def __init__(self, plan: Plan) -> None:
        import torch

        self._plan, self._sync = plan, torch.cuda.synchronize if plan.on_gpu else None
        self._began_s = time.perf_counter()
        self._marks: list[Any] = []
        self.done = 0
        self.first_step_s = self.first_train_s = math.nan
        self._peak_bytes = 0
        if plan.on_gpu:
            self._reset = torch.cuda.reset_peak_memory_stats
            # Whoever measures memory of its own between two records must not hide the peak.
            torch.cuda.reset_peak_memory_stats = self._note_and_reset

    def begin(self) -> None:
        """Training is called now."""
        self._began_s = time.perf_counter()

    def step(self) -> None:
        """A step was issued."""
        self.done += 1
        if self.done == 1:
            self._wait()
            self.first_train_s = time.perf_counter() - self._began_s
            self.first_step_s = time.time() - self._plan.started_s
        elif self.done >= self._plan.warmup and self.done % STRETCH == 0:
            self._marks.append(self._mark())

    def step_times_ms(self) -> list[float]:
        """Milliseconds per step in each stretch after the warm-up."""
        if not self._plan.on_gpu:
            return [1000 * (b - a) / STRETCH for a, b in itertools.pairwise(self._marks)]
        self._wait()
        return [a.elapsed_time(b) / STRETCH for a, b in itertools.pairwise(self._marks)]

    def peak_bytes(self) -> int:
        """Most memory allocated on the GPU so far; on a CPU the most the process ever had."""
        if self._plan.on_gpu:
            import torch

            return max(self._peak_bytes, torch.cuda.max_memory_allocated())
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def _mark(self) -> Any:
        if not self._plan.on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self._sync is not None:
            self._sync()

    def _note_and_reset(self, device: Any = None) -> None:
        self._peak_bytes = self.peak_bytes()
        self._reset(device)


def token_rows(plan: Plan) -> torch.Tensor:
    """[samples, length]: tokens for every step, in the order in which they are trained on."""
    import torch

    job = plan.job
    num_rows, generator = plan.steps * job.batch, torch.Generator().manual_seed(SEED + 1)
    if not plan.text:
        return torch.randint(0, job.vocabulary, (num_rows, job.length), generator=generator)
    from headway.cli.demo_corpus import standard_library

    library = standard_library(job.length)
    rows = [torch.as_tensor(library[n]["input_ids"]) for n in range(len(library))]
    whole = torch.stack([row for row in rows if len(row) == job.length]).long()
    order = [
        torch.randperm(len(whole), generator=generator) for _ in range(-(-num_rows // len(whole)))
    ]
    return whole[torch.cat(order)[:num_rows]]


def as_samples(rows: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in rows]


def before_shuffling(rows: torch.Tensor) -> torch.Tensor:
    """Rows that Headway's shuffled order brings back into the order they have here."""
    import torch

    from headway.data.order import SampleOrder

    order = SampleOrder(len(rows), SEED).indices(0, 0, len(rows))
    placed = torch.empty_like(rows)
    placed[torch.from_numpy(order)] = rows
    return placed


def measure_matmul_flops(plan: Plan) -> float:
    """Operations per second of a large matrix product in the run's precision, right now."""
    import torch

    size, repeats = (8192, 40) if plan.on_gpu else (512, 8)
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=plan.device, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(7):
        if plan.on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            a @ b
        if plan.on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) / repeats)
    return float(2 * size**3 / statistics.median(times[2:]))


def describe_machine(plan: Plan) -> dict[str, str]:
    """Device and versions, as they stand beside a figure."""
    from importlib import metadata

    import torch

    name = torch.cuda.get_device_name() if plan.on_gpu else platform.processor() or "CPU"
    versions = {"device": name, "python": platform.python_version(), "torch": torch.__version__}
    # Without aiohttp there is no control server.
    others = ("transformers", "accelerate", "lightning", "pytorch-lightning", "torchao", "aiohttp")
    for package in ("headway", *others):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
