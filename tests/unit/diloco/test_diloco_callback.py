"""DiLoCoCallback: its options, what misconfiguration leads to, and whole runs against a server."""

from __future__ import annotations

import logging
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from headway.callbacks import DiLoCoCallback, FreezeCallback
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import assert_no_import
from headway.testing.diloco import serving, toy_model
from headway.testing.trainer import tiny_trainer

VARIABLES = {
    "DILOCO_SERVER": "kite:7650",
    "DILOCO_SYNC_EVERY": "20",
    "DILOCO_WORKER_ID": "left",
    "DILOCO_BF16_COMM": "no",
    "DILOCO_DYLU": "Yes",
    "DILOCO_HEARTBEAT_INTERVAL": "1.5",
    "DILOCO_NUM_FRAGMENTS": "2",
}


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*VARIABLES, "DILOCO_COMM", "DILOCO_TOKEN", "DILOCO_TOKEN_FILE", "DILOCO_TLS_CA"]:
        monkeypatch.delenv(name, raising=False)


def shown(callback: DiLoCoCallback) -> dict[str, Any]:
    o = callback.options
    return {
        "DILOCO_SERVER": callback.server_addr,
        "DILOCO_SYNC_EVERY": o.sync_every,
        "DILOCO_WORKER_ID": callback.worker_id,
        "DILOCO_BF16_COMM": o.comm,
        "DILOCO_DYLU": o.dylu,
        "DILOCO_HEARTBEAT_INTERVAL": o.heartbeat_interval,
        "DILOCO_NUM_FRAGMENTS": o.num_fragments,
    }


# Options


def test_defaults() -> None:
    callback = DiLoCoCallback()
    assert list(shown(callback).values()) == ["", 500, "", "bf16", False, 30.0, 1]
    assert callback.options.timeout == 600 and callback.options.max_sync_retries == 3
    assert not callback.active


def test_the_environment_comes_before_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert list(shown(DiLoCoCallback()).values()) == [
        "kite:7650", 20, "left", "float32", True, 1.5, 2,
    ]  # fmt: skip


def test_arguments_come_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    callback = DiLoCoCallback(
        server_addr="gull:1",
        sync_every=3,
        worker_id="right",
        bf16_comm=True,
        dylu=False,
        heartbeat_interval=9.0,
        num_fragments=1,
    )
    assert list(shown(callback).values()) == ["gull:1", 3, "right", "bf16", False, 9.0, 1]


def test_empty_variables_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, " ")
    assert shown(DiLoCoCallback()) == shown(DiLoCoCallback())
    assert DiLoCoCallback().options.sync_every == 500 and not DiLoCoCallback().active


def test_an_empty_address_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DILOCO_SERVER", "kite:7650")
    assert DiLoCoCallback().active and not DiLoCoCallback(server_addr="").active


@pytest.mark.parametrize(
    ("word", "meant"), [("1", 1), ("TRUE", 1), ("yes", 1), ("on", 0), ("0", 0)]
)
def test_flags_of_the_environment(monkeypatch: pytest.MonkeyPatch, word: str, meant: int) -> None:
    monkeypatch.setenv("DILOCO_DYLU", word)
    assert DiLoCoCallback().options.dylu is bool(meant)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"sync_every": 0}, ("sync_every: 0", "from 1 up")),
        ({"sync_every": -3}, ("sync_every: -3",)),
        ({"sync_every": 1.5}, ("sync_every: 1.5",)),
        ({"num_fragments": 0}, ("num_fragments: 0",)),
        ({"num_fragments": 9, "sync_every": 4}, ("num_fragments: 9", "sync_every (4)")),
        ({"heartbeat_interval": 0}, ("heartbeat_interval: 0", "above 0")),
        ({"timeout": float("nan")}, ("timeout: nan",)),
        ({"max_sync_retries": -1}, ("max_sync_retries: -1",)),
        ({"comm": "bfloat16"}, ("comm", "bf16")),
        ({"bf16_comm": "yes"}, ("bf16_comm: 'yes'",)),
        ({"dylu": 1}, ("dylu: 1",)),
        ({"bf16_fetch": "yes"}, ("bf16_fetch: 'yes'",)),
        ({"overlap_steps": 6, "sync_every": 5}, ("overlap_steps: 6", "at most 5")),
        ({"merge_alpha": 2}, ("merge_alpha: 2", "0 to 1")),
        ({"worker_id": "a b"}, ("worker_id: 'a b'",)),
        ({"server_addr": "kite"}, ("server_addr: 'kite'", "HOST:PORT")),
        ({"server_addr": 7650}, ("server_addr: 7650",)),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_a_wrong_value_is_refused_with_its_name(given: dict[str, Any], told: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        DiLoCoCallback(**given)
    assert str(caught.value).startswith("DiLoCoCallback: ")
    for text in told:
        assert text in str(caught.value)


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        DiLoCoCallback(sync_every=0, timeout=-1, comm="int4")
    assert len(caught.value.problems) == 3


def test_a_bad_number_in_the_environment_names_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DILOCO_SYNC_EVERY", "often")
    with pytest.raises(ValueError, match="DILOCO_SYNC_EVERY: 'often'"):
        DiLoCoCallback()


def test_making_one_imports_no_torch() -> None:
    assert_no_import(
        "from headway.callbacks import DiLoCoCallback; DiLoCoCallback('kite:7650', sync_every=5)"
    )


# Runs without a server


def test_without_an_address_a_run_trains_alone_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headway"):
        output = tiny_trainer(tmp_path, [DiLoCoCallback()], max_steps=2).train()
    assert output.global_step == 2
    assert len(re.findall("DiLoCoCallback: not active", caplog.text)) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "kite.invalid"])
