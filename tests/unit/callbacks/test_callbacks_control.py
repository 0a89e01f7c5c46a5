"""TrainerControlCallback: a real run, steered over real HTTP."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from headway import ConfigError, TrainerCallback
from headway.callbacks import TextgenCallback, TrainerControlCallback
from headway.checkpoint import CheckpointManager
from headway.control.client import Client, ControlError
from headway.control.discovery import clean_stale, find_job, list_jobs
from headway.control.schema import BadRequest, parse_command
from headway.data.tokenizer import ByteTokenizer
from headway.testing.trainer import tiny_trainer

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "jobs"
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(folder))
    return folder


class Conductor(TrainerCallback):
    """Lets somebody drive a run that has no end of its own, from another thread."""

    def __init__(self, drive: Callable[[Client], Any]) -> None:
        self.drive = drive
        self.result: Any = None
        self.error: BaseException | None = None
        self.thread: threading.Thread | None = None

    def on_step_begin(self, trainer: Any) -> None:
        if self.thread is None:
            self.thread = threading.Thread(target=self._drive, args=(trainer,))
            self.thread.start()

    def _drive(self, trainer: Any) -> None:
        try:
            self.result = self.drive(Client(find_job("kite")))
        except BaseException as error:
            self.error = error
        finally:
            trainer.cancel_run("the drive is over")


def ride(
    folder: Path,
    drive: Callable[[Client], Any],
    *callbacks: Any,
    tokenizer: Any = None,
    **args: Any,
) -> tuple[Any, Any, TrainerControlCallback]:
    """Train while `drive` steers; returns what it returned, the trainer and the callback."""
    control = TrainerControlCallback(job_id="kite")
    conductor = Conductor(drive)
    settings = {"max_steps": 100_000, "logging_steps": 1, **args}
    trainer = tiny_trainer(folder, [*callbacks, control, conductor], **settings)
    trainer.processing_class = tokenizer
    try:
        trainer.train()
    finally:
        if conductor.thread is not None:
            conductor.thread.join()
        if conductor.error is not None:
            raise conductor.error
    return conductor.result, trainer, control


# Commands


def test_a_command_takes_effect_at_the_end_of_the_step_under_way(tmp_path: Path) -> None:
    sent: list[tuple[int, int]] = []

    class Meanwhile(TrainerCallback):
        """Is in the middle of a step when the command comes."""

        def on_gradients(self, state: Any) -> None:
            assert control.inbox is not None
            control.inbox.submit(parse_command({"command": "status", "id": f"{state.global_step}"}))

        def on_step_begin(self, state: Any) -> None:
            if state.global_step:
                assert control.inbox is not None
                receipt = control.inbox.receipt(f"{state.global_step - 1}")
                assert receipt is not None and receipt.state == "applied"
                sent.append((state.global_step, receipt.step or -1))

    control = TrainerControlCallback()
    tiny_trainer(tmp_path, [control, Meanwhile()], max_steps=4, logging_strategy="no").train()
    assert sent == [(1, 1), (2, 2), (3, 3)]


def test_saving_and_stopping(tmp_path: Path) -> None:
    def drive(client: Client) -> Any:
        saved = client.save_checkpoint()
        assert (tmp_path / "out" / f"checkpoint-{saved['step']}").is_dir()
        client.save_and_stop()
        return saved

    saved, trainer, _ = ride(tmp_path, drive)
    assert saved["state"] == "applied" and saved["message"].endswith(f"-{saved['step']}")
    assert trainer.state.outcome == "stopped"
    assert trainer.bus.stopped_by == ("TrainerControlCallback", "a command", "stop")
    assert (tmp_path / "out" / f"checkpoint-{trainer.state.global_step}").is_dir()


@pytest.mark.parametrize("save_async", [True, False])
def test_a_save_that_fails_ends_the_run_and_the_command_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_async: bool
) -> None:
    def fail(*given: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointManager, "write", fail)

    def drive(client: Client) -> None:
        with pytest.raises(ControlError) as failed:
            client.save_checkpoint()
        told.append(failed.value.answer or str(failed.value))

    told: list[Any] = []
    with pytest.raises(OSError, match="No space left"):
        ride(tmp_path, drive, save_async=save_async)
    assert told[0]["state"] == "failed", told
    assert told[0]["message"].startswith("the run failed: OSError: [Errno 28] No space left")
    assert f"(while saving the checkpoint of step {told[0]['step']})" in told[0]["message"]
    assert "No space left" in (tmp_path / "out" / "post_mortem.txt").read_text()


def test_a_graceful_stop_ends_as_a_complete_run_does(tmp_path: Path) -> None:
    _, trainer, _ = ride(
        tmp_path, lambda client: client.graceful_stop(), save_strategy="steps", save_steps=10**6
    )
    assert trainer.state.outcome == "stopped"
    assert (tmp_path / "out" / f"checkpoint-{trainer.state.global_step}").is_dir()


def test_an_abort_saves_nothing_and_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "headway")
    _, trainer, _ = ride(
        tmp_path, lambda client: client.abort(), save_strategy="steps", save_steps=10**6
    )
    assert trainer.state.outcome == "aborted"
    step = trainer.state.global_step
    assert f"command abort applied after step {step}: the run ends after this step" in caplog.text
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_a_pause_holds_the_step_and_shows_it(tmp_path: Path) -> None:
    def drive(client: Client) -> Any:
        paused = client.pause(offload=True)
        while client.status()["status"] != "paused":
            pass
        first = client.status()["global_step"]
        evaluated = client.evaluate_now()
        saved = client.save_checkpoint()
        with pytest.raises(ControlError, match="paused already"):
            client.pause()
        assert client.status()["global_step"] == first == paused["step"]
        resumed = client.resume()
        assert client.status()["status"] != "paused"
        with pytest.raises(ControlError, match="the run is not paused"):
            client.resume()
        return paused, evaluated, saved, resumed

    receipts, trainer, _ = ride(tmp_path, drive)
    assert len({receipt["step"] for receipt in receipts}) == 1
    assert trainer.state.global_step > receipts[0]["step"]
    assert "eval_loss" in json.loads(receipts[1]["message"])


def test_the_rate_and_the_length_are_changed(tmp_path: Path) -> None:
    def drive(client: Client) -> Any:
        halved = client.set_learning_rate(scale=0.5)
        given = client.set_learning_rate(value=1e-6, keep=False)
        longer = client.extend_max_steps(by=5)
        with pytest.raises(ControlError, match="allowed: more steps"):
            client.extend_max_steps(max_steps=1)
        with pytest.raises(ControlError, match="could not be scaled up again") as refused:
            client.set_learning_rate(value=0)
        assert refused.value.answer["state"] == "refused"
        return halved, given, longer, client.status()

    (halved, given, longer, status), trainer, _ = ride(tmp_path, drive)
    assert "times 0.5" in halved["message"] and "to 1e-06" in given["message"]
    assert status["max_steps"] == trainer.state.max_steps == 100_005
    assert "ends after step 100005" in longer["message"]
    assert trainer.state.temporary_rate_factor != 1.0
    logged = [r["learning_rate_factor"] for r in trainer.state.log_history if len(r) == 4]
    assert logged[0] == 0.5


def test_a_change_after_a_save_of_the_same_step_is_saved_at_the_end(tmp_path: Path) -> None:
    def drive(client: Client) -> Any:
        client.pause()
        saved = client.save_checkpoint()
        client.set_learning_rate(scale=0.5)
        client.graceful_stop()
        return saved["step"]

    step, _, _ = ride(tmp_path, drive, save_strategy="steps", save_steps=90_000)
    state = json.loads((tmp_path / f"out/checkpoint-{step}/trainer_state.json").read_text())
    assert state["rate_factor"] == 0.5


def test_after_a_stop_nothing_that_needs_another_step_is_taken(tmp_path: Path) -> None:
    class Sends(TrainerCallback):
        def on_gradients(self, state: Any) -> None:
            assert control.inbox is not None
            if state.global_step == 1:
                for name, data in (
                    ("graceful_stop", {}),
                    ("extend_max_steps", {"by": 3}),
                    ("pause", {}),
                ):
                    control.inbox.submit(parse_command({"command": name, "id": name, "data": data}))

    control = TrainerControlCallback()
    tiny_trainer(tmp_path, [control, Sends()], max_steps=9).train()
    assert control.inbox is not None
    receipts = [control.inbox.receipt(name) for name in ("extend_max_steps", "pause")]
    for receipt in receipts:
        assert receipt is not None and receipt.state == "refused"
        assert receipt.message == "the run ends after this step"


def test_a_command_in_the_final_evaluation_is_refused_and_told_so(tmp_path: Path) -> None:
    told: list[Any] = []

    class Last(TrainerCallback):
        thread: threading.Thread | None = None

        def on_prediction_step(self, state: Any) -> None:
            if state.global_step == 2 and self.thread is None:
                sent = threading.Event()
                self.thread = threading.Thread(target=self._send, args=(sent,))
                self.thread.start()
                assert sent.wait(30)

        def _send(self, sent: threading.Event) -> None:
            client = Client(find_job("kite"))
            accepted = client.send("abort", wait=False)
            stream = client.events(after=0)
            first = next(stream)  # it connects when it is first asked
            sent.set()
            told.extend(e for e in (first, *stream) if e.get("id") == accepted["id"])

    last = Last()
    control = TrainerControlCallback(job_id="kite")
    tiny_trainer(
        tmp_path, [control, last], max_steps=2, eval_strategy="epoch", num_train_epochs=1
    ).train()
    assert last.thread is not None
    last.thread.join(30)
    assert [event["state"] for event in told] == ["refused"]


@pytest.mark.parametrize("kind", ["a file", "open to others"])
def test_a_folder_that_cannot_be_used_costs_the_server_and_not_the_run(
    kind: str, tmp_path: Path, jobs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if kind == "a file":
        jobs.write_text("")
    else:
        jobs.mkdir()
        jobs.chmod(0o777)
    trainer = tiny_trainer(tmp_path, [TrainerControlCallback()], max_steps=2)
    trainer.train()
    assert trainer.state.global_step == 2
    assert "cannot be controlled from outside, and goes on" in caplog.text


WARNS = """
    import logging, sys
    from headway import TrainerCallback
    from headway.callbacks import TrainerControlCallback
    from headway.testing.trainer import tiny_trainer

    class Warns(TrainerCallback):
        def on_step_end(self):
            logging.getLogger("headway.engine.x").warning("look here")

    tiny_trainer(sys.argv[1], [TrainerControlCallback(), Warns()], max_steps=1).train()
