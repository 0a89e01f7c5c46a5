"""The systems of a speed comparison: each trains the same job in the way its users would.

Owns: a bare loop, Headway, HF Trainer, Lightning and an Accelerate loop around one transformers
model, with the same weights, data, recipe and log interval; a bare loop and Headway around the
reference decoder. Does not own: time and memory (bench_job.py), processes and tables (bench.py).

Recipe: bf16 autocast over float32 weights, fused AdamW, clipping at 1.0, cosine schedule, a log
record every ten steps, no evaluation, no checkpoint.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import math
import statistics
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from headway.cli.bench_job import (
    CLIP_NORM,
    SEED,
    STRETCH,
    Job,
    Plan,
    Stopwatch,
    as_samples,
    before_shuffling,
    describe_machine,
    measure_matmul_flops,
    token_rows,
)

LIGHTNING = ("lightning.pytorch", "pytorch_lightning")
# The batches of these jobs are all of one shape, which a bare torch.compile assumes by itself.
FIXED_SHAPES = {"torch_compile_dynamic": False}

Losses = list[float]
"""One of every step."""
System = Callable[[Plan, Stopwatch, str], Losses]


def new_llama(plan: Plan) -> Any:
    """transformers' model, with the same weights in every system."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    job = plan.job
    torch.manual_seed(SEED)
    with torch.device(plan.device):
        model: Any = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=job.vocabulary,
                hidden_size=job.width,
                intermediate_size=job.ffn,
                num_hidden_layers=job.layers,
                num_attention_heads=job.heads,
                num_key_value_heads=job.kv_heads,
                max_position_embeddings=job.length,
                rms_norm_eps=1e-5,
                tie_word_embeddings=False,
                use_cache=False,
            )
        )
    return model.to(plan.device).train()


def new_decoder_config(job: Job) -> Any:
    """Headway's decoder in the shape of a job."""
    from headway.models.config import DecoderConfig

    return DecoderConfig(
        vocab_size=job.vocabulary,
        hidden_size=job.width,
        intermediate_size=job.ffn,
        num_layers=job.layers,
        num_heads=job.heads,
        num_kv_heads=job.kv_heads,
        max_seq_len=job.length,
    )


def new_optimizer(plan: Plan, model: Any) -> Any:
    import torch

    weights = model.parameters()
    return torch.optim.AdamW(weights, lr=plan.learning_rate, weight_decay=0.0, fused=True)


def new_schedule(plan: Plan, optimizer: Any) -> Any:
    import torch

    climb, fall = plan.warmup_rate_steps, plan.steps - plan.warmup_rate_steps

    def cosine(step: int) -> float:
        if step < climb:
            return (step + 1) / climb
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - climb) / fall)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, cosine)


def new_loader(plan: Plan) -> Any:
    """torch's loader as most loops have it: batches made in the training process, pinned."""
    from torch.utils.data import DataLoader

    samples: Any = as_samples(token_rows(plan))
    return DataLoader(samples, batch_size=plan.job.batch, pin_memory=plan.on_gpu)


def under_autocast(plan: Plan) -> Any:
    import torch

    if plan.precision == "no":
        return contextlib.nullcontext()
    return torch.autocast(plan.device, torch.bfloat16)


def run_bare(plan: Plan, watch: Stopwatch, folder: str) -> Losses:
    """The loop one writes by hand around the transformers model."""
    import torch

    model = new_llama(plan)
    call = torch.compile(model) if plan.compiled else model
    return run_loop(plan, watch, model, lambda batch: call(**batch).loss)


def run_bare_decoder(plan: Plan, watch: Stopwatch, folder: str) -> Losses:
    """The same loop around Headway's decoder."""
    import torch

    from headway.models import Decoder

    torch.manual_seed(SEED)
    with torch.device(plan.device):
        model = Decoder(new_decoder_config(plan.job)).train()
    call = torch.compile(model) if plan.compiled else model
    return run_loop(plan, watch, model, lambda batch: call(**batch).loss)


