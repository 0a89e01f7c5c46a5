"""A loss made along with the logits: the same numbers, no whole logits."""

from __future__ import annotations

import copy
import logging
import sys
import types

import pytest
import torch
from torch import nn

from headway import ConfigError, Trainer, TrainerCallback, TrainingArguments
from headway.models.fused_loss import FusedLoss, chunked_loss, cut_cross_entropy_loss
from headway.models.loss import IGNORED_LABEL, cross_entropy_sum
from headway.precision import fp8
from headway.testing import tiny_dataset, tiny_decoder, tiny_llama


def train(
    tmp_path, model, *, fused_loss_factory=None, compute_loss_func=None, callbacks=(), **options
):
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            save_strategy="no",
            logging_steps=1,
            seed=3,
            use_cpu=True,
            **options,
        ),
        model=model,
        train_dataset=tiny_dataset(),
        eval_dataset=tiny_dataset(),
        fused_loss_factory=fused_loss_factory,
        compute_loss_func=compute_loss_func,
        callbacks=list(callbacks),
    )
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return losses, trainer


class Counting:
    """A factory that notes what its loss is called with."""

    def __init__(self):
        self.heads, self.shapes = [], []

    def __call__(self, head):
        self.heads.append(head)
        inner = chunked_loss(head)

        def loss(hidden, labels, num_items_in_batch=None):
            self.shapes.append(tuple(hidden.shape))
            return inner(hidden, labels, num_items_in_batch=num_items_in_batch)

        return loss


@pytest.mark.parametrize("make", [tiny_decoder, tiny_llama])
def test_a_fused_loss_trains_as_the_models_own(tmp_path, make):
    torch.manual_seed(0)
    model = make()
    plain, _ = train(tmp_path / "plain", copy.deepcopy(model))
    counting = Counting()
    fused, trainer = train(tmp_path / "fused", model, fused_loss_factory=counting)
    assert fused == pytest.approx(plain, rel=1e-5)
    assert counting.heads == [trainer.model.get_output_embeddings()]
    assert len(counting.shapes) == 8 and counting.shapes[0][-1] == 32, "hidden states, not logits"
    by_name, _ = train(tmp_path / "name", copy.deepcopy(model), fused_loss="chunked")
    assert len(by_name) == 4


def test_no_logits_are_made_in_training_and_all_of_them_elsewhere(tmp_path):
    widths = []
    model = tiny_llama()
    _, trainer = train(tmp_path, model, fused_loss="chunked")
    model.lm_head.register_forward_hook(lambda m, i, o: widths.append(tuple(o.shape)))
    trainer.train_dataset = tiny_dataset()
    batch = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    assert model(**batch).logits.shape == (2, 8, model.config.vocab_size)
    assert trainer.evaluate()["eval_loss"] > 0
    assert all(len(shape) == 3 for shape in widths)


def test_a_copy_of_the_model_uses_its_own_head(tmp_path):
    _, trainer = train(tmp_path, tiny_decoder(), fused_loss="chunked")
    copied = copy.deepcopy(trainer.model)
    nn.init.zeros_(copied.get_output_embeddings().weight)
    ids = torch.ones(1, 4, dtype=torch.long)
    assert copied(ids).logits.abs().max() == 0
    assert trainer.model(ids).logits.abs().max() > 0


class Capped(nn.Module):
    """A model that works on its logits, as some families do."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_decoder()

    def forward(self, input_ids, labels=None):
        logits = torch.tanh(self.inner(input_ids).logits / 2) * 2
        if labels is None:
            return {"logits": logits}
        count = (labels[..., 1:] != IGNORED_LABEL).sum()
        return {"loss": cross_entropy_sum(logits, labels) / count}

    def get_output_embeddings(self):
        return self.inner.lm_head


class Headless(Capped):
    def get_output_embeddings(self):
        return None


class Wrapped(nn.Module):
    """Shows a layer's weight, and adds something to what the layer gives."""

    def __init__(self, base):
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features, bias=False)

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        return self.base(x) + self.more(x)


def with_an_adapter():
    model = tiny_llama()
    model.lm_head = Wrapped(model.lm_head)
    return model


def with_a_hook():
    model = tiny_llama()
    model.lm_head.register_forward_hook(lambda layer, given, made: made * 0.5)
    return model


def with_experts():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=258,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=4,
            output_router_logits=True,
            router_aux_loss_coef=0.5,
        )
    )


