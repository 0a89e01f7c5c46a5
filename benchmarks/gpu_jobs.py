"""The jobs of the benchmarks on a GPU, and the systems that only gpu_training.py measures.

A careful model and loop written by hand (fused projections, whole-model compilation, a loss in
chunks), and Headway with its reference decoder in several settings.
"""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.cli.bench_job import SEED, Job, Plan, Stopwatch
from headway.cli.bench_systems import NAMES as SHARED_NAMES
from headway.cli.bench_systems import (
    SYSTEMS,
    Losses,
    System,
    headway_system,
    new_llama,
    run_loop,
    with_decoder,
)

JOBS = {
    "A": Job(
        name="A", width=768, layers=12, heads=12, kv_heads=12, ffn=2048, vocabulary=32768,
        length=1024, batch=32,
    ),
    "B": Job(
        name="B", width=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocabulary=32768,
        length=4096, batch=4,
    ),
}  # fmt: skip
TINY = {
    name: Job(
        name=name, width=64, layers=2, heads=4, kv_heads=kv_heads, ffn=128, vocabulary=512,
        length=32, batch=4,
    )
    for name, kv_heads in (("A", 4), ("B", 2))
}  # fmt: skip
# Tokens are bytes; the vocabulary is larger, so that the loss's kernel takes its usual way.
CURVE = Job(
    name="curve", width=512, layers=8, heads=8, kv_heads=4, ffn=1536, vocabulary=8192, length=512,
    batch=32,
)  # fmt: skip
TINY_CURVE = Job(
    name="curve", width=64, layers=2, heads=4, kv_heads=2, ffn=128, vocabulary=258, length=64,
    batch=4,
)  # fmt: skip
# Job B in one long sequence; of the same number of tokens.
LONG = replace(JOBS["B"], name="B, 16,384 tokens", length=16384, batch=1)
TINY_LONG = replace(TINY["B"], name="tiny, long", length=256, batch=1)
CHUNK_TOKENS = 4096
NewModel = Callable[[Plan], dict[str, Any]]
FP8 = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


