"""DDP by itself: what one process would do, the same bits again, ranks that step on their own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from headway.args import DDPArguments, DDPTrainingArguments, PostLocalSGDArguments
from headway.data.loader import Window, WindowLoader
from headway.dist.group import DistributedContext
from headway.strategies.base import Strategy
from headway.strategies.ddp import DistributedDataParallelStrategy
from headway.strategies.objective import Objective
from headway.strategies.single import SingleDevice
from headway.strategies.source import ModelSource
from headway.testing import run_ranks, tiny_decoder

CPU = torch.device("cpu")
# One more than full windows take on 2 and on 4 ranks: the last window has a sample for one rank.
NUM_SAMPLES = 33


class Tokens:
    """Sequences of which some labels are no targets, a different number in each."""

    is_deterministic = True

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        ids = torch.arange(12) * (number + 3) % 50
        labels = ids.clone()
        labels[: number % 7] = -100
        return {"input_ids": ids, "labels": labels}


class Normed(nn.Module):
    """Has buffers, a branch that takes no part in the loss, and returns a mean."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 50)
        self.register_buffer("mask", torch.tensor([True, False]))
        if unused:
            self.idle = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.norm(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": mean_loss({"logits": logits}, labels), "logits": logits}


def mean_loss(outputs: dict[str, Tensor], labels: Tensor, num_items_in_batch: Any = 0) -> Tensor:
    logits = outputs["logits"]
    return nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, 50), labels[:, 1:].reshape(-1), ignore_index=-100
    )


def make_ddp(
    make: Callable[[], nn.Module],
    *,
    ddp: dict[str, Any] | None = None,
    local: dict[str, Any] | None = None,
    dispatch: bool = False,
    seed: int = 3,
) -> DistributedDataParallelStrategy:
    args = DDPTrainingArguments(
        dispatch_batches=dispatch,
        ddp=DDPArguments(**(ddp or {})),
        post_local_sgd=PostLocalSGDArguments(**(local or {})),
    )
    context = DistributedContext(dist.get_rank(), dist.get_world_size(), backend="gloo")
    strategy = DistributedDataParallelStrategy(context, CPU, args)
    return set_up(strategy, make, seed)


def set_up(strategy: Any, make: Callable[[], nn.Module], seed: int = 3) -> Any:
    torch.manual_seed(seed)
    strategy.setup(ModelSource(model=make()))
    return strategy


class Run:
    """A loop in small: one strategy, one optimizer, the data from where it stands."""

    def __init__(self, strategy: Strategy, *, batch_size: int = 2, accumulation: int = 2) -> None:
        self.strategy = strategy
        shard = strategy.data_shard()
        self.loader = WindowLoader(
            Tokens(),
            batch_size=batch_size,
            accumulation=accumulation,
            seed=7,
            rank=shard.rank,
            world_size=shard.world_size,
        )
        model = strategy.unwrap()
        self.objective = Objective(model)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.history: list[tuple[float, float]] = []

    def steps(self, count: int, after: Callable[[], None] | None = None) -> Run:
        while count:
            for window in self.strategy.feed(self.loader):
                self.step(window)
                count -= 1
                if after is not None:
                    after()
                if not count:
                    break
            if self.loader.at_end:
                self.loader.start_epoch(self.loader.epoch + 1)
        return self

    def step(self, window: Window, *, spoil: bool = False) -> None:
        totals = window.totals or window
        targets = max(1, int(totals.num_target_tokens))
        share = self.strategy.forward_backward(window, self.objective, targets, ignore_event)
        if spoil:
            next(self.strategy.unwrap().parameters()).grad.fill_(math.nan)
        norm = self.strategy.clip(1.0)
        self.strategy.apply(self.optimizer, share, norm)
        loss = self.strategy.reduce(share, "sum")
        self.history.append((loss.item(), norm.item()))

    def save(self) -> Any:
        """As a checkpoint does it: the ranks meet first, then everything is copied."""
        before_save = getattr(self.strategy, "before_save", None)
        if before_save is not None:
            before_save()
        components = {c.key: c.stateful.state_dict() for c in self.strategy.state_components()}
        model = self.strategy.unwrap().state_dict()
        state = (model, self.optimizer.state_dict(), self.loader.state_dict(), components)
        return tuple(map(copy.deepcopy, state))  # no tensor in two of them

    def load(self, state: Any) -> Run:
        model, optimizer, loader, components = copy.deepcopy(state)
        self.strategy.unwrap().load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        self.loader.load_state_dict(loader)
        for component in self.strategy.state_components():
            if component.key in components:
                component.stateful.load_state_dict(components[component.key])
        return self

    def weights(self) -> Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.strategy.unwrap().parameters()])


