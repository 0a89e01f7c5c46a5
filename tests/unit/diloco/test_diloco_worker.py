"""A worker against a real server: what it computes, and what it does when things go wrong."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.checkpoint.ranks import SoloRanks
from headway.diloco.backoff import Backoff
from headway.diloco.counters import Speed
from headway.diloco.faults import Unreachable
from headway.diloco.flight import Flight
from headway.diloco.parameters import ParameterView
from headway.diloco.server_options import ServerOptions
from headway.diloco.wire import compose
from headway.errors import ConfigError
from headway.testing.diloco import (
    Clock,
    ToyWorker,
    Values,
    serving,
    stopped,
    together,
    toy_model,
    toy_numbers,
    toy_step,
    train_together,
)

EXACT = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "accumulate": "float64"}


def trained_alone(num_steps: int, worker: int = 0) -> list[Values]:
    view, history = ParameterView(toy_model(), SoloRanks()), []
    for step in range(num_steps):
        toy_step(view.parts(), worker, step)
        history.append(view.copies())
    return history


def same(first: Values, second: Values) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(value, second[name]) for name, value in first.items()
    )


def first_values() -> Values:
    return ParameterView(toy_model(), SoloRanks()).copies()


# What is computed


def test_one_worker_with_a_plain_outer_step_trains_as_alone(tmp_path: Path) -> None:
    alone = trained_alone(20)
    with serving(tmp_path, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=5).start()
        with stopped(worker):
            worker.train(20)
    assert worker.worker.counters.sync_count == 4
    assert all(same(mine, theirs) for mine, theirs in zip(worker.history, alone, strict=True))


@pytest.mark.parametrize("stop_at", [7, 10, 11])
def test_a_resume_in_an_interval_changes_nothing(tmp_path: Path, stop_at: int) -> None:
    alone = trained_alone(20)
    with serving(tmp_path, **EXACT) as server:
        first = ToyWorker(server.address, sync_every=5).start()
        with stopped(first):
            saved = first.train(stop_at).save()
        second = ToyWorker(server.address, sync_every=5).resume(saved)
        with stopped(second):
            second.train(20 - stop_at)
    assert second.worker.counters.sync_count == 4
    assert same(second.history[-1], alone[-1])
    assert all(same(a, b) for a, b in zip(first.history + second.history, alone, strict=True))


def test_two_workers_that_sync_every_step_are_averaged(tmp_path: Path) -> None:
    with serving(tmp_path, num_workers=2, **EXACT) as server:
        workers = [ToyWorker(server.address, n, sync_every=1).start() for n in range(2)]
        with stopped(*workers):
            train_together(workers, 6)
    by_hand = first_values()
    for step in range(6):
        copies = [{n: v.clone() for n, v in by_hand.items()} for _ in workers]
        for number, values in enumerate(copies):
            toy_step(values, number, step)
        by_hand = {
            n: ((copies[0][n].double() + copies[1][n].double()) / 2).float() for n in by_hand
        }
        for worker in workers:
            assert same(worker.history[step], by_hand), step


def outer_steps(rounds: list[list[Values]], lr: float, m: float) -> list[Values]:
    """Nesterov by hand, in double precision: rounds of the workers' parameters -> the model's."""
    model = {n: v.double() for n, v in first_values().items()}
    velocity: dict[str, Tensor] = {n: torch.zeros_like(v) for n, v in model.items()}
    found = []
    for locals_ in rounds:
        for name, value in model.items():
            mean = torch.stack([one[name].double() for one in locals_]).mean(0)
            gradient = value - mean
            velocity[name] = m * velocity[name] + gradient
            model[name] = value - lr * (gradient + m * velocity[name])
        found.append({n: v.float() for n, v in model.items()})
        model = {n: v.double() for n, v in found[-1].items()}
    return found


def test_rounds_of_two_workers_are_nesterov_steps(tmp_path: Path) -> None:
    options = {"num_workers": 2, "outer_lr": 0.7, "outer_momentum": 0.9, "accumulate": "float64"}
    with serving(tmp_path, **options) as server:
        workers = [ToyWorker(server.address, n, sync_every=3).start() for n in range(2)]
        with stopped(*workers):
            train_together(workers, 12)
    model, rounds = first_values(), []
    for begin in range(0, 12, 3):
        locals_ = []
        for number in range(2):
            values = {n: v.clone() for n, v in model.items()}
            for step in range(begin, begin + 3):
                toy_step(values, number, step)
            locals_.append(values)
        rounds.append(locals_)
        model = outer_steps(rounds, 0.7, 0.9)[-1]
    for worker in workers:
        for number, wanted in enumerate(outer_steps(rounds, 0.7, 0.9)):
            found = worker.history[3 * number + 2]
            for name, value in wanted.items():
                torch.testing.assert_close(found[name], value, rtol=3e-7, atol=1e-7)


@pytest.mark.parametrize("comm", ["bf16", "int8"])
def test_less_on_the_wire(tmp_path: Path, comm: str) -> None:
    model = toy_model(4, 64)
    with serving(tmp_path, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=2, comm=comm, model=model).start()
        with stopped(worker):
            worker.train(8)
            counters = worker.worker.counters
            whole = 4 * worker.view.specification.num_elements
    share = (counters.last_sent_bytes - 4096) / whole
    assert share < (0.5 if comm == "bf16" else 0.27)
    assert counters.sync_count == 4 and counters.sent_bytes > 3 * counters.last_sent_bytes


@pytest.mark.parametrize("comm", ["float32", "bf16"])
def test_parameters_that_come_back_rounded_lose_nothing_of_what_was_learned(
    tmp_path: Path, comm: str
) -> None:
    """The worker begins from rounded numbers; the server's own are not rounded by it."""
    options = {"sync_every": 2, "comm": comm, "bf16_fetch": True, "model": toy_model(4, 64)}
    with serving(tmp_path, toy_model(4, 64), **EXACT) as server:
        state = server.core.state
        assert state is not None
        before = state.parameters
        worker = ToyWorker(server.address, **options).start()
        with stopped(worker):
            begun = worker.values
            assert same(begun, {n: v.bfloat16().float() for n, v in before.items()})
            worker.train(2)
            after = server.core.state.parameters
            assert same(worker.values, {n: v.bfloat16().float() for n, v in after.items()})
            worker.train(2)
            received_bytes = worker.worker.counters.last_received_bytes
            assert received_bytes < 0.6 * 4 * worker.view.specification.num_elements
    left = {name: value.clone() for name, value in begun.items()}
    for step in range(2):
        toy_step(left, 0, step)
    for name, now in left.items():
        moved = begun[name] - now
        wanted = before[name] - (moved if comm == "float32" else moved.bfloat16().float())
        torch.testing.assert_close(after[name], wanted, rtol=0, atol=1e-6)