class CarefulBlock(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.heads, self.kv_heads = job.heads, job.kv_heads
        self.size = job.width // job.heads
        self.qkv = nn.Linear(job.width, (job.heads + 2 * job.kv_heads) * self.size, bias=False)
        self.out = nn.Linear(job.width, job.width, bias=False)
        self.gate_up = nn.Linear(job.width, 2 * job.ffn, bias=False)
        self.down = nn.Linear(job.ffn, job.width, bias=False)
        self.before_attention = nn.RMSNorm(job.width, eps=1e-5)
        self.before_ffn = nn.RMSNorm(job.width, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, _ = x.shape
        joined = self.qkv(self.before_attention(x)).view(rows, length, -1, self.size)
        q, k, v = joined.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        seen = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, -1))
        gate, up = self.gate_up(self.before_ffn(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class CarefulModel(nn.Module):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self.embedding = nn.Embedding(job.vocabulary, job.width)
        self.blocks = nn.ModuleList(CarefulBlock(job) for _ in range(job.layers))
        self.norm = nn.RMSNorm(job.width, eps=1e-5)
        self.head = nn.Linear(job.width, job.vocabulary, bias=False)
        size = job.width // job.heads
        rates = 10000.0 ** (-torch.arange(0, size, 2).float() / size)
        angles = torch.outer(torch.arange(job.length).float(), rates)[None, :, None]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.norm(x)


def loss_and_gradient(logits: Tensor, labels: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of one chunk, both divided by the count of targets; labels below 0 do not count."""
    x = logits.float()
    counts = labels >= 0
    total = x.logsumexp(-1)
    picked = x.gather(1, labels.clamp(min=0)[:, None]).squeeze(1)
    loss = ((total - picked) * counts).sum() / count
    places = torch.arange(x.shape[1], device=x.device)
    gradient = (x - total[:, None]).exp() - (places == labels[:, None]).float()
    return loss, (gradient * (counts / count)[:, None]).to(logits.dtype)


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of the head; its gradients are made along with it, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, count: int, of_chunk: Any
    ) -> Tensor:
        narrow = weight.to(hidden.dtype)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total = torch.zeros((), device=hidden.device)
        for h, y, g in zip(*(t.split(CHUNK_TOKENS) for t in (hidden, labels, grad_hidden))):
            loss, grad_logits = of_chunk(h @ narrow.t(), y, count)
            total += loss
            torch.mm(grad_logits, narrow, out=g)
            grad_weight += grad_logits.t() @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> Any:
        grad_hidden, grad_weight = ctx.saved_tensors
        # The scale of a bare loop is one, a power of two: nothing is lost in half precision.
        return grad_hidden * scale.to(grad_hidden.dtype), grad_weight * scale, None, None, None


def careful_system(*, by_block: bool = False) -> System:
    """The loop written by hand; compiled as a whole, or block by block."""

    def run(plan: Plan, watch: Stopwatch, folder: str) -> Losses:
        torch.manual_seed(SEED)
        with torch.device(plan.device):
            model = CarefulModel(plan.job)
        of_chunk: Any = loss_and_gradient
        if plan.compiled:
            of_chunk = torch.compile(loss_and_gradient, dynamic=False)
            for part in model.blocks if by_block else [model]:
                part.compile(dynamic=False)

        def loss_of(batch: dict[str, Tensor]) -> Tensor:
            ids = batch["input_ids"]
            hidden = model(ids).flatten(0, 1)
            with torch.autocast(plan.device, enabled=False):
                hidden = hidden.to(torch.bfloat16 if plan.precision == "bf16" else torch.float32)
                labels = F.pad(ids[:, 1:], (0, 1), value=-100).flatten()
                count = ids.shape[0] * (ids.shape[1] - 1)
                return ChunkedLoss.apply(hidden, model.head.weight, labels, count, of_chunk)

        return run_loop(plan, watch, model, loss_of)

    return run


def fp8_system(recipe: str, new_model: NewModel = with_decoder, **options: Any) -> System:
    """Headway's decoder with linear layers in eight bits."""
    run_here = headway_system(new_model, fp8_recipe=recipe, **options)

    def run(plan: Plan, watch: Stopwatch, folder: str) -> Losses:
        from headway.precision import fp8

        with contextlib.nullcontext() if plan.on_gpu else fp8.on_any_device():
            return run_here(plan, watch, folder)

    return run


WHOLE = {"torch_compile_scope": "model"}
ALL_SYSTEMS: dict[str, System] = {
    **SYSTEMS,
    "headway-chunked": headway_system(fused_loss="chunked"),
    "headway-whole": headway_system(**WHOLE),
    "careful": careful_system(),
    "careful-blocks": careful_system(by_block=True),
    "decoder-whole": headway_system(with_decoder, **WHOLE),
    "decoder-flash": headway_system(with_decoder, sdpa_backend="flash"),
    "decoder-flash4": headway_system(with_decoder, sdpa_backend="flash4"),
    "decoder-graphs": headway_system(with_decoder, torch_compile_mode="reduce-overhead"),
    **{f"decoder-fp8-{recipe}": fp8_system(recipe) for recipe in FP8},
    "decoder-fp8-flash4": fp8_system("tensorwise", sdpa_backend="flash4"),
}
NAMES = {
    **SHARED_NAMES,
    "headway-chunked": "Headway, same model, `fused_loss: chunked`",
    "headway-whole": "Headway, same model, compiled as a whole",
    "careful": "a careful hand-written model and loop",
    "careful-blocks": "the same, blocks compiled one by one",
    "decoder-whole": "Headway, reference decoder, compiled as a whole",
    "decoder-flash": "Headway, reference decoder, `sdpa_backend: flash`",
    "decoder-flash4": "Headway, reference decoder, `sdpa_backend: flash4`",
    "decoder-graphs": "Headway, reference decoder, `torch_compile_mode: reduce-overhead`",
    **{f"decoder-fp8-{recipe}": f"Headway, reference decoder, FP8 {recipe}" for recipe in FP8},
    "decoder-fp8-flash4": "Headway, reference decoder, FP8 tensorwise, `sdpa_backend: flash4`",
}
SAME_MODEL = (
    "bare", "transformers", "lightning", "accelerate", "headway", "headway-chunked",
    "headway-whole",
)  # fmt: skip


def is_measured(system: str, job: str, compiled: bool) -> bool:
    """Whether a system has a figure in a column: some make sense in one of them only."""
    if "fp8" in system:
        return job == "B" and compiled
    if system == "bare-decoder":
        return False
    only_compiled = ("-whole", "-flash", "-flash4", "-graphs")
    return compiled or not (system.startswith("careful") or system.endswith(only_compiled))


def with_converted_decoder(plan: Plan) -> dict[str, Any]:
    """Headway's decoder with the weights that the transformers model begins with."""
    from headway.models import Decoder, from_hf_config, load_state

    llama = new_llama(plan)
    model = Decoder(from_hf_config(llama.config.to_dict())).to(plan.device)
    load_state(model, llama.state_dict())
    return {"model": model}


CURVE_SYSTEMS: dict[str, System] = {
    "curve-decoder": headway_system(with_converted_decoder),
    "curve-decoder-flash4": headway_system(with_converted_decoder, sdpa_backend="flash4"),
    "curve-decoder-fp8": fp8_system("tensorwise", with_converted_decoder),
}


def write_result(name: str, text: str) -> None:
    """Keep a report in results/ under today's date; a later call of the day takes its place."""
    path = Path(__file__).parent / "results" / f"{name}-{datetime.date.today()}.md"
    path.write_text(text, encoding="utf-8")