def test_a_server_that_is_not_there_ends_the_run_before_it_trains(
    tmp_path: Path, host: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    callback = DiLoCoCallback(f"{host}:{port}", max_sync_retries=1, first_retry_s=0.01)
    trainer = tiny_trainer(tmp_path, [callback], max_steps=2)
    with pytest.raises(ConfigError, match=f"DiLoCo: {host}:{port}"):
        trainer.train()
    assert trainer.state.global_step == 0 and callback.worker is None


# Runs with one

PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0, "nesterov": False, "accumulate": "float64"}


class Seen(TrainerCallback):
    """The records and the weights of a run; stops or fails it at a step."""

    def __init__(self, stop_at: int | None = None, fail_at: int | None = None) -> None:
        self.stop_at, self.fail_at = stop_at, fail_at
        self.logs: list[dict[str, Any]] = []
        self.figures: dict[int, dict[str, float]] = {}
        self.weights: dict[int, dict[str, Any]] = {}

    def on_step_end(self, state: Any, control: Any, model: Any) -> None:
        self.weights[state.global_step] = {
            name: value.detach().clone() for name, value in model.named_parameters()
        }
        control.should_training_stop |= state.global_step == self.stop_at
        if state.global_step == self.fail_at:
            raise RuntimeError("power")

    def on_log(self, logs: dict[str, Any]) -> None:
        self.logs.append(dict(logs))

    def on_metrics(self, step: int, metrics: dict[str, float]) -> None:
        self.figures[step] = dict(metrics)


class Early(Seen):
    """One that reads records before most others."""

    priority = 5


def equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    import torch

    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_a_run_with_one_worker_is_the_run_without_also_over_a_resume(tmp_path: Path) -> None:
    settings = {"max_steps": 11, "learning_rate": 1e-2, "num_samples": 32}
    alone = Seen()
    tiny_trainer(tmp_path / "alone", [alone], **settings).train()
    saves = {"save_strategy": "steps", "save_steps": 5}
    with serving(tmp_path / "server", **PLAIN) as server:

        def make() -> DiLoCoCallback:
            return DiLoCoCallback(server.address, sync_every=3, bf16_comm=False)

        first, second = Seen(stop_at=5), Seen()
        begun, resumed = make(), make()
        tiny_trainer(tmp_path, [begun, first], **settings, **saves).train()
        assert server.core.book.workers == {}  # it has left
        trainer = tiny_trainer(tmp_path, [resumed, second], **settings, **saves)
        trainer.train(resume_from_checkpoint=True)
        assert server.core.totals.num_rounds == 3
    seen = {**first.weights, **second.weights}
    assert seen.keys() == alone.weights.keys()
    assert all(equal(values, alone.weights[step]) for step, values in seen.items())
    assert resumed.state_dict()["worker_id"] == begun.state_dict()["worker_id"]
    assert resumed.state_dict()["sync_count"] == 3


