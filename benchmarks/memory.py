"""The memory estimate of `headway check` against the peak a GPU measures.

Trains the reference decoder for three steps at several sizes through `Trainer` and compares
`torch.cuda.max_memory_allocated` with `estimate_training_memory`. Needs a CUDA device.

    python benchmarks/memory.py [--write]
"""

from __future__ import annotations

import argparse
import datetime
import gc
import tempfile
from pathlib import Path

import torch

from headway import Trainer, TrainingArguments
from headway.data import SyntheticDataset
from headway.models import Decoder, DecoderConfig
from headway.models.memory import estimate_training_memory

SIZES = {
    # name: (decoder, batch, length, gradient checkpointing)
    "30M, 16 x 512": (
        DecoderConfig(
            vocab_size=8192, hidden_size=512, intermediate_size=1408, num_layers=6, num_heads=8
        ),
        16,
        512,
        False,
    ),
    "124M, 16 x 1024": (
        DecoderConfig(
            vocab_size=32768, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12
        ),
        16,
        1024,
        False,
    ),
    "1.1B, 4 x 2048": (
        DecoderConfig(
            vocab_size=32768,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
        ),
        4,
        2048,
        False,
    ),
    "1.1B, 4 x 2048, recomputed": (
        DecoderConfig(
            vocab_size=32768,
            hidden_size=2048,
            intermediate_size=8192,
            num_layers=16,
            num_heads=32,
            num_kv_heads=8,
        ),
        4,
        2048,
        True,
    ),
}


def measure(config: DecoderConfig, batch: int, length: int, recompute: bool) -> int:
    """Peak bytes of three training steps."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch,
                max_steps=3,
                logging_strategy="no",
                save_strategy="no",
                max_grad_norm=1.0,
                gradient_checkpointing=recompute,
                seed=0,
            ),
            model_init=lambda: Decoder(config),
            train_dataset=SyntheticDataset(64, length, config.vocab_size, seed=0),
            default_callbacks=False,
        )
        trainer.train()
    peak = torch.cuda.max_memory_allocated()
    del trainer
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep the result in results/")
    options = parser.parse_args()
    gib = 2**30
    lines = [
        f"# Memory estimate against the measured peak, {datetime.date.today()}",
        "",
        f"`python benchmarks/memory.py` on {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}; float32, fused AdamW, clipping, three steps.",
        "",
        "| size | estimate, GiB | measured, GiB | estimate / measured |",
        "|---|---|---|---|",
    ]
    for name, (config, batch, length, recompute) in SIZES.items():
        estimate = estimate_training_memory(
            config, batch_size=batch, seq_len=length, gradient_checkpointing=recompute
        ).total_bytes
        peak = measure(config, batch, length, recompute)
        lines.append(
            f"| {name} | {estimate / gib:.2f} | {peak / gib:.2f} | {estimate / peak:.3f} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if options.write:
        folder = Path(__file__).parent / "results"
        (folder / f"memory-{datetime.date.today()}.md").write_text(text)


if __name__ == "__main__":
    main()