"""


@pytest.mark.timeout(120)
def test_warnings_still_reach_a_script_without_handlers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(WARNS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stderr.count("look here") == 1


def test_samples_are_written(tmp_path: Path) -> None:
    def drive(client: Client) -> Any:
        with pytest.raises(ControlError, match="no prompts of its own"):
            client.generate_now()
        return client.generate_now(prompt="the tide", max_new_tokens=4)

    receipt, _, _ = ride(tmp_path, drive, tokenizer=ByteTokenizer())
    told, _, place = receipt["message"].partition(" to ")
    assert told == "1 sample is written" and place == str(tmp_path / "out" / "eval_text.jsonl")
    (line,) = Path(place).read_text().splitlines()
    record = json.loads(line)
    assert record["global_step"] == receipt["step"]
    assert record["samples"][0]["prompt"] == "the tide"


def test_samples_of_the_runs_own_prompts(tmp_path: Path) -> None:
    own = TextgenCallback(
        prompts=["a", "b"], generation_steps=10**6, max_new_tokens=3, console=False
    )

    def drive(client: Client) -> Any:
        events = client.events(after=0)
        client.generate_now()
        return next(event for event in events if event["event"] == "sample")

    event, _, _ = ride(tmp_path, drive, own, tokenizer=ByteTokenizer())
    assert [sample["prompt"] for sample in event["samples"]] == ["a", "b"]
    with pytest.raises(ControlError, match="no tokenizer"):
        ride(tmp_path / "b", lambda client: client.generate_now(prompt="a"))


def test_a_failing_command_costs_the_command_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> Any:
        raise RuntimeError("out of ink")

    monkeypatch.setattr(TextgenCallback, "sample_now", fail)

    def drive(client: Client) -> Any:
        with pytest.raises(ControlError, match="RuntimeError: out of ink") as failed:
            client.generate_now(prompt="a")
        return failed.value.answer, client.save_and_stop()

    (answer, _), trainer, control = ride(tmp_path, drive, tokenizer=ByteTokenizer())
    assert answer["state"] == "failed" and trainer.state.outcome == "stopped"
    assert control.inbox is not None


def test_steps_are_traced(tmp_path: Path) -> None:
    def drive(client: Client) -> Any:
        receipt = client.profile_next_steps(num_steps=2)
        while not list((tmp_path / "out" / "profiles").glob("*.chrome_trace.json*")):
            client.status()
        return receipt

    receipt, trainer, control = ride(tmp_path, drive)
    first = receipt["step"] + 1
    assert receipt["message"] == (
        f"profiling from step {first}; the trace of steps {first} to {first + 1} will be in "
        f"{tmp_path / 'out' / 'profiles'}"
    )
    assert trainer.bus.disabled == {}


def test_the_log_level_is_that_of_the_run_only(tmp_path: Path) -> None:
    logger = logging.getLogger("headway")
    before = logger.level

    def drive(client: Client) -> int:
        receipt = client.set_log_level(level="debug")
        assert receipt["message"].startswith("the run tells records of level debug and above")
        return logger.level

    level, _, _ = ride(tmp_path, drive)
    assert level == logging.DEBUG and logger.level == before


def test_a_run_without_data_to_evaluate_on_refuses(tmp_path: Path) -> None:
    def drive(client: Client) -> None:
        with pytest.raises(ControlError, match="no eval_dataset"):
            client.evaluate_now()

    control, conductor = TrainerControlCallback(job_id="kite"), Conductor(drive)
    trainer = tiny_trainer(tmp_path, [control, conductor], max_steps=100_000)
    trainer.eval_dataset = None
    trainer.train()
    assert conductor.thread is not None
    conductor.thread.join()
    assert conductor.error is None


def test_commands_that_come_too_late_are_refused(tmp_path: Path) -> None:
    class Late(TrainerCallback):
        def on_train_end(self) -> None:
            assert control.inbox is not None
            control.inbox.submit(parse_command({"command": "save_checkpoint", "id": "late"}))

    control = TrainerControlCallback()
    tiny_trainer(tmp_path, [control, Late()], max_steps=1).train()
    assert control.inbox is not None
    receipt = control.inbox.receipt("late")
    assert receipt is not None and receipt.state == "refused"
    assert "the run has ended (completed) after step 1" in receipt.message
    with pytest.raises(BadRequest) as gone:
        control.inbox.submit(parse_command({"command": "status"}))
    assert gone.value.status == 410


# What is shown


def test_the_status_and_the_events_of_a_run(tmp_path: Path) -> None:
    def drive(client: Client) -> Any:
        events = client.events(after=0)
        first = next(events)
        client.evaluate_now()
        client.save_checkpoint()
        client.pause()
        status = client.status()
        client.graceful_stop()
        return status, [first, *events]

    often = {"logging_steps": 100, "logging_first_step": True}
    (status, events), trainer, control = ride(tmp_path, drive, **often)
    assert status["status"] in ("paused", "training") and status["job_id"] == "kite"
    assert status["max_steps"] == 100_000 and status["num_input_tokens_seen"] > 0
    assert status["metrics"]["loss"] > 0 and status["eta_s"] > 0
    assert status["last_checkpoint"]["step"] == status["last_checkpoint_step"]
    kinds = {event["event"] for event in events}
    assert {"log", "evaluate", "save", "command", "phase", "end"} <= kinds
    phases = [event["status"] for event in events if event["event"] == "phase"]
    assert {"training", "evaluating", "saving", "paused", "stopping"} <= {*phases}
    assert phases[-1] == "finished"
    assert control.board is not None and control.board.status["outcome"] == "stopped"


def test_a_failed_run_says_why(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            if state.global_step == 2:
                logging.getLogger("headway.checkpoint.writer").warning("the disk is %s", "full")
                raise RuntimeError("power")

    class Observes(TrainerCallback):
        failure_policy = "disable"
        priority = 10

        def on_step_end(self, state: Any) -> None:
            raise OSError(28, "No space left on device")

    control, handlers = TrainerControlCallback(), [*logging.getLogger("headway").handlers]
    with pytest.raises(RuntimeError, match="power"):
        tiny_trainer(tmp_path, [control, Fails(), Observes()], max_steps=5).train()
    assert control.board is not None
    status = control.board.status
    assert status["status"] == "failed" and "power" in status["last_error"]["message"]
    assert "No space left" in status["disabled_callbacks"]["Observes"]
    kinds = [incident["kind"] for incident in status["incidents"]]
    assert [kind for kind in kinds if kind != "warning"] == ["callback", "checkpoint", "error"]
    assert list_jobs() == []
    assert logging.getLogger("headway").handlers == handlers


# Life


def test_files_are_private_and_gone_when_the_run_is(tmp_path: Path, jobs: Path) -> None:
    def drive(client: Client) -> Any:
        return {
            p.name: stat.S_IMODE(p.stat().st_mode)
            for p in [client.job.folder, *client.job.folder.iterdir()]
        }

    before = threading.enumerate()
    modes, _, control = ride(tmp_path, drive)
    assert modes == {"kite": 0o700, "endpoint.json": 0o600, "token": 0o600, "read_token": 0o600}
    assert list(jobs.iterdir()) == [] and control.server is None and control.url is None
    left = [thread for thread in threading.enumerate() if thread not in before]
    assert not [thread for thread in left if thread.name == "headway-control"]


def test_a_read_only_token_can_only_look(tmp_path: Path) -> None:
    def drive(client: Client) -> None:
        (client.job.folder / "token").unlink()
        assert client.status()["job_id"] == "kite"
        with pytest.raises(ControlError) as refused:
            client.graceful_stop()
        assert refused.value.status in (401, 403)

    ride(tmp_path, drive)


def test_a_unix_socket(tmp_path: Path) -> None:
    found: list[Any] = []
    path = tmp_path / "s"
    control = TrainerControlCallback(job_id="kite", unix_socket=str(path))
    conductor = Conductor(lambda client: found.append((client.status(), control.url)))
    tiny_trainer(tmp_path, [control, conductor], max_steps=100_000).train()
    assert conductor.thread is not None
    conductor.thread.join()
    assert conductor.error is None and found[0][1] == f"unix:{path}"
    assert not path.exists()


def test_a_port_in_use_costs_the_server_and_not_the_run(
    tmp_path: Path, jobs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        control = TrainerControlCallback(port=taken.getsockname()[1])
        assert tiny_trainer(tmp_path, [control], max_steps=2).train().global_step == 2
    assert "cannot be controlled from outside, and goes on" in caplog.text
    assert control.server is None and list(jobs.iterdir()) == []


@pytest.mark.parametrize(("wanted", "level"), [(True, logging.WARNING), (None, logging.INFO)])
def test_without_aiohttp_the_run_goes_on(
    wanted: bool | None,
    level: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, "headway.callbacks.control"):
        control = TrainerControlCallback(enable_http=wanted)
        assert tiny_trainer(tmp_path, [control], max_steps=2).train().global_step == 2
    assert [r.levelno for r in caplog.records if "aiohttp" in r.message] == [level]
    assert control.inbox is None


def test_switched_off_it_serves_nothing(tmp_path: Path, jobs: Path) -> None:
    control = TrainerControlCallback(enable_http=False)
    tiny_trainer(tmp_path, [control], max_steps=1).train()
    assert control.board is None and not jobs.exists()


def test_an_id_of_a_running_job_is_refused(tmp_path: Path) -> None:
    def drive(client: Client) -> None:
        second = tiny_trainer(tmp_path / "b", [TrainerControlCallback(job_id="kite")], max_steps=1)
        with pytest.raises(ConfigError, match="job_id='kite' is taken by the running process"):
            second.train()

    ride(tmp_path, drive)


KILLED = """
    import os, sys
    from headway import TrainerCallback
    from headway.callbacks import TrainerControlCallback
    from headway.testing.trainer import tiny_trainer

    class Waits(TrainerCallback):
        def on_step_end(self):
            print("running", flush=True)
            sys.stdin.read()

    control = TrainerControlCallback(job_id="kite")
    tiny_trainer(sys.argv[1], [control, Waits()], max_steps=9).train()
"""


@pytest.mark.timeout(240)
def test_a_killed_job_misleads_nobody(tmp_path: Path, jobs: Path) -> None:
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)]
        job = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
        )
        assert job.stdout is not None and job.stdout.readline() == "running\n"
        return job

    first = start()
    try:
        assert find_job("kite").alive and Client("kite").status()["max_steps"] == 9
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait()
    assert not find_job("kite").alive
    with pytest.raises(ControlError, match="gone"):
        Client("kite").status()
    second = start()
    try:
        job = find_job("ki")
        assert job.alive and job.endpoint.pid == second.pid
        assert Client(job).status()["job_id"] == "kite"
    finally:
        second.kill()
        second.wait()
    assert clean_stale() == ["kite"] and list(jobs.iterdir()) == []
