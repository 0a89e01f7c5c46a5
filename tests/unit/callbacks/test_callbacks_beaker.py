"""The description of a Beaker job, by a stand-in for the client and, where it is, the real one."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway import TrainerCallback
from headway.callbacks import BeakerCallback
from headway.callbacks.remote import beaker as module
from headway.callbacks.remote.beaker import in_batch_job
from headway.errors import ConfigError
from headway.testing import tiny_trainer

VARIABLES = (
    "BEAKER_JOB_ID", "BEAKER_NODE_ID", "BEAKER_JOB_KIND", "BEAKER_EXPERIMENT_ID", "BEAKER_ADDR",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


class Client:
    """As much of `beaker.Beaker` as the callback uses."""

    def __init__(self, get: Any = None, update: Any = None) -> None:
        self.told: list[tuple[str, str]] = []
        self.threads: set[str] = set()
        self.workload = SimpleNamespace(get=get or self.get, update=update or self.update)

    def get(self, workload: str) -> Any:
        self.threads.add(threading.current_thread().name)
        return SimpleNamespace(id=workload)

    def update(self, workload: Any, *, name: Any = None, description: Any = None) -> None:
        self.told.append((workload.id, description))


class Ticks(TrainerCallback):
    """A clock that moves 4 s in every step."""

    priority = 50

    def __init__(self) -> None:
        self.now_s = 0.0

    def on_step_end(self) -> None:
        self.now_s += 4.0

    def __call__(self) -> float:
        return self.now_s


class Break(TrainerCallback):
    def on_step_end(self, state: Any) -> None:
        if state.global_step == 2:
            raise ValueError("bad luck\nand more")


def beaker(folder: Path, client: Client, **more: Any) -> BeakerCallback:
    return BeakerCallback("01EXP", enabled=True, client=client, result_dir=folder, **more)


@pytest.mark.parametrize(
    ("given", "collected"), [(2, 1), (None, 2)], ids=["its own interval", "that of the metrics"]
)
def test_the_description_follows_the_run_and_ends_with_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None, collected: int
) -> None:
    client, ticks = Client(), Ticks()
    monkeypatch.setattr(module, "clock", ticks)
    mine = beaker(tmp_path / "results", client, update_interval=given, description="my run")
    lengths = {"num_samples": 32, "max_steps": 8, "metrics_collect_interval": collected}
    tiny_trainer(tmp_path, [ticks, mine], **lengths).train()
    ids, texts = zip(*client.told)
    assert set(ids) == {"01EXP"}
    assert [text.splitlines()[1] for text in texts] == [
        "[0.0%] step 0 of 8, 0 tokens",
        # Steps 2 (8 s) and 6 (8 s after it) come within 10 s of the update before them.
        "[50.0%] step 4 of 8, 64 tokens, ETA 0:00 h",
        "[100.0%] step 8 of 8, 128 tokens, ETA 0:00 h",
        "completed, [100.0%] step 8 of 8, 128 tokens",
    ]
    assert all(text.startswith("my run\n") for text in texts)
    assert client.threads == {"headway-sender-BeakerCallback"}


def test_speed_and_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Figures(TrainerCallback):
        priority = 10

        def on_log_step(self, logs: dict[str, Any]) -> None:
            logs.update(tok_per_sec=1234.5, mfu=0.416)

    client, ticks = Client(), Ticks()
    monkeypatch.setattr(module, "clock", ticks)
    monkeypatch.setattr(Ticks, "on_step_end", lambda self: setattr(self, "now_s", self.now_s + 900))
    callbacks = [ticks, beaker(tmp_path, client, update_interval=10), Figures()]
    tiny_trainer(tmp_path, callbacks, num_samples=64, max_steps=20).train()
    assert "ETA 2:30 h, 1,234 tokens/s, 41.6% MFU" in client.told[1][1]


def test_a_failure_is_written(tmp_path: Path) -> None:
    client = Client()
    with pytest.raises(ValueError):
        tiny_trainer(tmp_path, [beaker(tmp_path, client), Break()], max_steps=3).train()
    told = "failed (ValueError: callback 'Break', on_step_end: bad luck), [66.7%] step 2 of 3"
    assert client.told[-1][1].startswith(told)


def test_a_failure_before_the_first_step_is_written(tmp_path: Path) -> None:
    class Mistaken(TrainerCallback):
        priority = 1

        def on_train_begin(self) -> None:
            raise ConfigError("nothing fits")

    client = Client()
    with pytest.raises(ConfigError):
        tiny_trainer(tmp_path, [beaker(tmp_path, client), Mistaken()], max_steps=3).train()
    assert [text.partition(", [")[0] for _, text in client.told] == [
        "failed (ConfigError: callback 'Mistaken', on_train_begin: nothing fits)"
    ]


def test_an_unreachable_beaker_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no route to Beaker")

    client = Client(get=fail)
    run = tiny_trainer(tmp_path, [beaker(tmp_path, client)], max_steps=3)
    assert run.train().global_step == 3
    assert "no route to Beaker" in caplog.text and not run.bus.disabled


def test_a_hung_beaker_holds_no_step(tmp_path: Path) -> None:
    release = threading.Event()
    client = Client(get=lambda workload: release.wait(30))
    started_s = time.monotonic()
    mine = beaker(tmp_path, client, close_timeout_s=0.2)
    assert tiny_trainer(tmp_path, [mine], max_steps=5).train().global_step == 5
    assert time.monotonic() - started_s < 10
    release.set()


def test_results_hold_config_and_packages_without_secrets(tmp_path: Path) -> None:
    config = {"lr": 1e-3, "api_key": "buried"}
    mine = beaker(tmp_path / "results", Client(), config=config)
    tiny_trainer(tmp_path, [mine], max_steps=1).train()
    written = json.loads((tmp_path / "results/olmo-core/config.json").read_text())
    assert written == {"lr": 1e-3, "api_key": "<redacted>"}
    lines = (tmp_path / "results/requirements.txt").read_text().splitlines()
    assert lines[0].startswith("# python==3.") and any(x.startswith("torch==") for x in lines)


def test_results_that_cannot_be_written_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "results").write_text("a file")
    client = Client()
    run = tiny_trainer(tmp_path, [beaker(tmp_path / "results", client)], max_steps=1)
    assert run.train().global_step == 1
    assert "a call failed, training goes on" in caplog.text and client.told


def test_trackers_learn_where_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.callbacks.remote.tracker import Tracker

    seen: list[Any] = []

    class Mine(Tracker):
        service, package, extra = "mine", "json", "mine"

        def open_run(self, facts: Any) -> None:
            seen.append(facts.config)

        def send(self, step: int, figures: Any) -> None: ...
        def mark_rewind(self, step: int) -> None: ...
        def finish_run(self, ending: Any) -> None: ...

    monkeypatch.setenv("BEAKER_ADDR", "https://beaker.example/")
    callbacks = [Mine(config={"mine": 1}), beaker(tmp_path, Client())]
    tiny_trainer(tmp_path, callbacks, max_steps=1).train()
    assert seen[0]["beaker_experiment_url"] == "https://beaker.example/ex/01EXP"
    assert seen[0]["beaker_experiment_id"] == "01EXP" and seen[0]["mine"] == 1


def test_it_is_on_in_batch_jobs_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert not BeakerCallback().enabled
    for name, value in zip(VARIABLES[:3], ("01J", "01N", "batch")):
        assert not in_batch_job()
        monkeypatch.setenv(name, value)
    assert in_batch_job()
    with pytest.raises(ConfigError, match="BEAKER_EXPERIMENT_ID"):
        BeakerCallback(client=Client())
    monkeypatch.setenv("BEAKER_EXPERIMENT_ID", "01E")
    assert BeakerCallback(client=Client()).experiment_id == "01E"
    assert not BeakerCallback(enabled=False).enabled
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"headway\[beaker\]"):
        BeakerCallback()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update_interval": 0}, "update_interval: 0 given"),
        ({"description": ""}, "description: '' given"),
        ({"enabled": "yes"}, "enabled: 'yes' given"),
        ({"config": [1]}, r"config: \[1\] given"),
        ({"result_dir": None}, "result_dir: None given"),
        ({"close_timeout_s": 0}, "close_timeout_s: 0 given"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BeakerCallback(**options)


def test_the_real_client_sends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("beaker")
    grpc = pytest.importorskip("grpc")
    from concurrent.futures import ThreadPoolExecutor

    from beaker import beaker_pb2, beaker_pb2_grpc

    got: list[tuple[str, str]] = []

    class Servicer(beaker_pb2_grpc.BeakerServicer):  # type: ignore[misc]
        def GetWorkload(self, request: Any, context: Any) -> Any:
            experiment = beaker_pb2.Experiment(id=request.workload_id)
            return beaker_pb2.GetWorkloadResponse(
                workload=beaker_pb2.Workload(experiment=experiment)
            )

        def UpdateWorkload(self, request: Any, context: Any) -> Any:
            got.append((request.workload_id, request.description))
            return beaker_pb2.UpdateWorkloadResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    beaker_pb2_grpc.add_BeakerServicer_to_server(Servicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    monkeypatch.setattr(
        grpc, "secure_channel", lambda *args, **kwargs: grpc.insecure_channel(f"127.0.0.1:{port}")
    )
    monkeypatch.setenv("BEAKER_TOKEN", "x")
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = BeakerCallback("01EXP", enabled=True, result_dir=tmp_path)
    tiny_trainer(tmp_path, [mine], max_steps=2).train()
    server.stop(None)
    assert got[-1] == ("01EXP", "completed, [100.0%] step 2 of 2, 32 tokens")