def of_masked_tokens():
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(
        BertConfig(
            vocab_size=258,
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (Capped, "works on its logits"),
        (Headless, "no output layer"),
        (with_an_adapter, "a Wrapped that does more"),
        (with_a_hook, "a Linear that does more"),
        (with_experts, "a loss of its own (aux_loss)"),
        (of_masked_tokens, "not that of the next token"),
    ],
)
def test_a_model_that_does_not_lend_itself_keeps_its_own_loss(tmp_path, caplog, make, reason):
    torch.manual_seed(0)
    model = make()
    plain, _ = train(tmp_path / "plain", copy.deepcopy(model))
    with caplog.at_level(logging.WARNING):
        fused, _ = train(tmp_path / "fused", model, fused_loss="chunked")
    assert fused == plain
    assert [reason in record.message for record in caplog.records].count(True) == 1


@pytest.mark.parametrize(("make", "lends_itself"), [(Capped, False), (tiny_llama, True)])
def test_a_batch_without_a_target_tells_as_much_about_a_model_as_any_other(make, lends_itself):
    """Its loss is zero, which passes through a soft cap as it is."""
    torch.manual_seed(0)
    model, ids = make(), torch.randint(0, 258, (2, 8))
    fused = FusedLoss(chunked_loss)
    fused.install(model)
    nothing = torch.full_like(ids, IGNORED_LABEL)
    first = fused.loss(model, {"input_ids": ids}, nothing, 1)
    assert fused.active == lends_itself
    if lends_itself:
        first.backward()
        assert first.item() == 0.0
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        second = fused.loss(model, {"input_ids": ids}, ids, 14)
        assert second.item() == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)


def test_a_hook_that_comes_in_the_middle_of_a_run_sees_logits(tmp_path, caplog):
    seen = []

    class Looks(TrainerCallback):
        def on_step_begin(self, state, model):
            if state.global_step == 2:
                head = model.get_output_embeddings()
                head.register_forward_hook(lambda m, given, made: seen.append(made.shape))

    torch.manual_seed(0)
    model = tiny_llama()
    plain, _ = train(tmp_path / "plain", copy.deepcopy(model))
    fused, _ = train(tmp_path / "fused", model, fused_loss="chunked", callbacks=[Looks()])
    assert fused == pytest.approx(plain, rel=1e-5)
    assert seen and all(shape[-1] == model.config.vocab_size for shape in seen)
    assert "has a hook" in caplog.text


@pytest.mark.parametrize(
    ("make", "kind", "arguments"),
    [
        (tiny_decoder, "FakeQuantizedLinear", {"qat_recipe": "int8-dynamic-act-int4-weight"}),
        (tiny_llama, "Float8Linear", {"fp8_recipe": "tensorwise", "fp8_dim_alignment": 0}),
    ],
)
def test_a_head_in_few_bits_is_not_passed_over(tmp_path, caplog, make, kind, arguments):
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = make()
    option = "qat_exclude" if "qat_recipe" in arguments else "fp8_exclude"
    with fp8.on_any_device():
        plain, _ = train(tmp_path / "a", copy.deepcopy(model), **arguments, **{option: []})
        fused, trainer = train(
            tmp_path / "b", copy.deepcopy(model), fused_loss="chunked", **arguments, **{option: []}
        )
        assert type(trainer.model.lm_head).__name__ == kind
        assert fused == plain, "the head computes as it does in evaluations"
        told = [record.message for record in caplog.records if "fused loss" in record.message]
        assert len(told) == 1 and kind in told[0] and option in told[0]
        # With a head that stays whole, as it does by default, it is used.
        counting = Counting()
        train(tmp_path / "c", model, fused_loss_factory=counting, **arguments)
    assert len(counting.shapes) == 8


def test_losses_that_are_not_there(tmp_path, monkeypatch):
    for module in ("liger_kernel", "liger_kernel.transformers", "cut_cross_entropy"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"fused_loss.*'ligre'.*did you mean 'liger'"):
        TrainingArguments(fused_loss="ligre")
    for name, package in (("liger", "liger-kernel"), ("cut_cross_entropy", "cut-cross-entropy")):
        with pytest.raises(ConfigError, match=rf"{package}.*headway\[gpu\]"):
            train(tmp_path, tiny_decoder(), fused_loss=name)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", types.ModuleType("liger"))
    with pytest.raises(ConfigError, match=r"'liger' needs a GPU.* on cpu; 'chunked' works"):
        train(tmp_path, tiny_decoder(), fused_loss="liger")
    with pytest.raises(ConfigError, match="must return a function"):
        train(tmp_path, tiny_decoder(), fused_loss_factory=lambda head: 3)


def test_a_head_with_a_bias_needs_a_package_that_takes_one(monkeypatch):
    package = types.ModuleType("cut_cross_entropy")
    package.linear_cross_entropy = lambda e, c, targets, ignore_index=-100, reduction="mean": None
    monkeypatch.setitem(sys.modules, "cut_cross_entropy", package)
    cut_cross_entropy_loss(torch.nn.Linear(4, 8, bias=False))
    with pytest.raises(ConfigError, match=r"takes no bias.*'chunked'"):
        cut_cross_entropy_loss(torch.nn.Linear(4, 8))
