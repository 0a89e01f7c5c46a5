"""The optimizer inside the backward pass: the same weights, bit for bit, and no gradients left."""

import types
from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.utils.checkpoint import checkpoint

from headway import ConfigError, Trainer, TrainerCallback, TrainingArguments
from headway.data.datasets import SyntheticDataset
from headway.data.windows import Window
from headway.engine.delivery import NonFiniteError
from headway.optim.adamw_step import has_other_step
from headway.optim.build import build_optimizer
from headway.optim.in_backward import BackwardSteps
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice
from headway.strategies.source import ModelSource
from headway.testing import tiny_dataset, tiny_decoder, tiny_llama

CPU = torch.device("cpu")


class Watch(TrainerCallback):
    """Notes when the events around the step come, and which gradients there are then."""

    def __init__(self):
        self.events, self.num_gradients = [], []

    def note(self, event, model):
        self.events.append(event)
        self.num_gradients.append(sum(p.grad is not None for p in model.parameters()))

    def on_gradients(self, args, state, control, model, **kwargs):
        self.note("on_gradients", model)

    def on_pre_optimizer_step(self, args, state, control, model, **kwargs):
        self.note("on_pre_optimizer_step", model)

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        self.note("on_optimizer_step", model)


def run(
    folder, *, fused, model_init=tiny_decoder, steps=50, callbacks=(), dataset=None, **arguments
):
    settings = {"learning_rate": 1e-2, "weight_decay": 0.1, "save_strategy": "no", **arguments}
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(folder / ("fused" if fused else "plain")),
            max_steps=steps,
            per_device_train_batch_size=2,
            logging_steps=1,
            warmup_steps=2,
            seed=0,
            use_cpu=True,
            fuse_optim_with_backward=fused,
            **settings,
        ),
        model_init=model_init,
        train_dataset=dataset or tiny_dataset(2 * steps, sequence_length=8),
        callbacks=list(callbacks),
        default_callbacks=False,
    )
    trainer.train()
    return trainer


def history(trainer):
    return [
        (r["loss"], r["grad_norm"], r["learning_rate"])
        for r in trainer.state.log_history
        if "grad_norm" in r
    ]


def assert_same_run(first, second):
    assert history(first) == history(second) and len(history(first)) > 0
    for (name, a), b in zip(first.model.named_parameters(), second.model.parameters()):
        assert torch.equal(a, b), name
        states = first.optimizer.state.get(a, {}), second.optimizer.state.get(b, {})
        assert states[0].keys() == states[1].keys()
        for key, value in states[0].items():
            if isinstance(value, torch.Tensor) and not hasattr(value, "codes"):
                assert torch.equal(value, states[1][key]), (name, key)


@pytest.mark.parametrize(
    "arguments",
    [
        {"optim": "adamw"},
        {"optim": "adamw", "optim_args": {"foreach": False, "fused": False}},
        {"optim": "adamw", "no_decay_on": ["norm", "bias", "embedding"]},
        {"optim": "sgd", "optim_args": {"momentum": 0.9, "nesterov": True}},
        {"optim": "muon"},
        {"optim": "adamw_bf16", "default_dtype": "bfloat16"},
        {"optim": "adamw", "mixed_precision": "bf16"},
    ],
    ids=lambda arguments: "-".join(str(value) for value in arguments.values()),
)
def test_fifty_steps_give_the_same_bits_as_the_plain_optimizer(tmp_path, arguments):
    plain = run(tmp_path, fused=False, **arguments)
    fused = run(tmp_path, fused=True, **arguments)
    assert_same_run(plain, fused)
    assert history(plain)[0][0] > history(plain)[-1][0], "something was learnt"


def freeze_some(**fields):
    model = tiny_decoder(**fields)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].mlp.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("model_init", "arguments"),
    [
        (partial(tiny_decoder, tie_embeddings=True), {}),
        (partial(tiny_llama, tie_word_embeddings=True), {}),
        (freeze_some, {}),
        (partial(tiny_decoder, tie_embeddings=True), {"gradient_checkpointing": True}),
    ],
    ids=["tied", "tied-llama", "frozen", "recomputed"],
)
def test_tied_frozen_and_recomputed_models(tmp_path, model_init, arguments):
    options = {"model_init": model_init, "steps": 10, **arguments}
    assert_same_run(run(tmp_path, fused=False, **options), run(tmp_path, fused=True, **options))