def run_loop(
    plan: Plan, watch: Stopwatch, model: Any, loss_of: Callable[[dict[str, Any]], Any]
) -> Losses:
    """A bare loop around any model."""
    import torch

    optimizer = new_optimizer(plan, model)
    schedule = new_schedule(plan, optimizer)
    losses: list[Any] = []
    total = torch.zeros((), device=plan.device)
    loader = new_loader(plan)
    watch.begin()
    for number, batch in enumerate(loader, 1):
        batch = {name: value.to(plan.device, non_blocking=True) for name, value in batch.items()}
        with under_autocast(plan):
            loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        total += loss.detach()
        losses.append(loss.detach())
        if number % STRETCH == 0:
            print({"step": number, "loss": total.item() / STRETCH}, flush=True)
            total.zero_()
        watch.step()
    return to_floats(losses)


def to_floats(losses: list[Any]) -> Losses:
    import torch

    return torch.stack(losses).float().tolist()


def with_llama(plan: Plan) -> dict[str, Any]:
    return {"model": new_llama(plan)}


def with_decoder(plan: Plan) -> dict[str, Any]:
    from headway.models import Decoder

    config = new_decoder_config(plan.job)
    return {"model_init": lambda: Decoder(config)}


def headway_system(
    new_model: Callable[[Plan], dict[str, Any]] = with_llama, **options: Any
) -> System:
    """Headway as its users have it: default callbacks, JSON Lines log, control server.

    `options` are arguments of training on top.
    """

    def run(plan: Plan, watch: Stopwatch, folder: str) -> Losses:
        from headway.args import TrainingArguments
        from headway.callbacks import TrainerControlCallback
        from headway.engine.events import TrainerCallback
        from headway.trainers.trainer import Trainer

        losses: dict[int, float] = {}

        class Watch(TrainerCallback):
            def on_step_end(self) -> None:
                watch.step()

            def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
                losses[step] = metrics["train/CE loss"]

        model = new_model(plan)
        args = TrainingArguments(
            **{
                **common_arguments(plan, folder),
                "mixed_precision": plan.precision,
                "seed": SEED,
                "use_cpu": not plan.on_gpu,
                **({"torch_compile": True, **FIXED_SHAPES} if plan.compiled else {}),
                **({"construct_model_on": "device"} if "model_init" in model else {}),
                **options,
            }
        )
        trainer = Trainer(
            args=args,
            train_dataset=as_samples(before_shuffling(token_rows(plan))),
            callbacks=[TrainerControlCallback(), Watch()],
            **model,
        )
        watch.begin()
        trainer.train()
        return [losses[step] for step in sorted(losses)]

    return run


