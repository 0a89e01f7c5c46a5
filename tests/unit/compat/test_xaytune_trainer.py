"""xaytune's Trainer: loss functions, optimizers, loaders, checkpoints and resume, in real runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from xaytune_runs import Record, make_config, make_data, make_loader, make_model, train

from headway.compat.xaytune import CallbackManager, Trainer, TrainState
from headway.compat.xaytune.plan import no_decay_groups
from headway.data.collate import PadCollator
from headway.errors import ConfigError
from headway.testing import tiny_dataset, tiny_decoder, tiny_llama


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


# The loss


def test_loss_fn_gets_model_batch_and_outputs(tmp_path: Path) -> None:
    model, seen = make_model(), []

    def loss_fn(given: Any, batch: Any, outputs: Any) -> torch.Tensor:
        seen.append((given, sorted(batch), outputs.dim()))
        return 2 * outputs

    record = Record()
    train(make_config(tmp_path, max_steps=1), record.manager, model=model, loss_fn=loss_fn)
    assert seen == [(model, ["x", "y"], 0)]
    plain = Record()
    train(make_config(tmp_path, max_steps=1), plain.manager, model=make_model())
    doubled = record.of("step_end", "metrics")[0]["loss"]
    assert doubled == pytest.approx(2 * plain.of("step_end", "metrics")[0]["loss"])


def test_preference_batches_skip_the_plain_forward(tmp_path: Path) -> None:
    class Scorer(nn.Module):
        num_calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(8, 1)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            return self.embedding(input_ids).sum((1, 2))

    def prefer(model: Any, batch: Any, outputs: Any) -> torch.Tensor:
        assert outputs is None
        margin = model(batch["chosen_input_ids"]) - model(batch["rejected_input_ids"])
        return -nn.functional.logsigmoid(margin).mean()

    pairs = [
        {"chosen_input_ids": torch.tensor([1, 2]), "rejected_input_ids": torch.tensor([3, 4])}
    ] * 8
    model, record = Scorer(), Record()
    config = make_config(tmp_path, learning_rate=0.1, scheduler="constant")
    loader = DataLoader(pairs, batch_size=2)  # type: ignore[arg-type]
    state = train(config, record.manager, model=model, train_dataloader=loader, loss_fn=prefer)
    losses = [metrics["loss"] for metrics in record.of("step_end", "metrics")]
    assert losses[-1] < losses[0]
    assert model.num_calls == 2 * state.global_step

    with pytest.raises(ConfigError, match=r"'chosen_input_ids'.*loss_fn"):
        train(config, model=Scorer(), train_dataloader=loader)


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    # Ragged lengths: a mean of means would weigh the tokens of short batches too much.
    data = tiny_dataset(8, 24, vocab_size=32, ragged=True)
    results = []
    for loss_fn in (None, lambda model, batch, outputs: outputs.loss):
        for batch_size, accumulation in ((8, 1), (2, 4)):
            torch.manual_seed(0)
            model = tiny_llama(vocab_size=32)
            train(
                make_config(tmp_path, gradient_accumulation=accumulation, max_steps=1),
                model=model,
                train_dataloader=DataLoader(data, batch_size=batch_size, collate_fn=PadCollator()),  # type: ignore[arg-type]
                optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                loss_fn=loss_fn,
            )
            results.append(weights(model))
    for result in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-6)


def test_a_batch_without_targets_does_no_harm_to_its_window(tmp_path: Path) -> None:
    batches = [
        {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[1, 2, 3]])},
        {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.full((1, 3), -100)},
    ]
    record = Record()
    train(
        make_config(tmp_path, gradient_accumulation=2, num_epochs=1),
        record.manager,
        model=tiny_llama(vocab_size=32),
        train_dataloader=batches,
        loss_fn=lambda model, batch, outputs: outputs.loss,
    )
    assert 0 < record.of("step_end", "metrics")[0]["loss"] < 10


def test_loss_fn_gets_the_logits_of_headways_decoder(tmp_path: Path) -> None:
    shapes: list[Any] = []

    def loss_fn(model: Any, batch: Any, outputs: Any) -> torch.Tensor:
        shapes.append(tuple(outputs.logits.shape))
        return nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        )

    ids = torch.arange(12).reshape(2, 6)
    state = train(
        make_config(tmp_path, num_epochs=1),
        model=tiny_decoder(vocab_size=16),
        train_dataloader=[{"input_ids": ids, "labels": ids}],
        loss_fn=loss_fn,
    )
    assert shapes == [(2, 6, 16)]
    assert state.metrics["loss"] == pytest.approx(2.77, abs=0.5)


def test_loss_fn_is_used_in_evaluation_too(tmp_path: Path) -> None:
    state = train(
        make_config(tmp_path, num_epochs=1),
        eval_dataloader=make_loader(),
        loss_fn=lambda model, batch, outputs: 0 * outputs + 3,
    )
    assert state.metrics["eval_loss"] == pytest.approx(3)


@pytest.mark.parametrize("value", [1.0, None, torch.zeros(2)])
def test_a_loss_fn_that_returns_no_scalar_tensor_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="loss_fn must return"):
        train(make_config(tmp_path), loss_fn=lambda model, batch, outputs: value)


# Optimizer and schedule


def test_norms_and_biases_do_not_decay(tmp_path: Path) -> None:
    manager, groups = CallbackManager(), []

    @manager.on("train_start")
    def look(state: TrainState, optimizer: Any) -> None:
        groups.extend((g["weight_decay"], sorted(g["param_names"])) for g in optimizer.param_groups)

    train(make_config(tmp_path, max_steps=1, weight_decay=0.1), manager)
    assert groups == [(0.0, ["linear.bias", "norm.bias", "norm.weight"]), (0.1, ["linear.weight"])]
    assert no_decay_groups(nn.Linear(2, 2, bias=False)) is None
    scale = nn.ParameterDict({"scale": torch.ones(3), "matrix": torch.ones(3, 3)})
    assert no_decay_groups(scale)["no_decay"]["regex"] == "^(?:scale)$"  # type: ignore[index]


def test_a_given_optimizer_and_scheduler_are_used(tmp_path: Path) -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    record = Record()
    config = make_config(tmp_path, gradient_accumulation=2, num_epochs=1)
    train(config, record.manager, model=model, optimizer=optimizer, scheduler=scheduler)
    rates = [metrics["learning_rate"] for metrics in record.of("step_end", "metrics")]
    assert rates == pytest.approx([1.0, 0.1, 0.1]), "one scheduler step per optimizer step"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scheduler": "constant"}, [1, 1, 1, 1]),
        ({"scheduler": "constant_with_warmup", "warmup_steps": 4}, [0.5, 0.75, 1, 1]),
        ({"scheduler": "linear", "warmup_ratio": 0.5}, [1, 1, 0.5, 0]),
        ({"scheduler": "linear"}, [0.75, 0.5, 0.25, 0]),
        ({"scheduler": "cosine"}, [0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_the_schedule_is_that_of_the_config(
    options: dict[str, Any], expected: list[float], tmp_path: Path
) -> None:
    record = Record()
    train(make_config(tmp_path, max_steps=4, learning_rate=1e-3, **options), record.manager)
    rates = [metrics["learning_rate"] / 1e-3 for metrics in record.of("step_end", "metrics")]
    assert rates == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("max_norm", "moved"), [(0.0, True), (1e-6, False)])
def test_max_grad_norm_zero_is_off(max_norm: float, moved: bool, tmp_path: Path) -> None:
    model = make_model()
    before = weights(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(
        make_config(tmp_path, max_steps=1, max_grad_norm=max_norm), model=model, optimizer=optimizer
    )
    moves = (model.linear.weight - before["linear.weight"]).abs().max() > 1e-4
    assert bool(moves) is moved


def test_a_model_in_eval_mode_is_put_in_train_mode(tmp_path: Path) -> None:
    manager, modes = CallbackManager(), []
    model = make_model().eval()
    manager.on("step_start")(lambda state, model: modes.append(model.training))
    train(make_config(tmp_path, max_steps=1), manager, model=model)
    assert modes == [True]


# Loaders


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(make_data(10))


def test_a_loader_without_length_ends_by_epochs_or_by_steps(tmp_path: Path) -> None:
    record = Record()
    loader = DataLoader(Endless(), batch_size=4)
    state = train(
        make_config(tmp_path, scheduler="constant", gradient_accumulation=2),
        record.manager,
        train_dataloader=loader,
    )
    assert (state.global_step, state.should_stop) == (4, False)
    assert record.of("step_end", "step") == [1, 2, 1, 2]
    assert record.names.count("epoch_end") == 2
    assert train(make_config(tmp_path, max_steps=3), train_dataloader=loader).global_step == 3


@pytest.mark.parametrize("option", ["scheduler", "warmup_ratio"])
def test_a_schedule_that_needs_a_length_is_not_guessed(option: str, tmp_path: Path) -> None:
    given = {"scheduler": "cosine"} if option == "scheduler" else {"warmup_ratio": 0.1}
    config = make_config(tmp_path, **{"scheduler": "constant_with_warmup", **given})
    with pytest.raises(ConfigError, match=f"{option}=.*max_steps"):
        train(config, train_dataloader=DataLoader(Endless(), batch_size=4))


def test_a_list_of_batches_is_read_as_it_is(tmp_path: Path) -> None:
    batches = list(make_loader())
    heard: list[Any] = []

    def loss_fn(model: Any, batch: Any, outputs: Any) -> torch.Tensor:
        heard.append(batch)
        return outputs

    train(make_config(tmp_path, num_epochs=1), train_dataloader=batches, loss_fn=loss_fn)
    assert [len(batch["y"]) for batch in heard] == [4, 4, 4, 4, 4, 2]
    assert all(a is b for a, b in zip(heard, batches))


def test_epochs_are_shuffled_anew(tmp_path: Path) -> None:
    orders: list[list[float]] = [[], []]
    state = TrainState()
    manager = CallbackManager()
    manager.on("step_start")(lambda given: vars(state).update(epoch=given.epoch))

    def loss_fn(model: Any, batch: Any, outputs: Any) -> torch.Tensor:
        orders[state.epoch] += batch["y"].tolist()
        return outputs

    train(make_config(tmp_path), manager, train_dataloader=make_loader(True), loss_fn=loss_fn)
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]


def test_move_batch_to_device_can_be_overridden(tmp_path: Path) -> None:
    class Shifting(Trainer):
        def move_batch_to_device(self, batch: Any) -> Any:
            return {"x": batch["x"], "y": torch.full_like(batch["y"], 5.0)}

    targets: list[float] = []

    def loss_fn(model: Any, batch: Any, outputs: Any) -> torch.Tensor:
        targets.extend(batch["y"].tolist())
        return outputs

    trainer = Shifting(make_config(tmp_path, max_steps=1))
    trainer.train(model=make_model(), train_dataloader=make_loader(), loss_fn=loss_fn)
    assert targets == [5.0] * 4


# Length


@pytest.mark.parametrize(
    ("size", "batch", "accumulation", "epochs", "most", "expected"),
    [(100, 4, 1, 3, -1, 75), (10, 4, 1, 3, -1, 6), (100, 4, 8, 2, -1, 6), (100, 4, 1, 3, 7, 7)],
)
def test_compute_total_steps(
    size: int, batch: int, accumulation: int, epochs: int, most: int, expected: int
) -> None:
    config = {"gradient_accumulation": accumulation, "num_epochs": epochs, "max_steps": most}
    assert Trainer(config).compute_total_steps(size, batch) == expected
    with pytest.raises(ConfigError, match="batch_size >= 1"):
        Trainer(config).compute_total_steps(size, 0)


def test_max_steps_caps_the_epochs_and_does_not_extend_them(tmp_path: Path) -> None:
    assert train(make_config(tmp_path, max_steps=8)).global_step == 8
    assert train(make_config(tmp_path, max_steps=500)).global_step == 12


# Checkpoints and resume


@pytest.mark.parametrize(
    ("every", "last", "expected"),
    [
        (5, True, [5, 10, 12]),
        (5, False, [5, 10]),
        (0, True, [12]),
        (0, False, []),
        (6, True, [6, 12]),
    ],
)
def test_checkpoints_are_written_when_the_config_says(
    every: int, last: bool, expected: list[int], tmp_path: Path
) -> None:
    record = Record()
    config = make_config(tmp_path, checkpoint_every_n_steps=every, save_last=last)
    state = train(config, record.manager)
    assert record.of("checkpoint_saved", "global_step") == expected
    there = {path.name for path in tmp_path.glob("checkpoint-*")}
    assert there == {f"checkpoint-{step}" for step in expected}
    if expected:
        assert state.last_checkpoint == str(tmp_path / f"checkpoint-{expected[-1]}")


def test_asynchronous_checkpoints_are_all_there_at_the_end(tmp_path: Path) -> None:
    record = Record()
    config = make_config(
        tmp_path, checkpoint_every_n_steps=5, save_last=True, async_checkpoint=True
    )
    state = train(config, record.manager)
    assert len(record.of("checkpoint_saved", "global_step")) == 3
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {
        f"checkpoint-{step}" for step in (5, 10, 12)
    }
    assert state.last_checkpoint == str(tmp_path / "checkpoint-12")


def test_a_checkpoint_has_the_models_own_names_with_a_loss_fn_too(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = make_model()
    config = make_config(tmp_path, save_last=True, max_steps=1)
    train(config, model=model, loss_fn=lambda model, batch, outputs: outputs)
    (file,) = tmp_path.glob("checkpoint-1/model*.safetensors")
    assert_same(load_file(file), weights(model))


@pytest.mark.parametrize("way", ["directory", "state", "run folder"])
def test_a_resumed_run_equals_an_uninterrupted_one(way: str, tmp_path: Path) -> None:
    options = {"checkpoint_every_n_steps": 4, "gradient_accumulation": 1, "num_epochs": 2}
    whole_model, whole = make_model(), Record()
    train(
        make_config(tmp_path / "whole", **options),
        whole.manager,
        model=whole_model,
        train_dataloader=make_loader(shuffle=True),
    )

    manager = CallbackManager()
    manager.on("checkpoint_saved")(TrainState.stop_training)
    config = make_config(tmp_path / "parts", **options)
    first = train(config, manager, train_dataloader=make_loader(shuffle=True))
    assert first.global_step == 4

    torch.manual_seed(999)  # another process would stand elsewhere
    resume: dict[str, Any] = {
        "directory": {
            "resume_checkpoint_dir": first.last_checkpoint,
            "resume_state": TrainState(global_step=4),
        },
        "state": {"resume_state": first},
        "run folder": {"resume_checkpoint_dir": str(tmp_path / "parts")},
    }[way]
    model, rest = make_model(), Record()
    nn.init.zeros_(model.linear.weight)
    state = train(
        config,
        rest.manager,
        model=model,
        train_dataloader=make_loader(shuffle=True),
        **resume,
    )
    assert (state.global_step, state.epoch) == (12, 1)
    assert rest.of("step_start", "global_step") == list(range(4, 12))
    assert rest.of("step_start", "step") == whole.of("step_start", "step")[4:]
    assert rest.of("step_end", "metrics") == whole.of("step_end", "metrics")[4:]
    assert_same(weights(model), weights(whole_model))


def test_a_resume_at_the_end_trains_nothing(tmp_path: Path) -> None:
    config = make_config(tmp_path, save_last=True, max_steps=3)
    model = make_model()
    done = train(config, model=model)
    before, record = weights(model), Record()
    state = train(config, record.manager, model=model, resume_state=done)
    assert state.global_step == 3
    assert "step_start" not in record.names
    assert_same(weights(model), before)


def test_resume_mistakes_are_refused_before_anything_is_trained(tmp_path: Path) -> None:
    config = make_config(tmp_path / "run", save_last=True, max_steps=2)
    done = train(config)
    with pytest.raises(ConfigError, match="already holds checkpoint-2"):
        train(config)
    with pytest.raises(ConfigError, match="no complete Headway checkpoint"):
        train(config, resume_checkpoint_dir=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=r"at step 9, but .* saved at step 2"):
        train(
            config,
            resume_state=TrainState(global_step=9),
            resume_checkpoint_dir=done.last_checkpoint,
        )
    with pytest.raises(ConfigError, match="give resume_checkpoint_dir"):
        train(config, resume_state=TrainState(global_step=2))