def ignore_event(name: str) -> None:
    pass


def gather(value: Tensor) -> list[Tensor]:
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value.contiguous())
    return values


def is_equal_on_ranks(value: Tensor) -> bool:
    return all(torch.equal(value, other) for other in gather(value))


def alone(**options: Any) -> Run:
    """One process that takes the same samples in each step."""
    batch = options.pop("batch_size", 2) * dist.get_world_size()
    return Run(set_up(SingleDevice(CPU), tiny_decoder), batch_size=batch, **options)


# ---- the same as one process, and the same again


def compare_with_single() -> dict[str, Any]:
    results: dict[str, Any] = {}
    expected = alone()
    one_batch = alone(batch_size=4, accumulation=1)
    for name, options in {
        "plain": {},
        "dispatched": {"dispatch": True},
        "small buckets": {"ddp": {"bucket_cap_mb": 1, "gradient_as_bucket_view": False}},
        "static": {"ddp": {"static_graph": True}},
        "unused": {"ddp": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}},
    }.items():
        run = Run(make_ddp(tiny_decoder, **options))
        results[name] = run.steps(6).history, run.weights(), is_equal_on_ranks(run.weights())
    expected.steps(6)
    one_batch.steps(6)
    results["single"] = expected.history, expected.weights(), True
    results["one batch"] = one_batch.history, one_batch.weights(), True
    again = Run(make_ddp(tiny_decoder)).steps(6)
    results["again"] = again.history, again.weights(), True
    for stop, options in ((1, {}), (3, {}), (2, {"static_graph": True})):
        first = Run(make_ddp(tiny_decoder, ddp=options)).steps(stop)
        resumed = Run(make_ddp(tiny_decoder, ddp=options, seed=99)).load(first.save())
        history = first.history + resumed.steps(6 - stop).history
        results[f"resumed at {stop}"] = history, resumed.weights(), True
    return results