def common_arguments(plan: Plan, folder: str) -> dict[str, Any]:
    """What Headway's arguments and those of transformers have in common."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": plan.job.batch,
        "max_steps": plan.steps,
        "logging_steps": STRETCH,
        "save_strategy": "no",
        "learning_rate": plan.learning_rate,
        "warmup_steps": plan.warmup_rate_steps,
        "weight_decay": 0.0,
        "max_grad_norm": CLIP_NORM,
        "lr_scheduler_type": "cosine",
    }


def run_transformers(plan: Plan, watch: Stopwatch, folder: str) -> Losses:
    """HF Trainer with its defaults."""
    from torch.utils.data import SequentialSampler
    from transformers import Trainer, TrainerCallback, TrainingArguments

    losses: list[Any] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            watch.step()

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            samples: Any = self.train_dataset
            return SequentialSampler(samples)

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(loss)
            return loss

    trainer = InOrder(
        args=TrainingArguments(
            **common_arguments(plan, folder),
            optim="adamw_torch_fused",
            bf16=plan.precision == "bf16",
            torch_compile=plan.compiled,
            use_cpu=not plan.on_gpu,
            report_to="none",
            disable_tqdm=True,
            seed=SEED,
        ),
        model=new_llama(plan),
        train_dataset=as_samples(token_rows(plan)),
        callbacks=[Watch()],
    )
    watch.begin()
    trainer.train()
    return to_floats(losses)


def import_lightning() -> Any:
    """Lightning goes by two package names."""
    for name in LIGHTNING:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(f"{name}.loggers")
            return importlib.import_module(name)
    raise ModuleNotFoundError("lightning")


def run_lightning(plan: Plan, watch: Stopwatch, folder: str) -> Losses:
    """Lightning's Trainer around a small module."""
    import torch

    pl = import_lightning()
    losses: list[Any] = []

    class Module(pl.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = new_llama(plan)
            self.call = torch.compile(self.model) if plan.compiled else self.model

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.call(**batch).loss
            self.log("loss", loss)
            losses.append(loss.detach())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = new_optimizer(plan, self.model)
            schedule = {"scheduler": new_schedule(plan, optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
            # Lightning's own refuses a fused optimizer under autocast.
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM, foreach=True)

        def on_train_batch_end(self, *args: Any) -> None:
            watch.step()

    trainer = pl.Trainer(
        accelerator="gpu" if plan.on_gpu else "cpu",
        devices=1,
        precision="bf16-mixed" if plan.precision == "bf16" else "32-true",
        max_steps=plan.steps,
        gradient_clip_val=CLIP_NORM,
        log_every_n_steps=STRETCH,
        logger=pl.loggers.CSVLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, loader = Module(), new_loader(plan)
    watch.begin()
    trainer.fit(module, loader)
    return to_floats(losses)


def run_accelerate(plan: Plan, watch: Stopwatch, folder: str) -> Losses:
    """The loop of Accelerate's documentation."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision=plan.precision,
        dynamo_backend="inductor" if plan.compiled else None,
        cpu=not plan.on_gpu,
    )
    model = new_llama(plan)
    optimizer = new_optimizer(plan, model)
    schedule = new_schedule(plan, optimizer)
    prepared = accelerator.prepare(model, optimizer, new_loader(plan), schedule)
    model, optimizer, loader, schedule = prepared
    losses: list[Any] = []
    total = torch.zeros((), device=plan.device)
    watch.begin()
    for number, batch in enumerate(loader, 1):
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        losses.append(loss.detach())
        if number % STRETCH == 0:
            accelerator.print({"step": number, "loss": total.item() / STRETCH}, flush=True)
            total.zero_()
        watch.step()
    return to_floats(losses)


SYSTEMS: dict[str, System] = {
    "bare": run_bare,
    "headway": headway_system(),
    "transformers": run_transformers,
    "lightning": run_lightning,
    "accelerate": run_accelerate,
    "bare-decoder": run_bare_decoder,
    "decoder": headway_system(with_decoder),
}
NAMES = {
    "bare": "bare loop, transformers' Llama",
    "headway": "Headway, same model",
    "transformers": "HF Trainer, same model",
    "lightning": "Lightning, same model",
    "accelerate": "Accelerate, same model",
    "bare-decoder": "bare loop, reference decoder",
    "decoder": "Headway, reference decoder",
}
_LIGHTNING_PACKAGES = tuple(name.partition(".")[0] for name in LIGHTNING)
_PACKAGES = {
    "lightning": ("transformers", _LIGHTNING_PACKAGES),
    "accelerate": ("transformers", "accelerate"),
    "transformers": ("transformers", "accelerate"),
    "bare-decoder": (),
    "decoder": (),
}


def lacking_package(system: str) -> str | None:
    """A package that one of `SYSTEMS` needs and that is not installed; None if all are there."""
    for package in _PACKAGES.get(system, ("transformers",)):
        names = (package,) if isinstance(package, str) else package
        if all(importlib.util.find_spec(name) is None for name in names):
            return names[0]
    return None


def measure(plan: Plan, systems: Mapping[str, System] = SYSTEMS) -> dict[str, Any]:
    """Run a system in this process and tell its figures."""
    watch = Stopwatch(plan)
    with tempfile.TemporaryDirectory() as folder:
        losses = systems[plan.system](plan, watch, folder)
    peak_bytes = watch.peak_bytes()
    gc.collect()
    flops = measure_matmul_flops(plan)
    times_ms = watch.step_times_ms()
    middle_ms = statistics.median(times_ms)
    tokens_per_s = 1000 * plan.job.tokens_per_step / middle_ms
    return {
        "system": plan.system,
        "job": plan.job.name,
        "compiled": plan.compiled,
        "precision": plan.precision,
        "on_gpu": plan.on_gpu,
        "steps": plan.steps,
        "step_ms": middle_ms,
        "best_step_ms": min(times_ms),
        "times_ms": times_ms,
        "tokens_per_s": tokens_per_s,
        "matmul_flops": flops,
        "mfu": tokens_per_s * plan.job.flops_per_token / flops,
        "first_step_s": watch.first_step_s,
        "first_train_s": watch.first_train_s,
        "peak_bytes": peak_bytes,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        **({"losses": losses} if plan.text else {}),
        "machine": describe_machine(plan),
    }