def test_every_record_has_the_figures_whoever_reads_it(tmp_path: Path) -> None:
    early, late = Early(), Seen()
    with serving(tmp_path / "server") as server:
        callback = DiLoCoCallback(server.address, sync_every=2)
        tiny_trainer(tmp_path, [early, late, callback], max_steps=4).train()
    for seen in (early, late):
        steps = [one for one in seen.logs if "loss" in one]
        assert [one["diloco/sync_count"] for one in steps] == [0, 1, 1, 2]
        assert [one["diloco/local_step"] for one in steps] == [1, 0, 1, 0]
        assert seen.figures[2]["diloco/sync_count"] == 1 and "diloco/drift" in seen.figures[4]
        assert {f"diloco/{name}" for name in NAMES} <= steps[-1].keys()
    assert 0 < late.logs[3]["diloco/drift"] < 1


NAMES = [
    "sync_count",
    "local_step",
    "last_sync_time",
    "total_sync_time",
    "last_send_mb",
    "last_recv_mb",
    "steps_per_second",
    "sync_every",
]


def test_a_run_that_is_too_short_for_an_exchange_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for max_steps, warned in ((3, True), (4, False)):
        with serving(tmp_path / f"server-{max_steps}") as server:
            callback = DiLoCoCallback(server.address, sync_every=4)
            tiny_trainer(tmp_path / str(max_steps), [callback], max_steps=max_steps).train()
        assert ("exchanges nothing" in caplog.text) is warned
        caplog.clear()


def test_a_run_that_fails_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    with serving(tmp_path / "server") as server:
        callback = DiLoCoCallback(server.address, sync_every=2)
        with pytest.raises(RuntimeError, match="power"):
            tiny_trainer(tmp_path, [callback, Seen(fail_at=3)], max_steps=4).train()
        assert server.core.book.workers == {} and callback.worker is None


def test_a_mistake_of_the_worker_ends_the_run_before_it_trains(tmp_path: Path) -> None:
    with serving(tmp_path / "server", toy_model()) as server:
        trainer = tiny_trainer(tmp_path, [DiLoCoCallback(server.address)], max_steps=4)
        with pytest.raises(ConfigError, match=r"DiLoCo: .*not this server's model"):
            trainer.train()
    assert trainer.state.global_step == 0


def test_an_optimizer_in_the_backward_is_counted_like_any_other(tmp_path: Path) -> None:
    with serving(tmp_path / "server", **PLAIN) as server:
        callback = DiLoCoCallback(server.address, sync_every=2)
        tiny_trainer(
            tmp_path,
            [callback],
            max_steps=4,
            fuse_optim_with_backward=True,
            max_grad_norm=None,
        ).train()
        assert server.core.totals.num_rounds == 2


def test_a_rollback_goes_back_with_the_snapshot(tmp_path: Path) -> None:
    """To a checkpoint of the same round: the interval goes on from there as it was."""

    class Back(Seen):
        done = False

        def on_step_settled(self, state: Any, control: Any) -> None:
            if state.global_step == 5 and not self.done:
                self.done = control.rollback = True

    with serving(tmp_path / "server", **PLAIN) as server:
        callback = DiLoCoCallback(server.address, sync_every=3, comm="float32")
        seen = Back()
        trainer = tiny_trainer(
            tmp_path, [callback, seen], max_steps=9, save_strategy="steps", save_steps=4
        )
        trainer.train()
        assert server.core.totals.num_rounds == 3
    assert seen.done and callback.state_dict()["sync_count"] == 3


def test_what_is_frozen_for_a_time_is_exchanged_once_it_moves(tmp_path: Path) -> None:
    import torch

    with serving(tmp_path / "server", **PLAIN) as server:
        callbacks = [
            DiLoCoCallback(server.address, sync_every=2, comm="float32"),
            FreezeCallback("embed_tokens", until=2),
        ]
        trainer = tiny_trainer(tmp_path, callbacks, max_steps=4)
        trainer.train()
        joined = server.core.require_state().parameters
        weights = dict(trainer.model.named_parameters())
        assert all(torch.equal(joined[name], value) for name, value in weights.items())


def test_a_token_is_read_from_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    token = "k" * 40
    file = tmp_path / "token"
    file.write_text(token)
    with serving(tmp_path / "server", disable_auth=False, token=token) as server:
        file.chmod(0o644)
        callback = DiLoCoCallback(server.address, sync_every=2, token_file=str(file))
        with pytest.raises(ConfigError, match="token_file"):
            tiny_trainer(tmp_path, [callback], max_steps=2).train()
        file.chmod(0o600)
        callback = DiLoCoCallback(server.address, sync_every=2, token_file=str(file))
        tiny_trainer(tmp_path, [callback], max_steps=2).train()
        assert server.core.totals.num_rounds == 1
