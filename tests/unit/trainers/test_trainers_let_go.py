"""A trainer that is dropped gives its memory back: the next run of the process may need it."""

import gc
import multiprocessing
import weakref

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from headway import Trainer, TrainerCallback, TrainingArguments
from headway.strategies.offload import ActivationOffload, HostLane
from headway.testing import tiny_dataset, tiny_decoder
from headway.testing.trainer import tiny_trainer
from headway.trainers import preparation

FUSED = {"fuse_optim_with_backward": True}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
MODES = {
    "plain": {},
    "fused": FUSED,
    "fused, compiled": {**FUSED, **COMPILED},
    "fused, recomputed": {**FUSED, "gradient_checkpointing": True},
    "recomputed": {"gradient_checkpointing": True},
    "selective": {"gradient_checkpointing": True, "gradient_checkpointing_policy": "selective"},
    "offloaded": {"enable_activation_offloading": True},
    "compiled": COMPILED,
    "compiled whole": {**COMPILED, "torch_compile_scope": "model"},
    "adamw_bf16": {"optim": "adamw_bf16", "default_dtype": "bfloat16"},
    "adamw_8bit": {"optim": "adamw_8bit"},
    "saved": {"save_strategy": "steps", "save_steps": 1, "save_async": True},
    "saved in line": {"save_strategy": "steps", "save_steps": 1, "save_async": False},
}


class Stop(TrainerCallback):
    """Raises in the second step, after its backward pass."""

    def __init__(self, error):
        self.error = error

    def on_pre_optimizer_step(self, state):
        if state.global_step == 1:
            raise self.error("on purpose")


def train(trainer):
    trainer.train()


def fail(trainer):
    trainer.add_callback(Stop(RuntimeError))
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer.train()


def interrupt(trainer):
    trainer.add_callback(Stop(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def train_twice(trainer):
    trainer.train()
    trainer.args.max_steps += 2
    trainer.train(resume_from_checkpoint=False)


def evaluate(trainer):
    trainer.evaluate()


def weak(trainer):
    """References to all that takes memory, none of which keeps it."""
    model, optimizer = trainer.model, trainer.optimizer
    held = {f"weight {name}": p for name, p in model.named_parameters()}
    for number, state in enumerate(optimizer.state.values() if optimizer is not None else ()):
        tensors = {key: v for key, v in state.items() if isinstance(v, torch.Tensor)}
        held |= {f"{key} of weight {number}": value for key, value in tensors.items()}
    found = {name: weakref.ref(tensor) for name, tensor in held.items()}
    # Also bytes that only a tensor of another name holds.
    bytes_of = {name: StorageWeakRef(p.untyped_storage()) for name, p in model.named_parameters()}
    return found, bytes_of


def use_and_drop(folder, use, **arguments):
    trainer = tiny_trainer(folder, max_steps=3, **arguments)
    use(trainer)
    return weak(trainer)


def assert_gone(references):
    gc.collect()
    found, bytes_of = references
    assert found and bytes_of
    assert [name for name, reference in found.items() if reference() is not None] == []
    assert [name for name, storage in bytes_of.items() if not storage.expired()] == []


@pytest.mark.parametrize("use", [train, fail], ids=lambda use: use.__name__)
@pytest.mark.parametrize("mode", MODES)
def test_nothing_is_kept_of_a_run(tmp_path, monkeypatch, mode, use):
    if mode == "adamw_8bit":
        pytest.importorskip("torchao")
    # On a CPU nothing would be moved; here it is, by copies.
    monkeypatch.setattr(
        preparation,
        "make_offload",
        lambda device: ActivationOffload(HostLane(), device, min_bytes=0),
    )
    # torchao compiles its update, which takes long; what it holds is the same.
    with torch.compiler.set_stance("force_eager" if mode == "adamw_8bit" else "default"):
        references = use_and_drop(tmp_path, use, **MODES[mode])
    assert_gone(references)


@pytest.mark.parametrize("use", [interrupt, train_twice, evaluate], ids=lambda use: use.__name__)
@pytest.mark.parametrize("mode", ["plain", "fused"])
def test_nothing_is_kept_however_a_trainer_was_used(tmp_path, mode, use):
    assert_gone(use_and_drop(tmp_path, use, **MODES[mode]))


@pytest.mark.parametrize("mode", ["plain", "fused"])
def test_nothing_is_kept_of_a_trial_of_learning_rates(tmp_path, mode):
    trainer, weights = tiny_trainer(tmp_path, max_steps=3, **MODES[mode]), {}

    def model_init():
        model = tiny_decoder()
        weights.update({name: weakref.ref(p) for name, p in model.named_parameters()})
        return model

    trainer.model_init = model_init
    trainer.lr_find(num_iterations=20)
    del trainer
    gc.collect()
    assert weights and [name for name, weight in weights.items() if weight() is not None] == []


def test_a_model_that_is_kept_is_free_of_its_trainers(tmp_path):
    trainer = tiny_trainer(tmp_path, max_steps=2, **FUSED)
    fail(trainer)
    model, optimizer = trainer.model, weakref.ref(trainer.optimizer)
    weights = [p.detach().clone() for p in model.parameters()]

    def own_backward():
        ids = torch.zeros(1, 4, dtype=torch.int64)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        assert all(map(torch.equal, model.parameters(), weights)), "somebody updated them"

    own_backward()  # the trainer is there, and failed in the middle of a step
    del trainer
    gc.collect()
    own_backward()
    assert optimizer() is None
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_workers_that_stay_between_evaluations_end_with_the_run(tmp_path):
    data = tiny_dataset(8, sequence_length=8)
    before = set(multiprocessing.active_children())
    trainer = Trainer(
        args=TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, per_device_train_batch_size=2, use_cpu=True,
            eval_strategy="steps", eval_steps=1, save_strategy="no",
            dataloader_num_workers=1, dataloader_persistent_workers=True,
        ),
        model=tiny_decoder(),
        train_dataset=data,
        eval_dataset=data,
    )  # fmt: skip
    trainer.train()
    assert set(multiprocessing.active_children()) == before
