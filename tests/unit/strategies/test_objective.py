"""Any model that returns a loss or logits can be trained."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headway import ConfigError, Trainer, TrainingArguments
from headway.data import count_targets
from headway.strategies.objective import Objective
from headway.testing import tiny_decoder, tiny_llama

IDS = torch.arange(12).reshape(2, 6) % 7
LABELS = torch.tensor([[1, 2, 3, -100, 5, 6], [-100, 1, -100, 4, 4, 2]])
BATCH = {"input_ids": IDS, "labels": LABELS}
TARGETS = int((LABELS[:, 1:] != -100).sum())


class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(300, 300) / 10)

    def logits(self, ids):
        return self.table[ids]

    def reference(self):
        logits = self.logits(IDS)[:, :-1].flatten(0, 1)
        return nn.functional.cross_entropy(logits, LABELS[:, 1:].flatten(), reduction="sum")

    def mean(self, ids, labels):
        return nn.functional.cross_entropy(
            self.logits(ids)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        )


class ReturnsObject(Tiny):
    def forward(self, input_ids, labels):
        return SimpleNamespace(loss=self.mean(input_ids, labels))


class ReturnsTuple(Tiny):
    def forward(self, input_ids, labels):
        return self.mean(input_ids, labels), self.logits(input_ids)


class ReturnsScalar(Tiny):
    def forward(self, input_ids, labels):
        return self.mean(input_ids, labels)


class ReturnsLogits(Tiny):
    def forward(self, input_ids):
        return self.logits(input_ids)


class ReturnsLogitsDict(Tiny):
    def forward(self, input_ids, **anything):
        return {"logits": self.logits(input_ids)}


@pytest.mark.parametrize(
    "kind", [ReturnsObject, ReturnsTuple, ReturnsScalar, ReturnsLogits, ReturnsLogitsDict]
)
def test_every_form_of_output_gives_the_sum_over_the_given_count(kind):
    model = kind()
    loss = Objective(model).loss(model, BATCH, num_targets=50, own=TARGETS)
    assert loss.item() == pytest.approx(model.reference().item() / 50, rel=1e-6)
    total, count, _, _ = Objective(model).evaluate(model, BATCH)
    assert total.item() == pytest.approx(model.reference().item(), rel=1e-6)
    assert count == TARGETS


@pytest.mark.parametrize("make", [tiny_decoder, tiny_llama])
def test_models_that_take_the_count(make):
    model = make().eval()
    with torch.no_grad():
        logits = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    expected = nn.functional.cross_entropy(logits, LABELS[:, 1:].flatten(), reduction="sum")
    loss = Objective(model).loss(model, BATCH, num_targets=50, own=TARGETS)
    assert loss.item() == pytest.approx(expected.item() / 50, rel=1e-5)


def test_pairs_and_classification():
    model = nn.Linear(4, 3)
    inputs, labels = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    loss = Objective(model).loss(model, (inputs, labels), num_targets=5, own=5)
    assert loss.item() == pytest.approx(
        nn.functional.cross_entropy(model(inputs), labels).item(), rel=1e-6
    )


def test_token_labels_of_a_pair_belong_to_the_outputs():
    model = ReturnsLogits()
    pair = (IDS, LABELS)
    targets = int((LABELS != -100).sum())
    assert count_targets(pair) == targets
    expected = nn.functional.cross_entropy(model.logits(IDS).flatten(0, 1), LABELS.flatten())
    loss = Objective(model).loss(model, pair, num_targets=targets, own=targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    total, count, _, _ = Objective(model).evaluate(model, pair)
    assert total.item() / count == pytest.approx(expected.item(), rel=1e-6)


def test_token_labels_beside_inputs_of_a_decoder_belong_to_the_outputs():
    model = ReturnsLogits()
    batch = {"input_ids": IDS, "decoder_input_ids": IDS, "labels": LABELS}
    targets = int((LABELS != -100).sum())
    assert count_targets(batch) == targets
    expected = nn.functional.cross_entropy(model.logits(IDS).flatten(0, 1), LABELS.flatten())
    loss = Objective(model).loss(model, batch, num_targets=targets, own=targets)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_ignored_labels_of_a_classification_do_not_count():
    model = nn.Linear(4, 3)
    inputs, labels = torch.randn(4, 4), torch.tensor([0, -100, 2, -100])
    assert count_targets((inputs, labels)) == count_targets({"x": inputs, "labels": labels}) == 2
    total, count, _, _ = Objective(model).evaluate(model, (inputs, labels))
    expected = nn.functional.cross_entropy(model(inputs), labels)
    assert total.item() / count == pytest.approx(expected.item(), rel=1e-6)


def test_compute_loss_func_gets_outputs_labels_and_count():
    model = ReturnsLogits()
    seen = {}

    def compute(outputs, labels, num_items_in_batch):
        seen.update(shape=outputs.shape, count=num_items_in_batch, labels=labels)
        return outputs.sum() / num_items_in_batch

    Objective(model, compute).loss(model, BATCH, num_targets=50, own=TARGETS)
    assert seen["shape"] == (2, 6, 300) and seen["count"] == 50
    assert seen["labels"] is LABELS


def test_keys_the_model_does_not_take_are_left_out_and_lost_documents_are_said(caplog):
    model = ReturnsObject()
    batch = {**BATCH, "document_ids": torch.zeros_like(IDS), "other": torch.ones(2)}
    with caplog.at_level(logging.WARNING):
        objective = Objective(model)
        objective.loss(model, batch, num_targets=9, own=9)
        objective.loss(model, batch, num_targets=9, own=9)
    assert caplog.text.count("takes no document_ids") == 1


class NoLoss(Tiny):
    def forward(self, input_ids):
        return {"hidden": self.logits(input_ids)}


class BadShape(Tiny):
    def forward(self, input_ids):
        return torch.zeros(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("model", "batch", "message"),
    [
        (NoLoss(), BATCH, "NoLoss returns no loss"),
        (nn.Linear(2, 2), BATCH, "Linear needs 'input', which the batch does not have"),
        (ReturnsLogits(), {"input_ids": IDS}, "has no 'labels'"),
        (BadShape(), BATCH, "do not fit labels"),
        (
            ReturnsLogits(),
            (IDS, torch.ones(IDS.shape)),
            r"do not fit labels .*float32\) as classes",
        ),
        (
            nn.Conv2d(1, 3, 1),
            (torch.zeros(2, 1, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)),
            r"\(2, 3, 4, 4\) from Conv2d do not fit labels .* as classes, which stand last",
        ),
        (ReturnsLogits(), "text", "a batch must be a dict of tensors"),
    ],
)
def test_what_cannot_be_trained_is_said(model, batch, message):
    with pytest.raises(ConfigError, match=message):
        Objective(model).loss(model, batch, num_targets=9, own=9)


@pytest.mark.parametrize(
    ("loss", "told"), [(None, "None"), (3.0, "3.0"), (torch.ones(2), r"shape \[2\]")]
)
def test_a_loss_function_that_returns_no_loss_is_named(loss, told):
    objective = Objective(ReturnsLogits(), lambda outputs, labels, num_items_in_batch: loss)
    with pytest.raises(ConfigError, match=f"compute_loss_func must return .* got {told}"):
        objective.loss(ReturnsLogits(), BATCH, num_targets=9, own=9)
    with pytest.raises(ConfigError, match=f"compute_loss_func must return .* got {told}"):
        objective.evaluate(ReturnsLogits(), BATCH)
    if loss is None:  # nor is there one to be had of data that nobody has labelled
        total, _, logits, labels = objective.evaluate(ReturnsLogits(), {"input_ids": IDS})
        assert total is None and labels is None and logits.shape[:2] == IDS.shape


@pytest.mark.parametrize("make", [tiny_decoder, tiny_llama, ReturnsObject, ReturnsLogits])
def test_a_batch_without_targets_is_worth_nothing(make):
    model = make()
    batch = {"input_ids": IDS, "labels": torch.full_like(IDS, -100)}
    total, count, _, _ = Objective(model).evaluate(model, batch)
    assert total.item() == 0 and count == 0
    loss = Objective(model).loss(model, batch, num_targets=5, own=0)
    loss.backward()
    assert loss.item() == 0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def transformers_models():
    from transformers import (
        BertConfig,
        BertForMaskedLM,
        LlamaConfig,
        LlamaForSequenceClassification,
        MixtralConfig,
        MixtralForCausalLM,
        T5Config,
        T5ForConditionalGeneration,
    )

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    t5 = {
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 16,
        "num_layers": 1,
        "num_heads": 2,
        "dropout_rate": 0.0,
    }
    router = {"num_local_experts": 2, "output_router_logits": True, "router_aux_loss_coef": 1.0}
    return {
        "masked": lambda: BertForMaskedLM(
            BertConfig(vocab_size=40, num_attention_heads=2, **sizes, **quiet)
        ),
        "encoder and decoder": lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=40, decoder_start_token_id=0, **t5)
        ),
        "reward": lambda: LlamaForSequenceClassification(
            LlamaConfig(vocab_size=40, num_labels=1, pad_token_id=0, **sizes, **heads)
        ),
        "experts": lambda: MixtralForCausalLM(
            MixtralConfig(vocab_size=40, **sizes, **heads, **router)
        ),
        "causal": lambda: tiny_llama(),
    }


@pytest.mark.parametrize("kind", ["masked", "encoder and decoder", "reward", "experts", "causal"])
def test_a_transformers_model_gets_the_gradients_of_its_own_loss_however_a_step_is_cut(kind):
    torch.manual_seed(0)
    model = transformers_models()[kind]().train()
    ids = torch.randint(1, 40, (4, 6))
    labels = torch.randn(4, 1) if kind == "reward" else ids
    own_loss = model(input_ids=ids, labels=labels).loss
    wanted = torch.autograd.grad(own_loss, list(model.parameters()), allow_unused=True)
    objective, batch = Objective(model), {"input_ids": ids, "labels": labels}
    number = count_targets(batch)
    whole = objective.loss(model, batch, number, number)
    assert whole.item() == pytest.approx(own_loss.item(), rel=1e-5)
    parts = [{name: value[row : row + 1] for name, value in batch.items()} for row in range(4)]
    shares = [objective.loss(model, part, number, count_targets(part)) for part in parts]
    assert sum(shares).item() == pytest.approx(own_loss.item(), rel=0.1)
    made = torch.autograd.grad(sum(shares), list(model.parameters()), allow_unused=True)
    # A router's loss is not a mean over tokens: cut otherwise, it is another number of that size.
    limit = 0.3 if kind == "experts" else 1e-3
    for ours, theirs in zip(made, wanted):
        if theirs is not None and theirs.norm() > 1e-6:
            assert (ours - theirs).norm() / theirs.norm() < limit
    total, count, _, _ = objective.evaluate(model, batch)
    assert total.item() / count == pytest.approx(own_loss.item(), rel=1e-4)


def test_a_batch_without_a_target_is_nothing_beside_the_others_of_a_transformers_model():
    model = tiny_llama()
    nothing = {"input_ids": IDS, "labels": torch.full_like(LABELS, -100)}
    share = Objective(model).loss(model, nothing, num_targets=10, own=0)
    share.backward()
    assert share.item() == 0.0
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@pytest.mark.parametrize("labels", [[[1], [2], [0]], [[1, -100], [2, -100], [0, -100]]])
def test_a_label_in_the_first_place_alone_counts(labels):
    """A class for each sample, and no next token."""
    labels = torch.tensor(labels)
    assert count_targets({"x": torch.zeros(3, 4), "labels": labels}) == 3


@pytest.mark.parametrize("labels", [[[5]], [[5, -100, -100]]])
def test_the_first_token_of_a_row_is_no_target_also_where_no_other_is(labels):
    labels = torch.tensor(labels)
    assert count_targets({"input_ids": labels.clamp(min=0), "labels": labels}) == 0


@pytest.mark.parametrize("make", [tiny_llama, tiny_decoder])
def test_a_text_of_one_token_is_nothing_beside_the_others(tmp_path, make):
    rows = [{"input_ids": ids} for ids in ([5], [1, 2, 3, 4], [9], [7, 8, 9])]
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        sums = [
            model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
            for ids in (torch.tensor([row["input_ids"]]) for row in (rows[1], rows[3]))
        ]
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path), max_steps=1, logging_steps=1, save_strategy="no", seed=0,
            per_device_train_batch_size=1, per_device_eval_batch_size=1,
            gradient_accumulation_steps=4, learning_rate=0.0, use_cpu=True,
        ),
        model=model,
        train_dataset=rows,
        eval_dataset=rows,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.log_history[0]["loss"] == pytest.approx(sum(sums) / 5, rel=1e-5)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(sum(sums) / 5, rel=1e-5)


class Unreduced(Tiny):
    def forward(self, input_ids, labels):
        return {"loss": torch.ones(2), "logits": self.logits(input_ids)}


class OfOneElement(Tiny):
    def forward(self, input_ids, labels):
        return self.mean(input_ids, labels).reshape(1), self.logits(input_ids)


class LogitsFirst(Tiny):
    """As nanoGPT gives them; its labels are shifted already."""

    def forward(self, input_ids, labels):
        return self.logits(input_ids), self.table.sum() * 0 + 3.0


def test_a_models_own_loss_is_not_passed_over():
    model = Unreduced()
    with pytest.raises(ConfigError, match=r"shape \[2\]; one number is needed"):
        Objective(model).loss(model, BATCH, num_targets=TARGETS, own=TARGETS)
    model = OfOneElement()
    assert Objective(model).loss(model, BATCH, num_targets=TARGETS, own=TARGETS).shape == ()
    model = LogitsFirst()
    loss = Objective(model).loss(model, BATCH, num_targets=TARGETS, own=TARGETS)
    assert loss.item() == 3.0


def test_an_evaluation_goes_by_the_function_that_training_goes_by():
    model = nn.Linear(4, 3)
    objective = Objective(model, lambda outputs, labels, num_items_in_batch: outputs.sum() * 0 + 2)
    total, count, _, _ = objective.evaluate(model, torch.zeros(5, 4))
    assert total.item() / count == 2.0


def test_what_a_batch_has_and_the_model_does_not_take_is_told_once(caplog):
    model = ReturnsScalar()
    padded = torch.ones_like(IDS)
    padded[:, 4:] = 0
    batch = {**BATCH, "weights": torch.ones(2), "attention_mask": padded, "name": "a"}
    objective = Objective(model)
    for _ in range(2):
        objective.loss(model, batch, num_targets=TARGETS, own=TARGETS)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "weights" in told[0] and "attention_mask" in told[1]
    full = {**BATCH, "attention_mask": torch.ones_like(IDS)}
    Objective(model).loss(model, full, num_targets=TARGETS, own=TARGETS)
    assert len(caplog.records) == 2