def test_what_int8_leaves_over_goes_through_a_resume(tmp_path: Path) -> None:
    histories = []
    for stops in (False, True):
        with serving(tmp_path / str(stops), **EXACT) as server:
            worker = ToyWorker(server.address, sync_every=2, comm="int8").start()
            worker.train(6)
            if stops:
                saved = worker.save()
                worker.worker.stop()
                worker = ToyWorker(server.address, sync_every=2, comm="int8").resume(saved)
            with stopped(worker):
                histories.append(worker.train(6).history[-6:])
    assert all(same(a, b) for a, b in zip(*histories, strict=True))


def test_what_int8_leaves_over_is_in_the_next_exchange(tmp_path: Path) -> None:
    ends = []
    for forgets in (False, True):
        with serving(tmp_path / str(forgets), **EXACT) as server:
            worker = ToyWorker(server.address, sync_every=2, comm="int8").start()
            saved = worker.train(2).save()
            worker.worker.stop()
            if forgets:
                assert any(bool(t.any()) for t in saved["slots"].pop("residual").values())
            worker = ToyWorker(server.address, sync_every=2, comm="int8").resume(saved)
            with stopped(worker):
                ends.append(worker.train(2).values)
    assert not same(*ends)


def test_what_int8_leaves_over_is_not_sent_twice_after_a_resume(tmp_path: Path) -> None:
    """It was in a submission that counts and that the checkpoint does not know of."""
    options = {"sync_every": 2, "comm": "int8"}
    with serving(tmp_path, **EXACT) as server:
        first = ToyWorker(server.address, **options).start()
        with stopped(first):
            saved = first.train(2).save()
            first.train(2)
        assert any(bool(t.any()) for t in saved["slots"]["residual"].values())
        before = {n: t.clone() for n, t in server.core.require_state().parameters.items()}
        again = ToyWorker(server.address, **options).resume(saved)
        with stopped(again):
            for step in (3, 4):
                again.worker.after_step(step)  # steps that have changed nothing
            assert server.core.totals.num_rounds == 3
            assert same(dict(server.core.require_state().parameters), before)
            assert not any(bool(t.any()) for t in again.save()["slots"]["residual"].values())


