"""`headway demo`: from nothing to a model that writes Python-like text, in a few minutes on a CPU.

Trains a byte-level decoder on the standard library's source files and shows what it learned. It
writes a run file and trains from it, so that everything can be repeated with `headway train`.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import shlex
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from headway.cli.demo_corpus import find_sources
from headway.cli.train import exit_code, silence
from headway.errors import ConfigError

MARKER = ".headway-demo"
PROMPT = "def "
STEPS = 800
_MADE_BY_US = ("data", "model", "run", "runs", "checkpoint-*", "demo.yaml", "trainer_logs*.jsonl")
_SAMPLE_TOKENS = 240

logger = logging.getLogger("headway.cli")

_RUN_FILE = """\
# What `headway demo` trains. Train it again, or longer, or changed:
#   headway train {run_file} --args.output_dir=OTHER --args.max_steps=3000
model:
  vocab_size: 258              # 256 bytes, end of text, padding
  hidden_size: 128
  num_layers: 4
  num_heads: 4
  qk_norm: true                # lets the learning rate be this high
  max_seq_len: 512
  eos_token_id: 256
  pad_token_id: 257

tokenizer: bytes

data:
  train:
    class_path: TokenDataset
    init_args: {{paths: {train}, sequence_length: 128, mask_documents: false}}
  eval:
    class_path: TokenDataset
    init_args: {{paths: {held_out}, sequence_length: 128, mask_documents: false}}

args:
  output_dir: {output}
  seed: {seed}
  max_steps: {steps}
  per_device_train_batch_size: 8
  per_device_eval_batch_size: 32
  learning_rate: 4.0e-3
  lr_scheduler_type: cosine
  lr_scheduler_kwargs: {{min_ratio: 0.05}}
  warmup_steps: {warmup}
  weight_decay: 0.1
  adam_beta2: 0.98
  max_grad_norm: 1.0
  logging_steps: {log_steps}
  save_steps: {steps}
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--output", default="headway-demo", metavar="DIR", help="where it goes")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON at the end")


def run(options: argparse.Namespace) -> int:
    """Train, show before and after, say what to try next."""
    # On a busy machine, threads that spin while they wait for each other take minutes, not seconds.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    began_s = time.monotonic()
    if options.steps < 1:
        raise ConfigError(f"--steps: must be at least 1, got {options.steps}")
    output = Path(options.output)
    clear(output)
    run_file = prepare(output, options.steps, options.seed)

    from headway.config.load import load_run
    from headway.dist.seed import seed_all
    from headway.trainers.from_config import build_trainer

    seed_all(options.seed)
    trainer = build_trainer(load_run(run_file))
    if options.quiet:
        silence(trainer)
    logger.info("before training:")
    before = look(trainer, options.seed)
    trained = trainer.train(resume_from_checkpoint=False)
    if trained.interrupted_by is not None:
        print(f"stopped at step {trained.global_step} by {trained.interrupted_by}")
        print(f"go on with: headway train {shlex.quote(str(run_file))}")
        return exit_code(trained)
    logger.info("after training:")
    after = look(trainer, options.seed)
    trainer.save_model(str(output / "model"), overwrite_output_dir=True)
    facts = {
        "output": str(output),
        "model": str(output / "model"),
        "steps": trained.global_step,
        "tokens": trained.metrics["total_tokens"],
        "tokens_per_second": trained.metrics["tokens_per_second"],
        "bits_per_byte_before": before["bits_per_byte"],
        "bits_per_byte_after": after["bits_per_byte"],
        "prompt": PROMPT,
        "sample_before": before["text"],
        "sample_after": after["text"],
        "seconds": time.monotonic() - began_s,
        "next": next_commands(output, run_file),
    }
    if options.json:
        from headway.cli.messages import print_json

        print_json(facts)
    else:
        _print(facts)
    return 0


def clear(output: Path) -> None:
    """Make room for a fresh demo; only what an earlier one made is removed."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output: {output} is a file; the demo needs a folder")
    if output.is_dir() and any(output.iterdir()):
        if not (output / MARKER).is_file():
            raise ConfigError(
                f"--output: {output} is not empty and was not made by headway demo; "
                f"choose another folder"
            )
        for pattern in _MADE_BY_US:
            for path in output.glob(pattern):
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def prepare(output: Path, steps: int, seed: int) -> Path:
    """Write the token files and the run file; returns the run file's path."""
    from headway.data.text import prepare_tokens
    from headway.trainers.from_config import check_output_dir

    check_output_dir(output)
    train, held_out = find_sources()
    output.mkdir(parents=True, exist_ok=True)
    (output / MARKER).write_text("made by headway demo, which may replace what it made here\n")
    paths = {}
    for name, files in (("train", train), ("held_out", held_out)):
        path = output / "data" / f"{name}.hwt"
        counted = prepare_tokens(files, path, tokenizer="bytes", format="text")
        logger.info("%s: %d files, %s bytes", path, len(files), f"{counted['num_text_bytes']:,}")
        paths[name] = str(path)
    run_file = output / "demo.yaml"
    run_file.write_text(
        _RUN_FILE.format(
            run_file=shlex.quote(str(run_file)),
            train=_quote(paths["train"]),
            held_out=_quote(paths["held_out"]),
            output=_quote(str(output)),
            seed=seed,
            steps=steps,
            warmup=min(40, steps // 4),
            log_steps=max(1, min(25, steps // 4)),
        ),
        encoding="utf-8",
    )
    return run_file


def _quote(text: str) -> str:
    """A YAML scalar of any text."""
    import json

    return json.dumps(text)


def look(trainer: Any, seed: int) -> dict[str, Any]:
    """Bits per byte on the held-out files, and a sample of what the model writes."""
    from headway.cli.generate import continue_ids

    loss = trainer.evaluate()["eval_loss"]
    tokenizer = trainer.processing_class
    ids = tokenizer.encode(PROMPT)
    new = continue_ids(
        trainer.model,
        ids,
        max_new_tokens=_SAMPLE_TOKENS,
        temperature=0.7,
        eos_token_id=tokenizer.eos_token_id,
        seed=seed,
    )
    # A token is a byte here, but for the one end of text per file.
    return {"bits_per_byte": loss / math.log(2), "text": tokenizer.decode([*ids, *new])}


def next_commands(output: Path, run_file: Path) -> list[str]:
    """Commands that work as they stand, from the folder the demo was started in."""
    folder, file = shlex.quote(str(output)), shlex.quote(str(run_file))
    sample = shlex.quote(str(Path(find_sources()[1][0])))
    return [
        f"headway generate {folder}/model --prompt 'import ' --max-new-tokens 300",
        f"headway eval {folder}/model --data {sample}",
        f"headway check {file} --model.num_layers=8",
        f"headway train {file} --args.output_dir={folder}-longer --args.max_steps=3000",
    ]


def _print(facts: dict[str, Any]) -> None:
    rule = "-" * 72
    for when in ("before", "after"):
        print(f"\n{rule}\n{when} training, the model continues {facts['prompt']!r}:\n{rule}")
        print(facts[f"sample_{when}"])
    print(rule)
    print(
        f"bits per byte on held-out files: {facts['bits_per_byte_before']:.2f} before, "
        f"{facts['bits_per_byte_after']:.2f} after {facts['steps']:,} steps "
        f"({facts['tokens']:,} tokens, {facts['seconds']:.0f} s in all)"
    )
    print(f"the model is in {facts['model']}; transformers' AutoModelForCausalLM loads it too")
    print("\ntry next:")
    for command in facts["next"]:
        print(f"  {command}")
    sys.stdout.flush()
