"""Token files and straightforward computations of what evaluators give, for their tests."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.callbacks import Evaluator, EvaluatorCallback
from headway.callbacks.evaluate.tasks import suite_tasks
from headway.data.tokenizer import ByteTokenizer
from headway.data.tokens import TokenFile, TokenFileWriter
from headway.testing import tiny_dataset, tiny_decoder

LENGTH = 24
TEXTS = {
    "sea": ["the boat finds the harbour. " * 5, "a gull waits.", "the tide turns from land. " * 3],
    "sums": ["1 + 1 = 2, 2 + 2 = 4, 4 + 4 = 8; " * 4, "3 + 3 = 6"],
}


def write_files(folder: Path | str) -> dict[str, str]:
    """A token file for each label, with several documents."""
    tokenizer, files = ByteTokenizer(), {}
    Path(folder).mkdir(parents=True, exist_ok=True)
    for label, texts in TEXTS.items():
        files[label] = str(Path(folder, f"{label}.hwt"))
        with TokenFileWriter(files[label], tokenizer=tokenizer) as writer:
            for text in texts:
                writer.add_document(tokenizer.encode(text, add_eos=True))
    return files


def write_task(path: Path | str, *lines: Any) -> str:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    Path(path).write_text(text, encoding="utf-8")
    return str(path)


@torch.no_grad()
def nats(model: Any, ids: list[int]) -> list[float]:
    """How surprising each id but the first is after those before it, one text at a time."""
    if len(ids) < 2:
        return []
    logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    chosen = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    return [-value for value in chosen[:, 0].tolist()]


def expected_lm(model: Any, files: dict[str, str], length: int = LENGTH) -> dict[str, float]:
    """Every stretch of every document by itself, as the sequences cut them."""
    model.eval()
    figures = {}
    for label, path in files.items():
        file, total, count = TokenFile(path), 0.0, 0
        edges = {*range(0, file.num_tokens, length), *file.document_offsets.tolist()}
        bounds = sorted({*edges, file.num_tokens})
        for start, end in itertools.pairwise(bounds):
            own = nats(model, file.tokens[start:end].tolist())
            total, count = total + sum(own), count + len(own)
        num_bytes = sum(len(text.encode()) for text in TEXTS[label])
        loss = total / count
        figures[f"{label}/CE loss"] = loss
        figures[f"{label}/PPL"] = math.exp(loss)
        figures[f"{label}/BPB"] = loss / math.log(2) * file.num_tokens / num_bytes
    return figures


def expected_task(model: Any, path: Path | str) -> dict[str, float]:
    """Every choice by itself, with the byte tokenizer."""
    model.eval()
    right, normed, losses, bits = [], [], [], []
    items = [json.loads(line) for line in Path(path).read_text().splitlines()]
    for item in items:
        choices = item.get("choices") or [item["completion"]]
        answer = item.get("answer", 0)
        prompt = list(item["prompt"].encode())
        scores = []
        for choice in choices:
            own = nats(model, prompt + list(choice.encode()))[-len(choice.encode()) :]
            scores.append(-sum(own))
        losses.append(-scores[answer] / len(choices[answer].encode()))
        bits.append(losses[-1] / math.log(2))
        per_character = [s / len(c) for s, c in zip(scores, choices)]
        right.append(scores.index(max(scores)) == answer)
        normed.append(per_character.index(max(per_character)) == answer)
        if "completion" in item:
            right[-1] = writes(model, prompt, list(choices[0].encode()))
    figures = {"accuracy": _mean(right), "CE loss": _mean(losses), "BPB": _mean(bits)}
    if "choices" in items[0]:
        figures["length-normalized accuracy"] = _mean(normed)
    return figures


@torch.no_grad()
def writes(model: Any, prompt: list[int], wanted: list[int]) -> bool:
    """Whether the model, always taking the likeliest token, writes the completion."""
    ids = list(prompt)
    for token in wanted:
        if int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()) != token:
            return False
        ids.append(token)
    return True


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)


def trainer_with(folder: Path, *callbacks: Any, model: Any = None, **args: Any) -> Trainer:
    settings = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 3, "logging_steps": 100, "save_strategy": "no", "seed": 0,
        "max_steps": 4, "use_cpu": True, "learning_rate": 1e-2,
    }  # fmt: skip
    return Trainer(
        args=TrainingArguments(**{**settings, **args}),
        model_init=model or tiny_decoder,
        train_dataset=tiny_dataset(32, sequence_length=8),
        eval_dataset=tiny_dataset(4, sequence_length=8, seed=1),
        processing_class=ByteTokenizer(),
        callbacks=list(callbacks),
        default_callbacks=False,
    )


class Seen(TrainerCallback):
    """Keeps the metrics of evaluators by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        own = {k: v for k, v in metrics.items() if k.startswith(("eval", "throughput"))}
        if own:
            self.steps.setdefault(step, {}).update(own)

    def figures(self, step: int, prefix: str) -> dict[str, float]:
        found = self.steps[step].items()
        return {k.removeprefix(prefix): v for k, v in found if k.startswith(prefix)}


class Counter(Evaluator):
    """Counts what it is given; the loss is the mean of its batches'."""

    def __init__(self, name: str = "counter", num_batches: int = 4, **given: Any) -> None:
        ids = torch.arange(20).reshape(2, 10)
        batches = [{"input_ids": ids + n, "labels": ids + n} for n in range(num_batches)]
        super().__init__(name, **{"batches": batches, **given})
        self.seen: list[int] = []
        self.passes = 0

    def reset_metrics(self) -> None:
        self.passes += 1
        self.seen.clear()

    def update_metrics(self, batch: Any, scores: Any) -> None:
        self.seen.append(int(batch["input_ids"][0, 0]))

    def compute_metrics(self, join: Any) -> dict[str, float]:
        return {"batches": float(join(torch.tensor(float(len(self.seen)))))}


def task_lines(name: str, count: int) -> list[str]:
    return suite_tasks()[name].read_text(encoding="utf-8").splitlines()[:count]


def evaluate(folder: Path, evaluator: Evaluator, **options: Any) -> tuple[Seen, Trainer]:
    seen = Seen()
    given = {"eval_interval": None, "eval_on_startup": True, **options}
    trainer = trainer_with(folder, EvaluatorCallback([evaluator], **given), seen, max_steps=1)
    trainer.train()
    return seen, trainer
