"""`compute_metrics`: figures of the user's own over a whole evaluation, as in transformers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import transformers
from transformers import BertConfig, BertForSequenceClassification

from headway import Trainer, TrainingArguments
from headway.errors import ConfigError
from headway.testing import tiny_dataset, tiny_decoder


def accuracy(found):
    predictions, labels = found
    return {"accuracy": (predictions.argmax(-1) == labels).mean(), "samples": len(labels)}


def classifier():
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return BertForSequenceClassification(
        BertConfig(vocab_size=32, intermediate_size=16, num_labels=3, **shape)
    ).eval()


def sentences(number=10):
    order = np.random.default_rng(0)
    return [
        {"input_ids": order.integers(1, 32, 6).tolist(), "labels": int(order.integers(3))}
        for _ in range(number)
    ]


def make(tmp_path, model=None, **options):
    settings = {"per_device_eval_batch_size": 4, "use_cpu": True, "save_strategy": "no"}
    own = {field.name for field in dataclasses.fields(TrainingArguments)} & options.keys()
    settings |= {name: options.pop(name) for name in own}
    args = TrainingArguments(output_dir=str(tmp_path / "run"), **settings)
    return Trainer(model=model or classifier(), args=args, **options)


def test_figures_are_those_of_transformers(tmp_path):
    data, seen = sentences(), []

    def compute(found):
        seen.append(found)
        return accuracy(found)

    ours = make(tmp_path, eval_dataset=data, compute_metrics=compute).evaluate()
    args = transformers.TrainingArguments(
        str(tmp_path / "theirs"), per_device_eval_batch_size=4, use_cpu=True, report_to="none"
    )
    theirs = transformers.Trainer(
        classifier(), args, eval_dataset=data, compute_metrics=compute
    ).evaluate()
    for name in ("eval_accuracy", "eval_samples"):
        assert ours[name] == pytest.approx(theirs[name])
    assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], rel=1e-5)
    np.testing.assert_allclose(seen[0].predictions, seen[1].predictions, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(seen[0].label_ids, seen[1].label_ids)


def test_a_run_logs_them_and_keeps_the_best_by_them(tmp_path):
    values = iter([0.25, 0.75, 0.5])
    trainer = make(
        tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="steps",
        save_steps=1, metric_for_best_model="accuracy", greater_is_better=True,
        load_best_model_at_end=True, train_dataset=sentences(), eval_dataset=sentences(),
        compute_metrics=lambda found: {"accuracy": next(values)},
    )  # fmt: skip
    trainer.train()
    logged = [r["eval_accuracy"] for r in trainer.state.log_history if "eval_accuracy" in r]
    assert logged == [0.25, 0.75, 0.5]
    assert trainer.state.best_metric == 0.75 and trainer.state.best_global_step == 2


def test_logits_are_made_small_before_they_are_kept(tmp_path):
    def choose(logits, labels):
        assert logits.shape[0] == labels.shape[0]
        return logits.argmax(-1)

    seen = []
    trainer = make(
        tmp_path,
        model=tiny_decoder(),
        compute_metrics=lambda found: seen.append(found) or {"right": 1},
        preprocess_logits_for_metrics=choose,
    )
    data = tiny_dataset(10, sequence_length=8)
    assert trainer.evaluate(data)["eval_right"] == 1.0
    assert seen[0].predictions.shape == seen[0].label_ids.shape == (10, 8)
    assert seen[0].predictions.dtype == np.int64
    assert trainer.predict(data).predictions.shape == (10, 8)


def test_batches_of_other_lengths_are_filled_up(tmp_path):
    seen = []
    data = [{"input_ids": [1, 2, 3, 4]}] * 4 + [{"input_ids": [1, 2, 3, 4, 5, 6]}] * 2
    make(
        tmp_path, model=tiny_decoder(), compute_metrics=lambda found: seen.append(found) or {}
    ).evaluate(data)
    (found,) = seen
    assert found.predictions.shape[:2] == found.label_ids.shape == (6, 6)
    assert (found.label_ids[:4, 4:] == -100).all() and (found.predictions[:4, 4:] == -100).all()
    assert (found.label_ids[4:, 1:] != -100).all()


def test_predictions_need_no_labels(tmp_path):
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 3)

        def forward(self, x):
            return {"logits": self.layer(x)}

    trainer = make(tmp_path, model=Bare(), compute_metrics=accuracy)
    data = [{"x": torch.tensor([0.0, 1.0])}] * 5
    found = trainer.predict(data)
    assert found.predictions.shape == (5, 3) and found.label_ids is None
    with pytest.raises(ConfigError, match="compute_metrics: no batch has 'labels'"):
        trainer.evaluate(data)


@pytest.mark.parametrize("given", [0.5, {"names": "many"}, {"table": [1, 2]}, {1: 0.5}])
def test_what_is_no_number_is_told(tmp_path, given):
    trainer = make(tmp_path, compute_metrics=lambda found: given)
    with pytest.raises(ConfigError, match=r"compute_metrics returned .*; allowed: a"):
        trainer.evaluate(sentences())


def broken(*_, **__):
    return {}["absent"]


@pytest.mark.parametrize("names", [
    ["compute_metrics"],
    ["preprocess_logits_for_metrics", "compute_metrics"],
    ["compute_loss_func"],
])  # fmt: skip
def test_which_function_failed_is_told(tmp_path, names):
    trainer = make(tmp_path, **dict.fromkeys(names, broken))
    with pytest.raises(KeyError, match=f"{names[0]}: absent"):
        trainer.evaluate(sentences())


def test_which_function_failed_is_told_in_training_too(tmp_path):
    trainer = make(tmp_path, train_dataset=sentences(), compute_loss_func=broken)
    with pytest.raises(KeyError, match="compute_loss_func: absent"):
        trainer.train()


def test_a_metric_that_is_never_a_number_is_told_where_the_best_is_wanted(tmp_path, caplog):
    trainer = make(
        tmp_path, train_dataset=sentences(), eval_dataset=sentences(), max_steps=1,
        eval_strategy="epoch", save_strategy="epoch", load_best_model_at_end=True,
        metric_for_best_model="f1", compute_metrics=lambda found: {"f1": float("nan")},
    )  # fmt: skip
    trainer.train()
    assert "no checkpoint has an evaluation with a number as 'f1'" in caplog.text
    assert trainer.state.best_metric is None