@pytest.fixture(scope="module", params=[2, 4])
def compared(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(compare_with_single, request.param, timeout_s=240)


@pytest.mark.parametrize("name", ["plain", "dispatched", "small buckets", "static", "unused"])
def test_losses_norms_and_weights_are_those_of_one_process(compared: Any, name: str) -> None:
    for result in compared:
        history, weights, is_equal = result[name]
        for reference in ("single", "one batch"):
            torch.testing.assert_close(
                torch.tensor(history), torch.tensor(result[reference][0]), rtol=1e-5, atol=0
            )
            torch.testing.assert_close(weights, result[reference][1], rtol=1e-4, atol=2e-4)
        assert is_equal
        assert history == compared[0][name][0]


@pytest.mark.parametrize("name", ["again", "resumed at 1", "resumed at 3", "resumed at 2"])
def test_the_same_run_gives_the_same_bits(compared: Any, name: str) -> None:
    reference = "static" if name == "resumed at 2" else "plain"
    for result in compared:
        assert result[name][0] == result[reference][0]
        assert torch.equal(result[name][1], result[reference][1])


# ---- gradients, reductions, buffers


def look_inside() -> dict[str, Any]:
    results: dict[str, Any] = {}
    rank, world_size = dist.get_rank(), dist.get_world_size()

    # The last window of an epoch, in which one rank has the only sample.
    gradients: dict[str, dict[str, Tensor]] = {}
    single = alone()
    for name, run in {"ddp": Run(make_ddp(tiny_decoder)), "single": single}.items():
        windows = list(run.strategy.feed(run.loader))
        totals = windows[-1].totals or windows[-1]
        run.strategy.forward_backward(
            windows[-1], run.objective, int(totals.num_target_tokens), ignore_event
        )
        gradients[name] = {n: p.grad for n, p in run.strategy.unwrap().named_parameters()}
    results["gradient error"] = max(
        float((value - gradients["single"][name]).abs().max())
        for name, value in gradients["ddp"].items()
    )

    # One reduction per window, however many micro-batches it has.
    reduced = []

    def count(state, bucket):
        reduced.append(bucket.index())
        return (
            dist.all_reduce(bucket.buffer() / world_size, async_op=True)
            .get_future()
            .then(lambda future: future.value()[0])
        )

    run = Run(make_ddp(tiny_decoder), accumulation=4)
    run.strategy._wrapped.register_comm_hook(None, count)
    run.steps(2)
    results["reductions"] = reduced.count(0)

    # Ranks start from rank 0's weights, or from their own where those are equal.
    synced = Run(make_ddp(tiny_decoder, seed=rank)).steps(1)
    own = Run(make_ddp(tiny_decoder, ddp={"init_sync": False})).steps(1)
    results["init_sync"] = is_equal_on_ranks(synced.weights()), is_equal_on_ranks(own.weights())

    # Each rank's batch moves its own running mean; an evaluation takes rank 0's.
    normed = Run(make_ddp(lambda: Normed(unused=True), ddp={"find_unused_parameters": True}))
    normed.steps(5)
    given = Run(make_ddp(Normed))
    given.objective = Objective(given.strategy.unwrap(), mean_loss)
    given.steps(5)
    results["means over nothing"] = all(map(math.isfinite, sum(normed.history + given.history, ())))
    model = normed.strategy.unwrap()
    apart = is_equal_on_ranks(model.norm.running_mean)
    mean = gather(model.norm.running_mean)[0].clone()
    model.eval()
    for window in normed.strategy.feed(normed.loader, training=False):
        normed.strategy.eval_forward(window.micro_batches[0], normed.objective)
        break
    results["buffers"] = apart, torch.equal(model.norm.running_mean, mean)
    results["idle"] = model.idle.weight.grad is None

    # Wrapping changes neither the generators nor the gradients.
    torch.manual_seed(11)
    before = torch.get_rng_state()
    strategy = make_ddp(lambda: Normed(), seed=11)
    torch.manual_seed(11)
    Normed()
    after_making = torch.get_rng_state()
    torch.manual_seed(11)
    make_ddp(lambda: Normed(), seed=11)
    results["untouched"] = (
        torch.equal(torch.get_rng_state(), after_making) and not torch.equal(before, after_making),
        all(p.grad is None for p in strategy.unwrap().parameters()),
        int(strategy.unwrap().norm.num_batches_tracked),
    )

    # A gradient that is not finite on one rank withholds the step on all.
    run = Run(make_ddp(tiny_decoder))
    before_step = run.weights().clone()
    window = next(run.strategy.feed(run.loader))
    for batch in window.micro_batches if rank == 1 else ():
        batch["labels"][0, 5] = 49
    share_broken = Broken(run.objective, broken=rank == 1)
    targets = int(window.totals.num_target_tokens)
    share = run.strategy.forward_backward(window, share_broken, targets, ignore_event)
    norm = run.strategy.clip(1.0)
    run.strategy.apply(run.optimizer, share, norm)
    results["withheld"] = not math.isfinite(norm), torch.equal(before_step, run.weights())
    return results


class Broken:
    """An objective whose loss overflows where its gradient alone would not show it."""

    def __init__(self, inner: Objective, *, broken: bool) -> None:
        self.inner, self.broken = inner, broken
        self.count_targets = inner.count_targets

    def loss(self, *args: Any) -> Tensor:
        loss = self.inner.loss(*args)
        return loss + math.inf if self.broken else loss


def test_gradients_reductions_buffers_and_withheld_steps() -> None:
    for result in run_ranks(look_inside, 2, timeout_s=240):
        assert result["gradient error"] < 1e-6
        assert result["reductions"] == 2
        assert result["means over nothing"]
        assert result["init_sync"] == (True, True)
        assert result["buffers"] == (False, True)
        assert result["idle"]
        assert result["untouched"] == (True, True, 0)
        assert result["withheld"] == (True, True)


# ---- post-local SGD

LOCAL = {"enabled": True, "start_step": 2, "period": 3}


def go_apart() -> dict[str, Any]:
    results: dict[str, Any] = {}

    # Weights after each step: together to step 2, then every third one.
    run, together = Run(make_ddp(tiny_decoder, local=LOCAL)), []
    run.steps(9, lambda: together.append(is_equal_on_ranks(run.weights())))
    results["together"] = together
    results["norms"] = is_equal_on_ranks(torch.tensor(run.history, dtype=torch.float64))

    # With plain SGD, averaging after each step is what reducing gradients is.
    ends = []
    for local in ({"enabled": True, "start_step": 0, "period": 1}, None):
        same = Run(make_ddp(tiny_decoder, local=local))
        same.optimizer = torch.optim.SGD(same.strategy.unwrap().parameters(), lr=1e-3)
        same.strategy.clip = lambda limit: torch.ones(())  # type: ignore[method-assign]
        ends.append(same.steps(4).weights())
    results["averaging error"] = float((ends[0] - ends[1]).abs().max())

    # Reducing on keeps the ranks together.
    kept, always = (
        Run(make_ddp(tiny_decoder, local=LOCAL | {"post_local_gradient_allreduce": True})),
        [],
    )
    kept.steps(5, lambda: always.append(is_equal_on_ranks(kept.weights())))
    results["kept"] = all(always)

    # A save at any step: the live run goes on from the mean, each rank with its own moments.
    for stop in (1, 4, 5):
        first = Run(make_ddp(tiny_decoder, local=LOCAL)).steps(stop)
        own = gather(first.weights())
        state = first.save()
        mean = sum(own) / len(own)
        saved = torch.cat([v.reshape(-1) for k, v in state[0].items() if v.is_floating_point()])
        live = first.weights()
        assert torch.allclose(live, mean, atol=1e-7), "the live run is averaged"
        assert torch.equal(saved[: live.numel()], live)
        common = gather_optimizer(state[1])
        resumed = Run(make_ddp(tiny_decoder, local=LOCAL, seed=99))
        resumed.load((state[0], common, state[2], state[3]))
        first.steps(6)
        resumed.steps(6)
        results[f"resumed at {stop}"] = (
            torch.equal(first.weights(), resumed.weights()),
            first.history[stop:] == resumed.history,
            not is_equal_on_ranks(moments(first)),
        )

    # One rank's gradient breaks in a local step: nobody steps.
    run = Run(make_ddp(tiny_decoder, local=LOCAL)).steps(3)
    before = run.weights().clone()
    window = next(run.strategy.feed(run.loader))
    run.step(window, spoil=dist.get_rank() == 1)
    results["withheld"] = torch.equal(before, run.weights())

    # An evaluation is of one model.
    list(run.strategy.feed(run.loader, training=False))
    results["evaluated"] = is_equal_on_ranks(run.weights())

    # Another number of ranks takes the shared moments.
    state = run.strategy.state_components()[0].stateful.state_dict()
    other = make_ddp(tiny_decoder, local=LOCAL)
    stateful = other.state_components()[0].stateful
    stateful.load_state_dict({**state, "world_size": 7})
    kept_state = stateful.state_dict()
    results["another size"] = "optimizer" in state, "optimizer" in kept_state
    results["counted"] = kept_state["num_steps"]
    return results


def gather_optimizer(state: dict[str, Any]) -> dict[str, Any]:
    """Rank 0's moments for all: what the shared part of a checkpoint holds."""
    for moments_of_one in state["state"].values():
        for value in moments_of_one.values():
            dist.broadcast(value, 0)
    return state


def moments(run: Run) -> Tensor:
    return torch.cat([s["exp_avg"].reshape(-1) for s in run.optimizer.state.values()])


def test_ranks_step_apart_average_and_resume() -> None:
    for result in run_ranks(go_apart, 2, timeout_s=240):
        assert result["together"] == [True, True, False, False, True, False, False, True, False]
        assert result["norms"]
        assert result["averaging error"] < 1e-6
        assert result["kept"]
        for stop in (1, 4, 5):
            assert result[f"resumed at {stop}"] == (True, True, True), stop
        assert result["withheld"]
        assert result["evaluated"]
        assert result["another size"] == (True, False)
        assert result["counted"] == 4


# ---- local steps in a whole run, with checkpoints


def train_locally(folder: str, *, max_steps: int, resume: bool | str) -> dict[str, Any]:
    from headway import DDPTrainer
    from headway.dist import init_distributed

    init_distributed(use_cpu=True)
    args = DDPTrainingArguments(
        output_dir=folder,
        max_steps=max_steps,
        save_steps=3,
        save_total_limit=5,
        lr_scheduler_type="constant",
        logging_steps=1,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        seed=4,
        use_cpu=True,
        # Averages after steps 4, 7 and 10: the saves fall in between.
        post_local_sgd=PostLocalSGDArguments(enabled=True, start_step=1, period=3),
    )
    trainer = DDPTrainer(
        args=args, model_init=tiny_decoder, train_dataset=Tokens(), default_callbacks=False
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = {
        r["step"]: (r["loss"], r["grad_norm"]) for r in trainer.state.log_history if "loss" in r
    }
    weights = torch.cat([p.detach().reshape(-1) for p in trainer.strategy.unwrap().parameters()])
    return {"losses": losses, "weights": weights, "equal": is_equal_on_ranks(weights)}


def resume_locally(folder: str) -> dict[str, Any]:
    whole = train_locally(f"{folder}/whole", max_steps=9, resume=False)
    train_locally(f"{folder}/parts", max_steps=6, resume=False)
    rest = train_locally(f"{folder}/parts", max_steps=9, resume=True)
    early = train_locally(f"{folder}/parts", max_steps=9, resume=f"{folder}/whole/checkpoint-3")
    return {"whole": whole, "rest": rest, "early": early}


def test_a_run_with_local_steps_saves_anywhere_and_resumes_bitwise(tmp_path: Any) -> None:
    from headway import Trainer, TrainingArguments

    for result in run_ranks(resume_locally, 2, str(tmp_path), timeout_s=240):
        whole = result["whole"]
        assert whole["equal"]  # the last save made them so
        for name, first in (("rest", 7), ("early", 4)):
            part = result[name]
            assert torch.equal(part["weights"], whole["weights"]), name
            assert {s: v for s, v in whole["losses"].items() if s >= first} == {
                s: v for s, v in part["losses"].items() if s >= first
            }, name
    # One process goes on from it as from any other checkpoint.
    args = TrainingArguments(
        output_dir=str(tmp_path / "whole"), max_steps=10, use_cpu=True, save_strategy="no"
    )
    trainer = Trainer(
        args=args, model_init=tiny_decoder, train_dataset=Tokens(), default_callbacks=False
    )
    assert trainer.train(resume_from_checkpoint=True).global_step == 10


class Viewed(Normed):
    """Buffers that are columns of a larger tensor, of complex numbers, or empty."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(4, 6)
        self.register_buffer("columns", self.table[:, 3:])
        self.register_buffer("turns", torch.zeros(3, dtype=torch.complex64))
        self.register_buffer("nothing", torch.zeros(0, 2))


def join_viewed() -> dict[str, list[float]]:
    rank = dist.get_rank()
    strategy = make_ddp(Viewed)
    model = strategy.unwrap()
    model.table.fill_(rank + 1)
    model.turns.fill_(complex(rank + 1, rank + 1))
    assert strategy.before_save is not None
    strategy.before_save()
    return {
        "the rest of the table": model.table[:, :3].unique().tolist(),
        "columns": model.columns.unique().tolist(),
        "turns": torch.view_as_real(model.turns).unique().tolist(),
    }


def test_buffers_that_lie_apart_are_joined_and_nothing_beside_them_is_written() -> None:
    for rank, found in enumerate(run_ranks(join_viewed, 2, timeout_s=120)):
        wanted = {"the rest of the table": [rank + 1.0], "columns": [1.0], "turns": [1.0]}
        assert found == wanted
