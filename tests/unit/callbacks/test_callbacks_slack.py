"""Messages in Slack, against a local server."""

from __future__ import annotations

import json
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from local_server import LocalServer, local_server

from headway import TrainerCallback
from headway.callbacks import SlackNotificationSetting, SlackNotifierCallback
from headway.callbacks.remote.notifier import Report
from headway.callbacks.remote.slack import make_text
from headway.dist.failure import PeerFailure
from headway.dist.watch import Failure
from headway.errors import ConfigError
from headway.testing import tiny_trainer


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLACK_WEBHOOK_URL", "BEAKER_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


class Break(TrainerCallback):
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def on_step_end(self, state: Any) -> None:
        if state.global_step == 2:
            raise self.error


class Stop(TrainerCallback):
    def __init__(self, flag: str = "should_training_stop") -> None:
        self.flag = flag

    def on_step_end(self, state: Any, control: Any) -> None:
        if state.global_step == 2:
            setattr(control, self.flag, True)


def texts(server: LocalServer) -> list[str]:
    return [json.loads(got.body)["text"] for got in server.got]


def slack(server: LocalServer, **more: Any) -> SlackNotifierCallback:
    return SlackNotifierCallback(webhook_url=f"{server.url}/services/T0/B0/hidden", **more)


def test_all_tells_start_checkpoints_epochs_and_end(tmp_path: Path) -> None:
    with local_server() as server:
        tiny_trainer(
            tmp_path, [slack(server, name="night", notifications="all")], num_samples=8,
            num_train_epochs=1, save_strategy="steps", save_steps=2,
        ).train()  # fmt: skip
    told = texts(server)
    assert [text.partition("\n")[0].partition("* ")[2] for text in told] == [
        "started", "saved a checkpoint", "finished an epoch", "saved a checkpoint",
        ":white_check_mark: completed",
    ]  # fmt: skip
    assert told[0].startswith("*night (")
    assert "step 4 of 4, epoch 1.00, tokens 64, loss 5." in told[-1]
    assert server.got[0].path == "/services/T0/B0/hidden"
    assert server.got[0].headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("setting", "ending", "wanted"),
    [
        ("end_only", None, ["completed"]),
        ("end_only", Stop(), ["stopped before its end"]),
        ("end_only", Stop("should_abort_without_save"), ["aborted"]),
        ("end_only", Break(ValueError("bad luck")), ["failed"]),
        ("end_only", Break(KeyboardInterrupt()), ["interrupted"]),
        ("failure_only", None, []),
        ("failure_only", Stop(), []),
        ("failure_only", Stop("should_abort_without_save"), ["aborted"]),
        ("failure_only", Break(ValueError("bad luck")), ["failed"]),
        ("none", Break(ValueError("bad luck")), []),
    ],
)
def test_settings_and_outcomes(tmp_path: Path, setting: str, ending: Any, wanted: Any) -> None:
    with local_server() as server:
        callbacks = [slack(server, notifications=setting)] + ([ending] if ending else [])
        run = tiny_trainer(tmp_path, callbacks, max_steps=3)
        if isinstance(ending, Break):
            with pytest.raises(type(ending.error)):
                run.train()
        else:
            run.train()
    assert len(server.got) == len(wanted)
    assert all(want in text for want, text in zip(wanted, texts(server)))


def test_a_failure_shows_the_end_of_its_traceback(tmp_path: Path) -> None:
    def fall(depth: int) -> None:
        if depth:
            fall(depth - 1)
        raise ValueError("bad <luck> & ```more```")

    class Deep(TrainerCallback):
        def on_step_end(self) -> None:
            fall(40)

    with local_server() as server, pytest.raises(ValueError):
        tiny_trainer(tmp_path, [slack(server), Deep()], max_steps=3).train()
    (text,) = texts(server)
    head, _, tail = text.partition("```\n")
    assert "on_step_end: bad &lt;luck&gt; &amp;" in head and "step 1 of 3" in head
    assert len(tail.removesuffix("\n```").splitlines()) <= 30
    assert "on_step_end: bad &lt;luck&gt;" in tail and tail.count("```") == 1


def test_a_run_that_fails_in_its_set_up_is_told_too(tmp_path: Path) -> None:
    class Mistaken(TrainerCallback):
        def on_init_end(self) -> None:
            raise ConfigError("nothing fits")

    with local_server() as server, pytest.raises(ConfigError):
        tiny_trainer(tmp_path, [slack(server), Mistaken()], max_steps=1).train()
    assert "ConfigError: callback 'Mistaken', on_init_end: nothing fits" in texts(server)[0]


