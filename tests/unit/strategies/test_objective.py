"""Any model that returns a loss or logits can be trained."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from headway import ConfigError
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
        (ReturnsLogits(), "text", "a batch must be a dict of tensors"),
    ],
)
def test_what_cannot_be_trained_is_said(model, batch, message):
    with pytest.raises(ConfigError, match=message):
        Objective(model).loss(model, batch, num_targets=9, own=9)


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