def test_a_bfloat16_model_sends_what_it_learned_and_no_rounding(tmp_path: Path) -> None:
    model = toy_model().to(torch.bfloat16)
    with serving(tmp_path, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=2, model=model).start()
        with stopped(worker):
            worker.train(4)
            assert worker.worker.counters.sync_count == 2
            stored = server.core.state
            assert stored is not None
            for name, value in worker.values.items():
                assert torch.equal(stored.parameters[name].bfloat16().float(), value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_a_model_cannot_hold_of_the_servers_parameters_stays_there(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The server's have digits that the worker's dtype has not: an exchange takes none away."""
    with serving(tmp_path, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=1, model=toy_model().to(dtype)).start()
        with stopped(worker):
            state = server.core.require_state()
            finer = {
                name: value + 1e-4 * toy_numbers(value.shape, 3, number)
                for number, (name, value) in enumerate(state.parameters.items())
            }
            assert dtype == torch.float64 or not all(
                torch.equal(value, value.to(dtype).float()) for value in finer.values()
            )
            server.core.state = replace(state, parameters=finer)
            server.core._messages.clear()
            worker.worker.rejoin({**worker.worker.state_dict(), "rounds": []}, 0)
            worker.worker.after_step(1)  # a step that has changed nothing
            assert worker.worker.counters.sync_count == 1
            for name, value in server.core.require_state().parameters.items():
                torch.testing.assert_close(value, finer[name], rtol=0, atol=1e-7)


# Fragments


def test_fragments_take_turns_and_progress_during_an_exchange_is_kept(tmp_path: Path) -> None:
    """With a plain outer step one worker gets back what it sent: nothing may be lost or doubled."""
    with serving(tmp_path, num_fragments=3, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=6, num_fragments=3).start()
        with stopped(worker):
            worker.train(20, last=True)
    counters = worker.worker.counters
    assert counters.fragment_syncs == 10 and counters.sync_count == 3
    for mine, theirs in zip(worker.history, trained_alone(20), strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_an_exchange_under_way_keeps_what_still_holds(tmp_path: Path) -> None:
    """Its fragment is the server's after the resume; the others go on in their interval."""
    with serving(tmp_path, num_fragments=3, **EXACT) as server:
        options = {"sync_every": 12, "num_fragments": 3}
        first = ToyWorker(server.address, **options).start()
        with stopped(first):
            first.train(5)  # the first fragment's turn was after 4 steps
            saved = first.save()
            first.train(3)  # its exchange has ended
            assert server.core.totals.num_rounds >= 1
        again = ToyWorker(server.address, **options).resume(saved)
        with stopped(again):
            fragments, state = again.worker.fragments, server.core.require_state()
            # The second's turn was as the first ended: it may have moved by now, or not.
            numbers = [place.number for place in server.core.book.rounds]
            assert numbers[0] == 2 and numbers[2] == 1
            moved = {name for own, number in zip(fragments, numbers) if number > 1 for name in own}
            for name, value in again.values.items():
                wanted = state.parameters[name] if name in moved else saved["weights"][name]
                assert torch.equal(value, wanted), name
            assert again.worker.local_step == 5
            again.train(12, last=True)


def test_without_merging_the_progress_of_the_overlap_is_dropped(tmp_path: Path) -> None:
    with serving(tmp_path, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=4, overlap_steps=2, merge_alpha=0.0).start()
        with stopped(worker):
            worker.train(6)
    assert same(worker.history[5], trained_alone(4)[3])
    assert worker.worker.local_step == 2  # made on top of what was sent


def test_more_fragments_than_layers_are_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_fragments=4: allowed are 1 to 3"):
        ToyWorker("127.0.0.1:1", num_fragments=4, sync_every=8)


# Who may not take part


@pytest.mark.parametrize(
    ("server_options", "worker_options", "told"),
    [
        ({"disable_auth": False, "token": "k" * 40}, {"token": "w" * 40}, "authentication|401"),
        ({"disable_auth": False, "token": "k" * 40}, {}, "authentication|401"),
        ({"num_fragments": 2}, {}, "num_fragments=1.*2"),
        ({"model": toy_model(2)}, {}, "not this server's model: .*layers.2"),
        ({"model": toy_model(width=4)}, {}, r"layers.0.weight is float32 \[3, 3\]"),
        ({"model": toy_model().to(torch.float64)}, {}, "float32"),
    ],
    ids=["token", "no-token", "fragments", "layers", "shapes", "dtype"],
)
def test_a_worker_that_does_not_fit_is_told_why(
    tmp_path: Path, server_options: Any, worker_options: Any, told: str
) -> None:
    model = server_options.pop("model", None)
    with serving(tmp_path, model, **server_options) as server:
        with pytest.raises(ConfigError, match=f"DiLoCo: .*{told}"):
            ToyWorker(server.address, **worker_options).start()
        assert server.core.book.workers == {}


def test_an_id_that_is_taken_is_refused_and_given_back_to_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "session.json"
    with serving(tmp_path / "server", **EXACT) as server:
        first = ToyWorker(server.address, session_file=file).start()
        with pytest.raises(ConfigError, match="worker-0"):
            ToyWorker(server.address).start()
        # The same worker after a crash: it has the session of before.
        again = ToyWorker(server.address, session_file=file).start()
        with stopped(first, again):
            assert len(server.core.book.workers) == 1
    assert file.stat().st_mode & 0o077 == 0


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.diloco.client.PROTOCOL", 2)
    with (
        serving(tmp_path) as server,
        pytest.raises(ConfigError, match="version 1 of the protocol, not '2'"),
    ):
        ToyWorker(server.address).start()


# Trouble on the way


def test_values_that_are_not_finite_are_not_sent(tmp_path: Path) -> None:
    with serving(tmp_path, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=4).start()
        with stopped(worker):
            worker.train(3)
            with torch.no_grad():
                worker.view.parts()["norm.weight"][0, 0] = float("nan")
            worker.train(1)
            assert same(worker.values, first_values())
            assert worker.worker.counters.refused_syncs == 1
            assert server.core.totals.num_rounds == 0 and server.core.book.num_refused == {}
            worker.train(4)
            assert worker.worker.counters.sync_count == 1


def test_an_update_out_of_proportion_is_dropped_and_the_worker_goes_on(tmp_path: Path) -> None:
    with serving(tmp_path, max_update_norm=10.0, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=4).start()
        with stopped(worker):
            worker.train(3)
            with torch.no_grad():
                worker.view.parts()["norm.weight"].add_(1000.0)
            worker.train(1)
            assert same(worker.values, first_values())
            assert worker.worker.counters.refused_syncs == 1


def test_a_server_that_is_gone_for_a_while_costs_nothing(tmp_path: Path) -> None:
    """Training goes on alone; what was learned meanwhile is exchanged when the server is back."""
    with serving(tmp_path, **EXACT) as server:
        port = server.port
        worker = ToyWorker(server.address, sync_every=4, max_sync_retries=0).start()
        worker.train(4)
    worker.train(8)
    assert worker.worker.counters.sync_count == 1
    with serving(tmp_path, port=port, **EXACT) as server, stopped(worker):
        worker.train(8)
        assert server.core.totals.num_rounds == 2
    assert worker.worker.counters.sync_count == 3
    assert worker.worker.counters.reconnections == 1
    for mine, theirs in zip(worker.history, trained_alone(20), strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-6)


def test_a_worker_that_misses_a_round_brings_what_it_has_to_the_next(tmp_path: Path) -> None:
    options = {"num_workers": 2, "min_workers": 1, "deadline_s": 0.01, **EXACT}
    with serving(tmp_path, **options) as server:
        fast, slow = (ToyWorker(server.address, n, sync_every=2).start() for n in range(2))
        with stopped(fast, slow):
            fast.train(4)
            assert server.core.totals.num_rounds == 2
            slow.train(2)
            assert server.core.totals.num_rounds == 3
            assert slow.worker.counters.sync_count == 1
    # Both updates are in: the slow one's on top of the fast one's.
    first, end = first_values(), slow.values
    theirs, mine = trained_alone(4)[3], trained_alone(2, 1)[1]
    for name, value in end.items():
        wanted = first[name] + (theirs[name] - first[name]) + (mine[name] - first[name])
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-6)


def test_a_resume_after_the_others_moved_on_begins_a_new_interval(tmp_path: Path) -> None:
    options = {"num_workers": 2, "min_workers": 1, "deadline_s": 0.01, **EXACT}
    with serving(tmp_path, **options) as server:
        one, other = (ToyWorker(server.address, n, sync_every=4).start() for n in range(2))
        saved = one.train(2).save()
        one.worker.stop()
        other.train(4)
        again = ToyWorker(server.address, 0, sync_every=4).resume(saved)
        with stopped(other, again):
            assert same(again.values, other.values)
            assert again.worker.local_step == 0 and again.step == 2


def test_going_back_to_a_checkpoint_takes_the_servers_parameters_if_they_moved(
    tmp_path: Path,
) -> None:
    with serving(tmp_path, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=4).start()
        with stopped(worker):
            in_round = worker.train(2).save()
            worker.train(1)
            worker.load(in_round)
            worker.worker.load_parameter_state(in_round["slots"])
            worker.worker.rejoin(in_round["state"], worker.step)
            assert same(worker.values, in_round["weights"]) and worker.worker.local_step == 2
            worker.train(2)
            after_round = worker.values
            worker.load(in_round)
            worker.worker.load_parameter_state(in_round["slots"])
            worker.worker.rejoin(in_round["state"], worker.step)
            assert same(worker.values, after_round) and worker.worker.local_step == 0


@pytest.mark.parametrize("moved", [False, True])
def test_going_back_without_the_server_waits_for_a_turn_that_finds_it(
    tmp_path: Path, moved: bool
) -> None:
    options = {"num_workers": 2, "min_workers": 1, "deadline_s": 0.01, **EXACT}
    with serving(tmp_path, **options) as server:
        worker = ToyWorker(server.address, sync_every=4, max_sync_retries=0).start()
        in_round = worker.train(2).save()
    with stopped(worker):
        worker.train(1)
        worker.load(in_round)
        worker.worker.load_parameter_state(in_round["slots"])
        worker.worker.rejoin(in_round["state"], worker.step)
        worker.train(2)  # its turn: nobody is there
        assert worker.worker.counters.sync_count == 0
        port = int(server.address.rpartition(":")[2])
        with serving(tmp_path, port=port, **options) as server:
            other = ToyWorker(server.address, 1, sync_every=4).start()
            with stopped(other):
                other.train(4 * moved)
            worker.train(4)
            state = server.core.require_state()
            assert same(worker.values, state.parameters)
            assert same(worker.values, other.values) is moved
            assert worker.worker.counters.sync_count == (0 if moved else 1)
            worker.train(4)
            assert server.core.require_state().commit == 2


def test_a_stop_ends_the_wait_for_others(tmp_path: Path) -> None:
    ends = []
    with serving(tmp_path, num_workers=2, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=2, should_end=lambda: bool(ends)).start()
        with stopped(worker):
            worker.train(1)
            ends.append(True)
            worker.train(1)
            assert worker.worker.counters.sync_count == 0
            assert same(worker.values, trained_alone(2)[1])


class Flaky:
    """A server whose connection is lost after every question; each takes four seconds."""

    address = "kite:1"

    def __init__(self, clock: Clock) -> None:
        self.clock, self.num_asked, self.waits = clock, 0, list[float]()

    def submit(self, *_: Any, **__: Any) -> None:
        pass

    def ask_round(self, *_: Any, wait_s: float, limit_s: float) -> dict[str, Any]:
        self.num_asked += 1
        self.waits.append(wait_s)
        self.clock.now_s += 4
        if self.num_asked % 2:
            raise Unreachable("gone")
        return {"state": "open", "submitted": True}


def test_a_connection_that_comes_and_goes_does_not_make_the_wait_longer() -> None:
    clock = Clock()
    client = Flaky(clock)
    session = SimpleNamespace(
        client=client, session="s", worker_id="a", rounds=["r-1-x"], server={"mode": "sync"},
        make_backoff=lambda: Backoff(1e-4, 1e-4), stopping=threading.Event(), beat=lambda _: None,
    )  # fmt: skip
    flight = Flight(
        session, compose({}, {}), fragment=0, round_id="r-1-x", shapes={}, local_steps=1,
        max_retries=100, timeout_s=14.0, clock=clock,
    )  # fmt: skip
    flight.begin(beside=False)
    assert flight.finish().kind == "unsettled"
    assert client.waits == [10, 10, 6, 2]  # and none longer than what is left of it


# Turns of fragments


@pytest.mark.parametrize("how", ["behind", "same round", "new"])
def test_one_that_comes_back_meets_the_others_at_their_fragment(tmp_path: Path, how: str) -> None:
    """Else it would wait for them at one fragment, and they for it at another."""
    options = {"sync_every": 6, "num_fragments": 3}
    with serving(tmp_path, num_workers=2, num_fragments=3, **EXACT) as server:
        stays, leaves = (ToyWorker(server.address, n, **options).start() for n in range(2))
        train_together([stays, leaves], 3, last=False)
        saved = leaves.save()
        if how != "same round":
            train_together([stays, leaves], 2, last=False)
        saved["state"]["session"] = server.core.book.workers["worker-1"].session
        leaves.worker._session.close(leave=how == "new")
        comes = ToyWorker(server.address, 2 if how == "new" else 1, **options)
        comes.start() if how == "new" else comes.resume(saved)
        # Who is done leaves, so that nobody waits for it.
        together(*(lambda one=one: one.train(12).worker.stop() for one in (stays, comes)))
    assert comes.worker.counters.fragment_syncs >= 4


def test_one_that_misses_a_fragment_goes_to_where_the_others_are(tmp_path: Path) -> None:
    options = {"sync_every": 6, "num_fragments": 3}
    rules = {"num_workers": 2, "num_fragments": 3, "deadline_s": 0.01}
    with serving(tmp_path, **rules, **EXACT) as server:
        ahead, late = (ToyWorker(server.address, n, **options).start() for n in range(2))
        ahead.train(7)
        server.core.book.rules = replace(server.core.book.rules, deadline_s=600.0)
        ends = [lambda: ahead.train(11).worker.stop(), lambda: late.train(18).worker.stop()]
        together(*ends)
    assert late.worker.counters.fragment_syncs >= 4


def test_a_flight_that_follows_a_missed_round_is_begun_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Flight] = []
    begin = Flight.begin
    monkeypatch.setattr(Flight, "begin", lambda f, **k: (begun.append(f), begin(f, **k)))
    with serving(tmp_path, num_workers=2, deadline_s=0.01, **EXACT) as server:
        ahead, late = (
            ToyWorker(server.address, n, sync_every=2, overlap_steps=2).start() for n in range(2)
        )
        with stopped(ahead, late):
            ahead.train(4, last=True)
            begun.clear()
            late.train(8, last=True)
    assert late.worker.counters.sync_count >= 2
    assert len(begun) == len({id(one) for one in begun})


