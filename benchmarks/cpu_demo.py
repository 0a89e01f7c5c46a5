"""The demo's job on a CPU against the same model in loops written by hand, per token.

`headway demo` as it is (its run file, model, data, default callbacks, log), and beside it:

- a bare loop with the same Decoder, data, order and recipe: fused AdamW, clipping, warm-up and
  cosine, the mean loss printed as often as the demo logs it;
- the same bare loop around the same decoder in plain torch: separate projections, whole logits,
  `F.cross_entropy`; what one would write without Headway.

The three, each in a process of its own, never run at the same time and never far apart: after each
stretch of five steps of the demo its trainer waits, and the loops do a stretch each. So a slow
moment of the machine hits them alike. Told are the best stretch and the median, in wall time and in
processor time, and what the demo took against each loop: the median over stretches, each against
the loop's right beside it, and all stretches together, with their logs. Losses are told as well:
all three train on the same samples from the same weights.

    python benchmarks/cpu_demo.py [--steps 800] [--threads 2] [--write]
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import logging
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the demo does

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.cli.demo import prepare
from headway.config.load import load_run
from headway.data.order import SampleOrder
from headway.data.tokens import TokenFile
from headway.dist.seed import seed_all
from headway.engine.events import TrainerCallback
from headway.models import Decoder, DecoderConfig
from headway.trainers.from_config import build_trainer

STRETCH, WARMUP_STRETCHES = 5, 4
BATCH, LENGTH, SEED = 8, 128, 0
INITIAL = "initial.pt"
DEMO, BARE, PLAIN = "headway demo", "bare loop, Headway's Decoder", "bare loop, plain torch"


class PlainNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-5)


class PlainBlock(nn.Module):
    """A Llama block with normalised queries and keys."""

    def __init__(self, width: int, ffn: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = PlainNorm(width), PlainNorm(width)
        self.q_norm, self.k_norm = PlainNorm(width // heads), PlainNorm(width // heads)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, ffn, bias=False) for _ in range(2))
        self.down = nn.Linear(ffn, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.before_attention(x)
        shape = (*h.shape[:2], self.heads, -1)
        q = self.turn(self.q_norm(self.q(h).view(shape)).transpose(1, 2), cos, sin)
        k = self.turn(self.k_norm(self.k(h).view(shape)).transpose(1, 2), cos, sin)
        v = self.v(h).view(shape).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))

    @staticmethod
    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class PlainDecoder(nn.Module):
    """The decoder of the demo, its weights taken from Headway's."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        width, heads = config.hidden_size, config.num_heads
        self.embed = nn.Embedding(config.vocab_size, width)
        self.blocks = nn.ModuleList(
            PlainBlock(width, config.ffn_size, heads) for _ in range(config.num_layers)
        )
        self.norm = PlainNorm(width)
        self.head = nn.Linear(width, config.vocab_size, bias=False)
        frequencies = config.rope_theta ** -(torch.arange(0, width // heads, 2) * heads / width)
        angles = torch.outer(torch.arange(LENGTH).float(), frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()

    def take_weights(self, model: nn.Module) -> None:
        own, theirs = list(self.parameters()), dict(model.named_parameters())
        names = ["model.embed_tokens.weight"]
        for layer in range(len(self.blocks)):
            names += [
                f"model.layers.{layer}.{name}.weight"
                for name in (
                    "input_layernorm",
                    "post_attention_layernorm",
                    "self_attn.q_norm",
                    "self_attn.k_norm",
                    "self_attn.q_proj",
                    "self_attn.k_proj",
                    "self_attn.v_proj",
                    "self_attn.o_proj",
                    "mlp.gate_proj",
                    "mlp.up_proj",
                    "mlp.down_proj",
                )
            ]
        names += ["model.norm.weight", "lm_head.weight"]
        with torch.no_grad():
            for mine, name in zip(own, names, strict=True):
                mine.copy_(theirs[name])

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def log_steps(steps: int) -> int:
    """The demo's log interval."""
    return max(1, min(25, steps // 4))


def rate_factor(step: int, steps: int, warmup: int) -> float:
    """Of the demo's schedule: linear warm-up, then a cosine down to a twentieth."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done))


def train_by_hand(name: str, folder: Path, steps: int, threads: int) -> None:
    """The loop of another process: does a stretch for every line it is given, and tells its cost.

    What it prints as it trains, as anybody's loop would, goes to the error stream.
    """
    torch.set_num_threads(threads)
    config = DecoderConfig(**load_run(folder / "demo.yaml").model.init_args)
    model: nn.Module = Decoder(config)
    model.load_state_dict(torch.load(folder / INITIAL))
    if name == PLAIN:
        plain = PlainDecoder(config)
        plain.take_weights(model)
        model = plain
    file = TokenFile(folder / "data" / "train.hwt")
    tokens = torch.zeros(-(-file.num_tokens // LENGTH) * LENGTH, dtype=torch.int64)
    tokens[: file.num_tokens] = torch.from_numpy(file.tokens.astype("int64"))
    labels = tokens.clone()
    labels[file.num_tokens :] = -100
    labels[torch.from_numpy(file.document_offsets[:-1].copy())] = -100  # as the demo's data has it
    samples = tokens.view(-1, LENGTH), labels.view(-1, LENGTH)
    stretches = train(name, model.train(), *samples, steps)
    for _ in sys.stdin:
        began, worked = time.perf_counter(), time.process_time()
        loss = next(stretches)
        spent = [time.perf_counter() - began, time.process_time() - worked, loss]
        print(json.dumps(spent), flush=True)


def train(
    name: str, model: nn.Module, samples: Tensor, targets: Tensor, steps: int
) -> Iterator[float]:
    """The loop itself; after each stretch the mean loss that it printed last."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.1, fused=True
    )
    warmup = min(40, steps // 4)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: rate_factor(step, steps, warmup)
    )
    indices = SampleOrder(len(samples), SEED, True).indices(0, 0, steps * BATCH)
    order, total, mean = torch.from_numpy(indices), torch.zeros(()), math.nan
    every = log_steps(steps)
    for step in range(steps):
        chosen = order[step * BATCH : (step + 1) * BATCH]
        ids, labels = samples[chosen], targets[chosen]
        loss = model(ids, labels) if name == PLAIN else model(ids, labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        if (step + 1) % every == 0:
            mean, rate = total.item() / every, schedule.get_last_lr()[0]
            print(f"step {step + 1} loss {mean:.4f} lr {rate:.2e}", file=sys.stderr)
            total.zero_()
        if (step + 1) % STRETCH == 0:
            yield mean


class Costs:
    """Seconds and processor seconds of each stretch, and its mean loss."""

    def __init__(self) -> None:
        self.wall_s: list[float] = []
        self.processor_s: list[float] = []
        self.losses: list[float] = []

    def add(self, wall_s: float, processor_s: float, loss: float) -> None:
        self.wall_s.append(wall_s)
        self.processor_s.append(processor_s)
        self.losses.append(loss)


class Turns(TrainerCallback):
    """Lets the loops do a stretch each after every stretch of the demo's steps."""

    priority = 1000  # before all of the demo's own callbacks, which count as its time

    def __init__(self, folder: Path, threads: int) -> None:
        self.costs = {name: Costs() for name in (DEMO, BARE, PLAIN)}
        self._folder, self._threads = folder, threads
        self._loops: dict[str, subprocess.Popen[str]] = {}
        self._began = (0.0, 0.0)
        self._loss = math.nan

    def on_train_begin(self, state: Any, model: Any) -> None:
        torch.save(model.state_dict(), self._folder / INITIAL)
        for name in (BARE, PLAIN):
            command = [sys.executable, __file__, "--loop", name, "--folder", str(self._folder)]
            command += ["--steps", str(state.max_steps), "--threads", str(self._threads)]
            self._loops[name] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )

    def on_step_begin(self, state: Any) -> None:
        if state.global_step % STRETCH == 0:
            wall, processor = self._began
            spent = (time.perf_counter() - wall, time.process_time() - processor)
            if state.global_step:
                self.costs[DEMO].add(*spent, self._loss)
            names = list(self._loops)
            for name in names if state.global_step // STRETCH % 2 else reversed(names):
                self.costs[name].add(*self._ask(name))
            self._began = time.perf_counter(), time.process_time()

    def _ask(self, name: str) -> list[float]:
        loop = self._loops[name]
        assert loop.stdin is not None and loop.stdout is not None
        loop.stdin.write("go\n")
        loop.stdin.flush()
        answer: list[float] = json.loads(loop.stdout.readline())
        return answer

    def on_log(self, logs: dict[str, Any]) -> None:
        self._loss = logs.get("loss", self._loss)

    def on_close(self) -> None:
        for loop in self._loops.values():
            assert loop.stdin is not None
            loop.stdin.close()
            loop.wait()


def measure(folder: Path, steps: int, threads: int) -> dict[str, Costs]:
    """Run the demo's job, and the loops in its breaks."""
    run_file = prepare(folder, steps, SEED)
    seed_all(SEED)
    trainer = build_trainer(load_run(run_file))
    turns = Turns(folder, threads)
    trainer.add_callback(turns)
    trainer.train(resume_from_checkpoint=False)
    return turns.costs


def report(costs: dict[str, Costs], options: argparse.Namespace, load: float) -> str:
    # A stretch of the loops comes before each of the demo's: leave out what has none beside it.
    kept = slice(WARMUP_STRETCHES, len(costs[DEMO].wall_s))
    us_per_token = 1e6 / (STRETCH * BATCH * LENGTH)
    lines = [
        f"# The demo's job on a CPU, {datetime.date.today()}",
        "",
        f"`python benchmarks/cpu_demo.py --steps {options.steps} --threads {options.threads}` on "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{options.threads} thread(s), Python {platform.python_version()}, torch "
        f"{torch.__version__}. One run, {kept.stop - kept.start} stretches of {STRETCH} steps each "
        f"in turn; load of the machine when it began: {load:.1f}.",
        "",
        "| | us per token, best stretch | median | processor us per token, best | median | the"
        " demo's time against it, median of stretches | all together | its processor time against"
        " it, median | all together | first loss logged | last |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    ours = costs[DEMO]
    for name, own in costs.items():
        cells = [name]
        for taken in (own.wall_s[kept], own.processor_s[kept]):
            cells += [f"{min(taken) * us_per_token:.2f}"]
            cells += [f"{statistics.median(taken) * us_per_token:.2f}"]
        for mine, theirs in ((ours.wall_s, own.wall_s), (ours.processor_s, own.processor_s)):
            ratios = [a / b for a, b in zip(mine[kept], theirs[kept])]
            cells += [f"{statistics.median(ratios):.3f}"]
            cells += [f"{sum(mine[kept]) / sum(theirs[kept]):.3f}"]
        logged = [loss for loss in own.losses[: kept.stop] if not math.isnan(loss)]
        cells += [f"{logged[0]:.5f}", f"{logged[-1]:.5f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    parser.add_argument("--loop", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.loop:
        train_by_hand(options.loop, options.folder, options.steps, options.threads)
        return
    torch.set_num_threads(options.threads)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        quiet = contextlib.redirect_stdout(io.StringIO())
        with quiet, contextlib.redirect_stderr(io.StringIO()):
            costs = measure(Path(folder) / "demo", options.steps, options.threads)
    text = report(costs, options, load)
    print(text)
    if options.write:
        folder = Path(__file__).parent / "results"
        (folder / f"cpu_demo-{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
