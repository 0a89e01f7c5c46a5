"""Objects that are given beside options, and what a strategy is given for its forwards."""

import pytest
import torch

from headway import TrainingArguments
from headway.models.fused_loss import chunked_loss
from headway.strategies.single import SingleDevice
from headway.testing import tiny_decoder
from headway.trainers.preparation import choose_fused_loss, equip, model_source

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