def test_low_bit_moments(tmp_path):
    init = partial(tiny_decoder, hidden_size=64, intermediate_size=128, num_layers=1)
    options = {"model_init": init, "steps": 5, "optim": "adamw_8bit"}
    with torch.compiler.set_stance("force_eager"):
        plain, fused = (run(tmp_path, fused=fused, **options) for fused in (False, True))
    assert any(hasattr(state["exp_avg"], "codes") for state in fused.optimizer.state.values())
    assert_same_run(plain, fused)


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path):
    options = {"fused": True, "optim": "muon", "save_strategy": "steps", "save_steps": 4}
    whole = run(tmp_path / "whole", steps=10, **options)
    run(tmp_path / "parts", steps=10, stop_at=4, **options)
    resumed = run(tmp_path / "parts", steps=10, **options)
    assert len(history(resumed)) == 10 and resumed.state.global_step == 10
    assert_same_run(whole, resumed)


def test_events_come_as_ever_and_see_no_gradients(tmp_path):
    watch = Watch()
    run(tmp_path, fused=True, steps=3, callbacks=[watch])
    assert watch.events == 3 * ["on_gradients", "on_pre_optimizer_step", "on_optimizer_step"]
    assert set(watch.num_gradients) == {0}


def test_training_again_does_not_update_twice(tmp_path):
    trainer = run(tmp_path, fused=True, steps=3)
    trainer.args.max_steps = 6
    trainer.train(resume_from_checkpoint=False)
    hooks = [p._post_accumulate_grad_hooks for p in trainer.model.parameters()]
    assert {len(own) for own in hooks} == {1}
    trainer.strategy.teardown()
    assert not any(own for own in hooks)


# -- one step by hand -------------------------------------------------------------------------


class Pair(nn.Module):
    """Two weights, of which one can be given a gradient that is not finite."""

    def __init__(self):
        super().__init__()
        self.good, self.bad = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x, labels=None):
        constant, is_bad = x
        loss = self.good.sum() + constant
        # Finite, with a slope that is not.
        return loss + torch.sqrt(self.bad - 1).sum() if is_bad else loss


def one_step(x, **arguments):
    strategy = SingleDevice(CPU, step_in_backward=True)
    model = strategy.setup(ModelSource(Pair()))
    optimizer = build_optimizer(model, TrainingArguments(use_cpu=True, **arguments))
    strategy.adopt(optimizer)
    calls = []
    strategy.before_apply = lambda: calls.append(model.good.detach().clone())
    objective = Objective(model, lambda outputs, labels, num_items_in_batch: outputs)
    batch = {"x": x, "labels": torch.zeros(1, 2, dtype=torch.int64)}
    window = Window([batch], 1, 0, 0)
    loss = strategy.forward_backward(window, objective, 1, lambda event: None)
    norm = strategy.clip(None)
    assert strategy.apply(optimizer, loss, norm)
    assert torch.equal(*calls, torch.ones(3)), "before anything is updated"
    return model, optimizer, norm


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_a_gradient_that_is_not_finite_withholds_its_own_update_alone(optim):
    model, optimizer, norm = one_step((0.0, True), optim=optim)
    assert not torch.isfinite(norm)
    assert torch.equal(model.bad, torch.ones(3)) and not optimizer.state.get(model.bad)
    assert (model.good < 1).all()
    assert torch.equal(model.unused, torch.ones(3))
    assert all(p.grad is None for p in model.parameters())


def test_a_loss_that_is_not_finite_withholds_the_whole_step():
    model, optimizer, norm = one_step((torch.inf, False))
    assert torch.isfinite(norm), "its gradients are"
    assert torch.equal(model.good, torch.ones(3))
    assert not any(optimizer.state.values())


