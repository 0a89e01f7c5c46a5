"""Objects that are given beside options, and what a strategy is given for its forwards."""

import functools

import pytest
import torch

from headway import ConfigError, Trainer, TrainingArguments
from headway.models.fused_loss import chunked_loss
from headway.optim.build import build_optimizer
from headway.strategies.single import SingleDevice
from headway.testing import tiny_dataset, tiny_decoder
from headway.trainers.preparation import choose_fused_loss, equip, model_source, takes_flex

CPU = torch.device("cpu")


def plain_loss(outputs, labels, num_items_in_batch=None):
    raise AssertionError


@pytest.mark.parametrize(
    ("named", "factory", "plain", "told"),
    [
        (None, None, plain_loss, []),
        ("chunked", None, None, []),
        ("chunked", chunked_loss, None, ["fused_loss='chunked'", "since fused_loss_factory is"]),
        (None, chunked_loss, plain_loss, ["compute_loss_func and fused_loss_factory are both"]),
        ("chunked", None, plain_loss, ["compute_loss_func and fused_loss='chunked' are both"]),
    ],
)
def test_a_loss_given_twice_is_told(named, factory, plain, told, caplog):
    args = TrainingArguments(use_cpu=True, fused_loss=named)
    assert (choose_fused_loss(args, factory, CPU, plain) is None) is (factory is named is None)
    assert all(words in caplog.text for words in told) and bool(told) is bool(caplog.text)


@pytest.mark.parametrize(
    ("options", "takes"),
    [
        ({}, True),
        ({"torch_compile_mode": "default"}, True),
        ({"sdpa_backend": "flash4"}, True),
        ({"torch_compile": False}, False),
        ({"torch_compile_backend": "aot_eager"}, False),
        ({"torch_compile_mode": "reduce-overhead"}, False),
        ({"torch_compile_scope": "model"}, False),
        ({"sdpa_backend": "flash"}, False),
        ({"enable_activation_offloading": True}, False),
        ({"activation_memory_budget": 0.5}, False),
    ],
)
def test_flex_attention_is_taken_unasked_where_compiled_blocks_go_with_it(options, takes):
    args = TrainingArguments(use_cpu=True, **{"torch_compile": True, **options})
    assert takes_flex(args) is takes


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_function_for_recomputation_that_is_off_is_told(recomputes, caplog):
    args = TrainingArguments(use_cpu=True, gradient_checkpointing=recomputes)
    model_source(
        args,
        tiny_decoder(),
        None,
        rank=0,
        device=CPU,
        recompute=lambda rank, module: None,
        fused_loss=None,
        has_checkpoint=False,
    )
    text = "enable_activation_checkpoint_fn: without effect, since gradient_checkpointing is False"
    assert (text in caplog.text) is not recomputes


@pytest.mark.parametrize(("mode", "marks"), [("reduce-overhead", 1), ("default", 0)])
def test_graphs_of_a_device_are_told_of_steps_before_anything_runs(mode, marks, monkeypatch):
    """An evaluation may come first, and would lose what one block gives to the next."""
    told = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: told.append(1))
    strategy = SingleDevice(CPU)
    args = {"torch_compile": True, "torch_compile_mode": mode, "use_cpu": True}
    equip(strategy, TrainingArguments(**args))
    assert len(told) == marks
    with strategy.eval_context():  # what an evaluation keeps of a batch must outlast the next one
        assert len(told) == marks
    with strategy.train_context():
        assert len(told) == 2 * marks


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"compute_metrics": 5}, r"compute_metrics: 5 is no function; allowed: .*\(prediction\)"),
        ({"compute_loss_func": lambda o, labels: o}, "compute_loss_func: .* 'num_items_in_batch'"),
        ({"data_collator": "pad"}, "data_collator: 'pad' is no function"),
        (
            {"model_init": lambda trial: tiny_decoder()},
            r"model_init: .*called with \(\): .*'trial'",
        ),
        ({"optimizer_factory": torch.optim.SGD([torch.ones(1)])}, "optimizer_factory: SGD"),
        ({"lr_scheduler_factory": 3}, r"lr_scheduler_factory: 3 is no .*\(optimizer\)"),
        ({"callbacks": "EMACallback"}, "callbacks must be a list, .*got 'EMACallback'"),
        ({"callbacks": 5}, "callbacks must be a list, .*got 5"),
        ({"optimizer_cls_and_kwargs": torch.optim.SGD}, "optimizer_cls_and_kwargs must be .*SGD"),
        (
            {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lrr": 1})},
            "optimizer_cls_and_kwargs: SGD: .*'lrr'",
        ),
    ],
)
def test_a_function_that_cannot_be_called_is_named_before_it_costs_anything(
    tmp_path, given, message
):
    args = TrainingArguments(use_cpu=True, output_dir=str(tmp_path / "out"), max_steps=1)
    with pytest.raises(ConfigError, match=message):
        Trainer(**{"args": args, "model_init": tiny_decoder, "train_dataset": tiny_dataset(8)}
                | given).train()  # fmt: skip
    assert not (tmp_path / "out").exists()


def with_predictions_alone(function):
    @functools.wraps(function)
    def call(prediction):
        return function(prediction.predictions, prediction.label_ids)

    return call


def test_functions_of_any_kind_are_taken():
    class Collator:
        def __call__(self, samples, return_tensors=None):
            return samples

    args = TrainingArguments(use_cpu=True)
    Trainer(
        args=args,
        model_init=tiny_decoder,
        data_collator=Collator(),
        compute_loss_func=plain_loss,
        compute_metrics=dict,  # tells no signature
        preprocess_logits_for_metrics=torch.add,
        optimizer_factory=torch.optim.AdamW,
        lr_scheduler_factory=torch.optim.lr_scheduler.ConstantLR,
    )
    # What a decorator takes counts, and not what it wraps.
    Trainer(
        args=args,
        model_init=tiny_decoder,
        compute_metrics=with_predictions_alone(lambda predictions, labels: {}),
    )
    adamw = functools.partial(torch.optim.AdamW, lr=0.5)
    made = build_optimizer(tiny_decoder(), args, cls_and_kwargs=(adamw, {"eps": 0.1}))
    assert [(group["lr"], group["eps"]) for group in made.param_groups] == [(0.5, 0.1)]
