"""Accumulating a micro-batches of b samples equals one batch of a*b, ragged lengths included."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.testing import tiny_dataset, tiny_decoder, tiny_llama

TOKEN = {"input_ids": [7], "labels": [7]}


class Curve(TrainerCallback):
    def __init__(self):
        self.losses, self.norms = [], []

    def on_train_metrics(self, loss, grad_norm):
        self.losses.append(loss.item())
        self.norms.append(grad_norm.item())


class MeanLossModel(nn.Module):
    """Returns a mean over its own targets, and knows nothing of a count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(258, 16)
        self.head = nn.Linear(16, 258)

    def forward(self, input_ids, labels):
        logits = self.head(self.embed(input_ids))[:, :-1]
        return {
            "loss": nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )
        }


class LogitsModel(MeanLossModel):
    """Returns logits only."""

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def run(tmp_path, make_model, batch, accumulation):
    curve = Curve()
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path / f"{batch}x{accumulation}"),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            num_train_epochs=2,
            learning_rate=1e-2,
            max_grad_norm=1.0,
            save_strategy="no",
            seed=3,
            use_cpu=True,
        ),
        model_init=make_model,
        # 22 samples: with windows of 8 the last of each epoch is partial; two have no target
        train_dataset=tiny_dataset(20, sequence_length=24, ragged=True) + [TOKEN, TOKEN],
        callbacks=[curve],
        default_callbacks=False,
    )
    trainer.train()
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return curve, weights


@pytest.mark.parametrize("make_model", [tiny_decoder, tiny_llama, MeanLossModel, LogitsModel])
def test_a_times_b_is_one_batch(tmp_path, make_model):
    whole, whole_weights = run(tmp_path, make_model, 8, 1)
    assert len(whole.losses) == 6
    for batch, accumulation in ((4, 2), (2, 4), (1, 8)):
        split, weights = run(tmp_path, make_model, batch, accumulation)
        assert split.losses == pytest.approx(whole.losses, rel=1e-6)
        assert split.norms == pytest.approx(whole.norms, rel=1e-5)
        assert torch.allclose(weights, whole_weights, atol=2e-5)


def test_the_first_steps_gradient_is_equal_to_1e_6(tmp_path):
    """Before AdamW's division amplifies rounding, gradients agree to float32's precision."""

    def gradients(batch, accumulation):
        found = {}

        class Keep(TrainerCallback):
            def on_gradients(self, model):
                found.update({n: p.grad.clone() for n, p in model.named_parameters()})

        Trainer(
            args=TrainingArguments(
                output_dir=str(tmp_path), per_device_train_batch_size=batch,
                gradient_accumulation_steps=accumulation, max_steps=1, save_strategy="no",
                seed=3, use_cpu=True,
            ),
            model_init=tiny_decoder,
            train_dataset=tiny_dataset(16, sequence_length=24, ragged=True),
            callbacks=[Keep()],
            default_callbacks=False,
        ).train()  # fmt: skip
        return found

    whole, split = gradients(16, 1), gradients(2, 8)
    for name, gradient in whole.items():
        difference = (gradient - split[name]).norm() / gradient.norm()
        assert difference <= 1e-6, name


SMALL = {"vocab_size": 258, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def masked_model():
    from transformers import BertConfig, BertForMaskedLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return BertForMaskedLM(BertConfig(**SMALL, **shape, num_attention_heads=2))


def token_classifier():
    from transformers import BertConfig, BertForTokenClassification

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    return BertForTokenClassification(
        BertConfig(**SMALL, **shape, num_attention_heads=2, num_labels=258)
    )


def encoder_decoder():
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=258, dropout_rate=0.0, decoder_start_token_id=0, **shape)
    )


@pytest.mark.parametrize("make_model", [masked_model, token_classifier, encoder_decoder])
def test_so_it_is_where_a_model_predicts_every_label_at_its_place(tmp_path, make_model):
    """The first label of a row is a target there, in micro-batches of rows of several lengths."""
    whole, whole_weights = run(tmp_path, make_model, 8, 1)
    split, weights = run(tmp_path, make_model, 1, 8)
    assert split.losses == pytest.approx(whole.losses, rel=1e-6)
    assert split.norms == pytest.approx(whole.norms, rel=1e-5)
    assert torch.allclose(weights, whole_weights, atol=1e-4)


def of_pictures_and_text():
    """As such models are: their loss is that of the next token, under a type of its own."""
    model = tiny_llama()
    model.loss_type = "ForConditionalGeneration"
    return model


def test_a_causal_loss_of_another_name_shifts_its_labels(tmp_path):
    whole, _ = run(tmp_path, of_pictures_and_text, 8, 1)
    plain, _ = run(tmp_path / "plain", tiny_llama, 8, 1)
    split, _ = run(tmp_path, of_pictures_and_text, 1, 8)
    assert whole.losses == plain.losses
    assert split.losses == pytest.approx(whole.losses, rel=1e-6)