@pytest.mark.parametrize("fused", [False, True])
def test_the_error_tells_the_truth_about_the_other_weights(tmp_path, fused):
    made = []

    def spoilt():
        made.append(tiny_decoder())
        made[0].model.embed_tokens.weight.register_hook(lambda gradient: gradient * torch.nan)
        return made[0]

    with pytest.raises(NonFiniteError, match="not finite at step 1") as caught:
        run(tmp_path, fused=fused, model_init=spoilt, steps=2, nonfinite_action="raise")
    torch.manual_seed(0)
    before = tiny_decoder().lm_head.weight
    assert torch.equal(made[0].lm_head.weight, before) != fused
    assert ("the weights are as before" in str(caught.value)) != fused
    assert ("may have updated other weights" in str(caught.value)) == fused


def test_the_flag_of_fused_kernels_withholds_as_well():
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    steps = BackwardSteps(optimizer, reading_waits=True)
    for factor in (torch.nan, 1.0):
        with steps.during(None, None):
            (weight * factor).sum().backward()
        steps.finish()
        assert torch.equal(weight, torch.ones(3)) == (factor != factor)


def test_a_backward_pass_of_somebody_else_updates_nothing():
    weight = nn.Parameter(torch.ones(3))
    steps = BackwardSteps(torch.optim.SGD([weight], lr=1.0), reading_waits=False)
    weight.sum().backward()
    assert torch.equal(weight, torch.ones(3)) and weight.grad is not None
    weight.grad = None
    with steps.during(None, None):
        weight.sum().backward()
    steps.finish()
    assert torch.equal(weight, torch.zeros(3))


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_step_that_somebody_put_on_the_optimizer_is_not_passed_over(scheduled):
    weight = nn.Parameter(torch.ones(3))

    def new_optimizer(patched):
        optimizer = torch.optim.AdamW([weight], fused=True)
        if patched:
            step = types.MethodType(lambda self, closure=None: AdamW.step(self, closure), optimizer)
            optimizer.step = step
        if scheduled:  # wraps what it finds
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        return optimizer

    assert has_other_step(new_optimizer(patched=True))
    assert not has_other_step(new_optimizer(patched=False))
    BackwardSteps(new_optimizer(patched=False), reading_waits=False)
    with pytest.raises(ConfigError, match="somebody put another step on this optimizer"):
        BackwardSteps(new_optimizer(patched=True), reading_waits=False)


def test_several_micro_batches_are_refused_also_where_a_global_batch_makes_them(tmp_path):
    with pytest.raises(ConfigError, match=r"global_batch_tokens=32: fuse_optim.*_steps=2"):
        data = SyntheticDataset(8, sequence_length=8, vocab_size=258)
        run(tmp_path, fused=True, steps=2, dataset=data, global_batch_tokens=32)


class Doubles(TrainerCallback):
    """Puts a batch into the window twice."""

    def on_window(self, args, state, control, window, **kwargs):
        window.micro_batches *= 2


def test_a_window_that_a_callback_makes_longer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be used with 2 micro-batches in a step"):
        run(tmp_path, fused=True, steps=2, callbacks=[Doubles()])


def test_a_gradient_in_two_parts_is_refused():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x):
            x.requires_grad_()
            for _ in range(2):  # each recomputation is a backward pass of its own
                x = checkpoint(self.layer, x, use_reentrant=True)
            return x

    model = Twice()
    args = TrainingArguments(use_cpu=True)
    steps = BackwardSteps(build_optimizer(model, args), reading_waits=False)
    refused = pytest.raises(ConfigError, match=r"layer\.(weight|bias) came in two parts.*reentrant")
    with refused, steps.during(None, None):
        model(torch.ones(1, 2)).sum().backward()


class Counting(torch.optim.SGD):
    """Keeps a number for all parameters together, as schedule-free optimizers do."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_an_optimizer_that_counts_for_all_parameters_together_is_refused():
    weight = nn.Parameter(torch.ones(3))
    steps = BackwardSteps(Counting([weight], lr=1.0), reading_waits=False)
    refused = pytest.raises(ConfigError, match="cannot be used with Counting, which keeps k")
    with refused, steps.during(None, None):
        weight.sum().backward()