def test_an_end_in_the_midst_of_an_exchange_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path, num_workers=2, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=2).start()
        session = worker.worker._session

        def close(*_: Any, **__: Any) -> dict[str, Any]:
            session.close(leave=False)
            return {"state": "open", "submitted": False}

        monkeypatch.setattr(session.client, "submit", close)
        worker.train(2)
        assert worker.worker.counters.sync_count == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# Without rounds of all


def test_one_that_leaves_in_the_midst_of_an_exchange_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its submission meets a server that has let it go: the others would wait for a ghost."""
    sent, left, returned = threading.Event(), threading.Event(), threading.Event()
    with serving(tmp_path, num_workers=2, num_fragments=3, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=6, num_fragments=3).start()
        client = worker.worker._session.client
        submit, deregister, register = client.submit, client.deregister, client.register

        def submit_late(*given: Any, **query: Any) -> Any:
            sent.set()
            assert left.wait(20)
            return submit(*given, **query)

        def leave(facts: Any) -> None:
            deregister(facts)
            left.set()
            returned.wait(0.5)

        def come_back(facts: Any, **limits: Any) -> Any:
            returned.set()
            return register(facts, **limits)

        monkeypatch.setattr(client, "submit", submit_late)
        monkeypatch.setattr(client, "deregister", leave)
        monkeypatch.setattr(client, "register", come_back)
        worker.train(2)
        flight = worker.worker._flight
        assert flight is not None and sent.wait(20)
        worker.worker.stop()
        assert flight.finish().kind == "unsettled"
        assert not returned.is_set() and server.core.book.workers == {}


def test_what_is_too_old_is_dropped_and_not_given_for_new(tmp_path: Path) -> None:
    with serving(tmp_path, num_workers=2, mode="async", max_staleness=1, **EXACT) as server:
        fast, slow = (ToyWorker(server.address, n, sync_every=2).start() for n in range(2))
        with stopped(fast, slow):
            slow.train(1)
            fast.train(6)
            before = server.state_hash
            slow.train(1)
            assert server.state_hash == before
            assert slow.worker.counters.refused_syncs == 1
            assert same(slow.values, dict(server.core.require_state().parameters))
            slow.train(2)
            assert slow.worker.counters.sync_count == 1


def test_the_limit_on_age_grows_with_the_workers() -> None:
    assert [ServerOptions(num_workers=n).most_stale for n in (2, 64)] == [32, 256]
    assert ServerOptions(num_workers=64, max_staleness=3).most_stale == 3


def test_a_server_without_a_free_place_is_waited_for(tmp_path: Path) -> None:
    """More workers than places is no failure: nobody goes on alone for it."""
    with serving(tmp_path, max_uploads=1, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=2, max_sync_retries=0).start()
        with stopped(worker):
            worker.train(1)
            refused, free = server.core.book.num_refused, threading.Event()

            def hold() -> None:
                with server._places.take("another", 0):
                    free.set()
                    while refused.get("quota", 0) < 3:
                        threading.Event().wait(0.01)

            together(hold, lambda: (free.wait(), worker.train(1)), limit_s=20)
            assert worker.worker.counters.sync_count == 1


# DyLU


@pytest.mark.parametrize(
    ("server_options", "worker_options", "told"),
    [
        ({}, {"dylu": True}, ["worker-0 has dylu=True and its server dylu=False"]),
        ({"dylu": True}, {}, ["worker-0 has dylu=False and its server dylu=True"]),
        ({"sync_every": 3}, {}, ["worker-0 has sync_every=6 and its server sync_every=3"]),
        ({"sync_every": 3, "dylu": True}, {"dylu": True}, []),
        ({"sync_every": 6}, {}, []),
        ({}, {}, []),
    ],
    ids=["worker", "server", "steps", "both", "same", "none"],
)
def test_a_setting_of_one_side_only_is_told_once(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    server_options: Any,
    worker_options: Any,
    told: list[str],
) -> None:
    with serving(tmp_path, **server_options, **EXACT) as server:
        worker = ToyWorker(server.address, sync_every=6, **worker_options).start()
        with stopped(worker):
            worker.worker.rejoin(worker.worker.state_dict(), 0)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(texts) == len(told)
    assert all(words in text for words, text in zip(told, texts, strict=True))


def test_a_speed_is_known_also_of_single_steps() -> None:
    clock = Clock()
    speed = Speed(clock)
    for step_s in (100.0, 100.0, 0.5):
        clock.now_s += step_s
        speed.step()
        speed.restart()
    assert speed.per_second == 2.0


def test_slower_workers_get_fewer_steps(tmp_path: Path) -> None:
    options = {"num_workers": 2, "sync_every": 8, "dylu": True, **EXACT}
    with serving(tmp_path, **options) as server:
        fast, slow = (
            ToyWorker(server.address, n, sync_every=8, dylu=True, step_s=1.0 + n).start()
            for n in range(2)
        )
        with stopped(fast, slow):
            train_together([fast, slow], 8, last=False)
    assert (fast.worker.sync_every, slow.worker.sync_every) == (8, 4)
    assert slow.worker.counters.dylu_adjustments == 1
    assert slow.worker.sync_metrics["diloco/dylu_adjustments"] == 1