def fire_end(callback: Any, folder: Path, rank: int, error: BaseException) -> None:
    """What a rank's callback hears when a run on several ranks fails."""
    run = tiny_trainer(folder, [callback], max_steps=1)
    run.args._process_index, run.state.is_world_process_zero = rank, rank == 0
    run.bus.fire("on_train_begin")
    run.state.outcome = "failed"
    run.bus.fire_to_all("on_error", exception=error)
    run.bus.fire_to_all("on_close")


def test_one_rank_speaks_of_the_one_that_failed(tmp_path: Path) -> None:
    failed = PeerFailure(Failure(3, "RuntimeError: CUDA error", "error"), 4)
    lost = PeerFailure(Failure(0, "killed by SIGKILL", "lost"), 4)
    with local_server() as server:
        for rank in range(4):
            fire_end(slack(server), tmp_path, rank, failed)
        for rank in range(1, 4):
            fire_end(slack(server), tmp_path, rank, lost)
    told = texts(server)
    assert len(told) == 2
    assert "rank 3 of 4 failed: RuntimeError: CUDA error" in told[0]
    assert "rank 0 of 4 was lost: killed by SIGKILL" in told[1]


def test_a_server_that_hangs_holds_no_step_and_the_end_only_so_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    threads: set[str] = set()

    class Watch(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            threads.add(threading.current_thread().name)
            steps.append(state.global_step)

    steps: list[int] = []
    with local_server(lambda number: None) as server:
        mine = slack(server, notifications="all", timeout_s=30, close_timeout_s=0.2)
        started_s = time.monotonic()
        tiny_trainer(tmp_path, [mine, Watch()], max_steps=4).train()
        took_s = time.monotonic() - started_s
        assert len(server.got) == 1  # the first one still waits for its answer
    assert steps == [1, 2, 3, 4] and took_s < 10
    assert re.search(r"not sent in the 0\.[12]\d* s at the end", caplog.text)


def test_an_absent_server_is_a_warning_without_the_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with local_server() as server:
        pass  # its port is free again
    mine = slack(server, max_retries=1)
    assert tiny_trainer(tmp_path, [mine], max_steps=1).train().global_step == 1
    assert "127.0.0.1 cannot be reached" in caplog.text and "2 attempts" in caplog.text
    assert "hidden" not in caplog.text


def test_the_environment_names_the_webhook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for given in (None, "hooks.slack.com/x"):
        if given is not None:
            monkeypatch.setenv("SLACK_WEBHOOK_URL", given)
        run = tiny_trainer(tmp_path, [SlackNotifierCallback()], max_steps=1)
        with pytest.raises(ConfigError, match="SLACK_WEBHOOK_URL"):
            run.train()
    assert "a call failed" not in caplog.text  # the error says it all
    monkeypatch.delenv("SLACK_WEBHOOK_URL")
    tiny_trainer(tmp_path, [SlackNotifierCallback(notifications="none")], max_steps=1).train()
    tiny_trainer(tmp_path, [SlackNotifierCallback(enabled=False)], max_steps=1).train()
    with local_server() as server:
        monkeypatch.setenv("SLACK_WEBHOOK_URL", f"{server.url}/x")
        tiny_trainer(tmp_path, [SlackNotifierCallback()], max_steps=1).train()
    assert len(server.got) == 1


def test_a_second_run_of_the_trainer_is_told_too(tmp_path: Path) -> None:
    with local_server() as server:
        run = tiny_trainer(tmp_path, [slack(server)], max_steps=1)
        run.train()
        run.train()
    assert len(server.got) == 2


def test_beaker_s_job_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BEAKER_JOB_ID", "01J")
    report = Report("end", "run", None, 3, 0, 0.5, 10, None, "completed")
    text = make_text(report)
    assert "<https://beaker.org/job/01J|Beaker job>" in text and "step 3, epoch 0.50" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"notifications": "end-only"}, "did you mean 'end_only'"),
        ({"webhook_url": "hooks.slack.com/x"}, "webhook_url must be an address"),
        ({"webhook_url": "file:///etc/passwd"}, "webhook_url must be an address"),
        ({"webhook_url": ""}, "webhook_url must be an address"),
        ({"name": ""}, "name: '' given"),
        ({"enabled": 1}, "enabled: 1 given"),
        ({"timeout_s": 0}, "timeout_s: 0 given"),
        ({"max_retries": -1}, "max_retries: -1 given"),
        ({"queue_size": 0}, "queue_size: 0 given"),
        ({"close_timeout_s": float("inf")}, "close_timeout_s: inf given"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SlackNotifierCallback(**options)
    assert "passwd" not in str(caught.value)


def test_settings_go_by_name_or_member() -> None:
    for setting in SlackNotificationSetting:
        for given in (setting, setting.value):
            assert SlackNotifierCallback(notifications=given).notifications is setting
