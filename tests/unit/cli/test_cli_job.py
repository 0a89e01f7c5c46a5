"""`headway job` and `headway jobs` against a real server: words, exit codes, what is refused."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from headway.cli import job as verb
from headway.cli.main import main
from headway.control.dashboard.run import Run
from headway.control.discovery import Registration, list_jobs
from headway.control.inbox import Inbox
from headway.control.lost_run import examine
from headway.control.schema import COMMANDS, BadRequest, parse_command
from headway.control.server import ControlServer
from headway.control.status import StatusBoard
from headway.engine.post_mortem import make_report, write_report
from headway.engine.process_note import write_note
from headway.testing import assert_no_import

pytest.importorskip("aiohttp")


class Steered:
    """A job as its server shows it, and a thread in the place of training."""

    def __init__(self, job_id: str, *, refuses: str | None = None, answers: bool = True) -> None:
        self.board, self.inbox = StatusBoard(job_id), Inbox()
        self.board.publish(
            status="training", global_step=7, max_steps=100, metrics={"loss": 2.5, "other": "x"}
        )
        self.done: list[tuple[str, dict]] = []
        self.refuses = refuses
        self.registration = Registration(job_id)
        tokens = {"control": "c" * 64, "read": "r" * 64}
        self.server = ControlServer(
            self.board, self.inbox, nonce=self.registration.nonce, tokens=tokens, version="1"
        )
        self.server.start()
        self.registration.write_tokens(tokens)
        self.registration.write_endpoint(
            self.server.host,
            self.server.port,
            None,
            output_dir=f"runs/{job_id}",
            logging_dir=None,
            run_name=None,
            version="1",
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)
        if answers:
            self._thread.start()

    def _train(self) -> None:
        while not self._over.is_set():
            self.inbox.wait_for_command(0.05)
            for command in self.inbox.take():
                if self.refuses is not None:
                    self.inbox.settle(command.id, "refused", 7, self.refuses)
                    continue
                self.done.append((command.name, dict(command.data)))
                self.inbox.settle(command.id, "applied", 7)

    def close(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        self.server.stop()
        self.registration.remove()


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    started: list[Steered] = []

    def begin(job_id: str, **options) -> Steered:
        started.append(Steered(job_id, **options))
        return started[-1]

    yield begin
    for job in started:
        job.close()


def call(capsys, *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def leave_dead(job_id: str, folder: object = "dead") -> int:
    """What a job leaves that was killed; returns its process number."""
    text = (
        "import sys; from headway.control.discovery import Registration as R; r = R(sys.argv[1]);"
        "r.write_tokens({'control': 'c'});"
        "r.write_endpoint('127.0.0.1', 1, None, output_dir=sys.argv[2], logging_dir=None,"
        " run_name=None, version='1'); import os; os.kill(os.getpid(), 9)"
    )
    process = subprocess.Popen([sys.executable, "-c", text, job_id, str(folder)])
    assert process.wait() == -signal.SIGKILL
    return process.pid


def test_every_command_of_the_wire_has_a_word():
    assert set(verb.COMMANDS.values()) == set(COMMANDS) - {"status"}


@pytest.mark.parametrize(
    ("words", "command", "data"),
    [
        ("save one", "save_checkpoint", {}),
        ("stop one", "graceful_stop", {}),
        ("save-stop one", "save_and_stop", {}),
        ("abort one --yes", "abort", {}),
        ("pause one", "pause", {"offload": False}),
        ("pause one --offload", "pause", {"offload": True}),
        ("resume one", "resume", {}),
        ("set-lr one 1e-4", "set_learning_rate", {"value": 1e-4, "keep": True}),
        ("set-lr one --scale 0.5 --once", "set_learning_rate", {"scale": 0.5, "keep": False}),
        ("set-lr 0.25", "set_learning_rate", {"value": 0.25, "keep": True}),
        ("set-lr --scale=2", "set_learning_rate", {"scale": 2, "keep": True}),
        ("eval one", "evaluate_now", {}),
        ("generate one --prompt -- x", None, {}),
        ("generate one --prompt Once --max-new-tokens 5", "generate_now",
         {"prompt": "Once", "max_new_tokens": 5}),
        ("profile one", "profile_next_steps", {"num_steps": 3}),
        ("profile one --steps 2", "profile_next_steps", {"num_steps": 2}),
        ("extend one 300", "extend_max_steps", {"max_steps": 300}),
        ("extend one --by 50", "extend_max_steps", {"by": 50}),
        ("extend 300", "extend_max_steps", {"max_steps": 300}),
        ("log-level one debug", "set_log_level", {"level": "debug"}),
        ("log-level debug", "set_log_level", {"level": "debug"}),
    ],
)  # fmt: skip
def test_a_command_reaches_the_run_and_its_effect_is_told(start, capsys, words, command, data):
    job = start("one-1234")
    code, out, err = call(capsys, "job", *words.split())
    if command is None:
        assert code == 2 and job.done == []
        return
    assert (code, job.done) == (0, [(command, data)]), err
    assert out == f"{command} took effect after step 7\n"
    # The one job that runs need not be named, but then its name is told.
    assert ("job: one-1234" in err) == ("one" not in words.split())


@pytest.mark.parametrize(
    ("words", "body"),
    [
        ("set-lr one abc", {"command": "set_learning_rate", "data": {"value": "abc"}}),
        ("set-lr one -1", {"command": "set_learning_rate", "data": {"value": -1}}),
        ("set-lr one --scale 0", {"command": "set_learning_rate", "data": {"scale": 0}}),
        ("extend one 1.5", {"command": "extend_max_steps", "data": {"max_steps": 1.5}}),
        ("extend one --by 0", {"command": "extend_max_steps", "data": {"by": 0}}),
        ("profile one --steps 101",
         {"command": "profile_next_steps", "data": {"num_steps": 101}}),
        ("generate one --max-new-tokens 0",
         {"command": "generate_now", "data": {"max_new_tokens": 0}}),
        ("log-level one loud", {"command": "set_log_level", "data": {"level": "loud"}}),
    ],
)  # fmt: skip
def test_a_mistake_is_told_in_the_server_s_words_and_nothing_happens(start, capsys, words, body):
    job = start("one")
    with pytest.raises(BadRequest) as refused:
        parse_command(body)
    code, out, err = call(capsys, "job", *words.split())
    assert (code, out, err) == (2, "", f"error: {refused.value.message}\n")
    status, answer = ask(job, json.dumps(body).encode())
    assert (status, answer["error"]) == (400, refused.value.message)
    assert answer["valid_fields"]
    assert job.done == []


def ask(job: Steered, body: bytes) -> tuple[int, dict]:
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", job.server.port, timeout=30)
    headers = {"Authorization": f"Bearer {'c' * 64}", "Content-Type": "application/json"}
    try:
        connection.request("POST", f"/jobs/{job.board.job_id}/control", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("job sav one", "error: unknown command 'sav'; did you mean 'save'? Allowed: abort, "),
        ("job", "required: {status,tail,save"),
        ("job set-lr", "headway job set-lr: neither given of RATE and --scale; allowed: one of"),
        ("job set-lr one", "headway job set-lr: neither given of RATE and --scale; allowed: one"),
        ("job set-lr one 1 --scale 2", "both given of RATE and --scale; allowed: one of them"),
        ("job extend one", "headway job extend: neither given of MAX_STEPS and --by; allowed"),
        ("job log-level one", "level must be one of debug, info"),
        ("job save one two", "JOB expected, 2 words given: one two"),
        ("job save nobody", "there is no job 'nobody'"),
        ("job save onn", "did you mean 'one'?"),
        ("job save one --timeout 0", "--timeout: 0 given; allowed: seconds, above 0"),
        ("job save one --timeout soon", "--timeout: 'soon' given"),
        ("job save one --timeout nan", "--timeout: nan given"),
        ("job status one --no-wait", "--no-wait"),
        ("job save ../one", "there is no job '../one'"),
        ("jobs --al", "unknown argument '--al'"),
    ],
)
def test_mistakes_of_the_command_line(start, capsys, words, told):
    job = start("one")
    code, _, err = call(capsys, *words.split())
    assert code == 2 and told in err and "Traceback" not in err
    assert job.done == []


def test_a_prefix_is_enough_where_it_fits_one_job(start, capsys):
    first, second = start("alpha-1"), start("alpine-2")
    code, _, err = call(capsys, "job", "save", "al")
    assert code == 2 and "alpha-1" in err and "alpine-2" in err
    code, _, err = call(capsys, "job", "save")
    assert code == 2 and "JOB is missing, and several jobs are running" in err
    assert call(capsys, "job", "save", "alpi")[0] == 0
    assert (first.done, second.done) == ([], [("save_checkpoint", {})])


def test_a_job_that_is_gone(start, capsys):
    code, out, err = call(capsys, "job", "save", "--json")
    told = "JOB is missing, and no job is running (see: headway jobs)"
    assert (code, json.loads(out)["error"], err) == (2, told, f"error: {told}\n")
    pid = leave_dead("dead-1")
    code, _, err = call(capsys, "job", "save", "dead")
    assert code == 3 and f"process {pid} is gone" in err
    job = start("alive-1")
    job.inbox.close("the run has ended", 9)
    code, _, err = call(capsys, "job", "save", "alive")
    assert (code, err) == (3, "error: the run has ended\n")


def test_of_a_run_that_ended_without_a_word_nobody_says_that_it_refused(start, capsys):
    job = start("one", answers=False)

    def end() -> None:
        job.inbox.wait_for_command(30)
        job.close()

    ender = threading.Thread(target=end)
    ender.start()
    code, out, err = call(capsys, "job", "stop", "one", "--json")
    ender.join()
    assert code == 3 and "what became of graceful_stop is not known" in err
    assert json.loads(out)["answer"]["state"] == "accepted"


def test_a_job_that_refuses(start, capsys):
    start("one", refuses="there is nothing to evaluate: eval_dataset is not given")
    code, out, err = call(capsys, "job", "eval", "one", "--json")
    assert code == 4 and err == "error: there is nothing to evaluate: eval_dataset is not given\n"
    said = json.loads(out)
    assert said["answer"]["state"] == "refused" and said["answer"]["step"] == 7


def test_without_the_control_token_a_command_is_refused_and_a_look_is_not(start, capsys):
    job = start("one")
    (job.registration.folder / "token").unlink()
    code, _, err = call(capsys, "job", "save", "one")
    assert code == 4 and "error:" in err and job.done == []
    assert call(capsys, "job", "status", "one")[0] == 0


def test_a_command_that_takes_long(start, capsys):
    job = start("one", answers=False)
    code, _, err = call(capsys, "job", "save", "one", "--timeout", "0.2")
    assert code == 3 and "accepted, but took no effect within 0.2 s" in err
    code, out, _ = call(capsys, "job", "save", "one", "--no-wait")
    assert code == 0 and "save_checkpoint was accepted; its id is" in out
    code, out, _ = call(capsys, "job", "save", "one", "--no-wait", "--json")
    assert code == 0 and json.loads(out)["state"] == "accepted"
    assert [command.name for command in job.inbox.take()] == ["save_checkpoint"] * 3


def test_a_mistake_with_json_is_json(start, capsys):
    start("one")
    code, out, err = call(capsys, "job", "set-lr", "one", "abc", "--json")
    assert code == 2 and json.loads(out)["error"] in err


def test_status_for_people_and_programs(start, capsys):
    job = start("one")
    job.board.report_incident("nonfinite", "the loss \x1b[31mis\x07 not finite", 5)
    code, out, _ = call(capsys, "job", "status", "one", "--json")
    assert code == 0 and json.loads(out)["global_step"] == 7
    code, out, _ = call(capsys, "job", "status", "one")
    assert code == 0 and "training" in out and "step 5: the loss" in out
    assert "\x1b" not in out and "\x07" not in out, "a terminal obeys such characters"


def test_tail_follows_to_the_end(start, capsys, monkeypatch):
    job = start("one")
    begun = threading.Event()
    monkeypatch.setattr(job.server, "_num_streams", Watched(begun))

    def end() -> None:
        begun.wait(30)
        job.board.announce("log", step=8, logs={"loss": 1.5, "text": "\x1b[2J"})
        job.board.close()

    ender = threading.Thread(target=end)
    ender.start()
    code, out, _ = call(capsys, "job", "tail", "one", "--json")
    ender.join()
    (event,) = map(json.loads, out.splitlines())
    assert code == 0 and event["event"] == "log" and event["logs"]["loss"] == 1.5


class Watched(int):
    """A counter that tells when it is counted up."""

    def __new__(cls, event):
        made = super().__new__(cls, 0)
        made.event = event
        return made

    def __add__(self, other):
        self.event.set()
        return int(self) + other


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("answer", "done"), [("y\n", True), ("\n", False), ("", False)])
def test_abort_asks_on_a_terminal(start, monkeypatch, answer, done):
    job = start("one")
    said = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", said)
    assert main(["job", "abort", "one"]) == (0 if done else 2)
    assert "End one at step 7 without a save?" in said.getvalue()
    assert job.done == ([("abort", {})] if done else [])


def test_abort_does_not_ask_where_nobody_could_answer(start, capsys, monkeypatch):
    job = start("one")
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert call(capsys, "job", "abort", "one")[0] == 0 and job.done == [("abort", {})]


def test_jobs_lists_those_that_run_and_those_that_are_gone(start, capsys, tmp_path):
    assert call(capsys, "jobs") == (0, "no job is running\n", "")
    job = start("one")
    leave_dead("dead-1")
    silent = start("silent")
    silent.server.stop()
    code, out, _ = call(capsys, "jobs")
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and lines["job"].split() == list(verb_columns())
    address = f"http://127.0.0.1:{job.server.port}"
    assert lines["one"].split() == [
        "one",
        "training",
        "7/100",
        "2.5",
        address,
        os.path.abspath("runs/one"),
    ]
    assert "gone" in lines["dead-1"] and "silent" in lines["silent"]
    assert "silent: the job silent does not answer" in out and "--clean" in out
    code, out, _ = call(capsys, "jobs", "--json")
    found = {each["job_id"]: each for each in json.loads(out)["jobs"]}
    assert found["one"]["alive"] and found["one"]["address"] == address
    assert not found["dead-1"]["alive"] and found["dead-1"]["status"] == "gone"
    assert not {"nonce", "token"} & set(found["one"]) and "cccc" not in out
    code, out, _ = call(capsys, "jobs", "--clean")
    assert code == 0 and "removed what dead-1 left behind" in out
    assert {each.endpoint.job_id for each in list_jobs()} == {"one", "silent"}


def test_jobs_tells_the_address_under_which_a_job_is_reached(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADWAY_JOBS_DIR", str(tmp_path / "jobs"))
    place = {"output_dir": "out", "logging_dir": None, "run_name": None, "version": "1"}
    for job_id, host, certificate in (("open", "127.0.0.1", None), ("secret", "::1", "cert.pem")):
        files = Registration(job_id)
        files.write_endpoint(host, 1, None, **place, tls_certificate=certificate)
    found = json.loads(call(capsys, "jobs", "--json")[1])["jobs"]
    addresses = {each["job_id"]: each["address"] for each in found}
    assert addresses == {"open": "http://127.0.0.1:1", "secret": "https://[::1]:1"}


def test_a_post_mortem_of_a_killed_job_that_lacks_fields_is_told_as_far_as_it_goes(
    start, capsys, tmp_path
):
    pid = leave_dead("dead-1", tmp_path)
    report = {"time": time.time() + 60, "pid": pid, "error": "disk full"}
    (tmp_path / "post_mortem.json").write_text(json.dumps(report))
    code, out, _ = call(capsys, "jobs")
    assert code == 0 and "dead-1: gone: disk full; nothing is saved" in out


def test_jobs_does_not_take_the_word_of_another_process_for_a_dead_one_s(start, capsys, tmp_path):
    """The folder of a killed job may be in use again, by a run under another id or none."""
    pid = leave_dead("dead-1", tmp_path / "out")
    (found,) = json.loads(call(capsys, "jobs", "--json")[1])["jobs"]
    told = f"process {pid} is gone; it left no word of why"
    assert found["post_mortem"] == {"error_type": "lost", "error": told}
    write_note(tmp_path / "out", command=["headway", "train", "run.yaml"], resumes=True)
    write_report(tmp_path / "out", make_report(error="of the next", pid=os.getpid()), since=0)
    told = f"process {pid} is gone; its folder has been used since"
    (found,) = json.loads(call(capsys, "jobs", "--json")[1])["jobs"]
    assert found["status"] == "gone" and "global_step" not in found
    assert found["post_mortem"] == {"error_type": "lost", "error": told}
    out = call(capsys, "jobs")[1]
    assert f"dead-1: {told}\n" in out and str(os.getpid()) not in out and "go on with" not in out
    # A process of the same number that began at another time is another one.
    note = tmp_path / "out" / "run" / "process.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "pid": pid}))
    (found,) = json.loads(call(capsys, "jobs", "--json")[1])["jobs"]
    assert found["post_mortem"]["error"] == told


def test_nothing_is_called_gone_whose_process_is_not(tmp_path):
    write_note(tmp_path, command=None, resumes=False)
    assert "gone" not in examine(Run("one", "one", tmp_path))["error"]


def test_jobs_of_another_machine_are_asked_and_left_alone(start, capsys):
    def move(job: Steered) -> None:
        path = job.registration.folder / "endpoint.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "place": "x pid:[1]"}))

    answers, silent = start("answers"), start("silent")
    silent.server.stop()
    move(answers), move(silent)
    code, out, _ = call(capsys, "jobs", "--clean", "--json")
    said = json.loads(out)
    found = {each["job_id"]: each for each in said["jobs"]}
    assert code == 0 and said["removed"] == [] and len(list_jobs()) == 2
    assert found["answers"]["status"] == "training" and found["answers"]["elsewhere"]
    assert found["silent"]["status"] == "elsewhere"
    assert "of another machine or container" in found["silent"]["problem"]
    assert "place" not in found["answers"]
    assert "--clean" not in call(capsys, "jobs")[1], "that would not help"
    assert call(capsys, "job", "save", "answers")[0] == 0
    assert call(capsys, "job", "save", "silent")[0] == 3


def verb_columns():
    from headway.cli.jobs import _COLUMNS

    return _COLUMNS


def test_the_verbs_need_neither_torch_nor_a_package_for_http(start):
    start("one")
    for words in ("jobs", "job status one", "job save one"):
        assert_no_import(["headway", *words.split()], "torch")
    assert_no_import(["headway", "job", "save", "one"], "aiohttp")
    assert_no_import("from headway.control import AsyncClient, Client, list_jobs", "torch")


def test_jobs_says_of_a_killed_run_how_far_it_came_and_how_to_go_on(start, capsys, tmp_path):
    script = (
        "import os, sys; from headway import TrainerCallback;"
        "from headway.callbacks import JsonLogger, TrainerControlCallback;"
        "from headway.testing.trainer import tiny_trainer\n"
        "class Dies(TrainerCallback):\n"
        "    def on_save(self, step): os.kill(os.getpid(), 9)\n"
        "control = TrainerControlCallback(job_id='dead-2')\n"
        "tiny_trainer(sys.argv[1], [JsonLogger(), control, Dies()], max_steps=9, logging_steps=1,"
        " save_strategy='steps', save_steps=3).train()\n"
    )
    (tmp_path / "train.py").write_text(script)
    words = [sys.executable, "train.py", str(tmp_path)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    code, out, _ = call(capsys, "jobs")
    assert code == 0
    path = tmp_path / "out" / "checkpoint-3"
    (told,) = [line for line in out.splitlines() if line.startswith("dead-2: gone")]
    assert "is gone, and left no word of why" in told and f"the last checkpoint is {path}" in told
    (told,) = [line for line in out.splitlines() if line.startswith("dead-2: go on with")]
    assert told.endswith(f"in {tmp_path}: {os.path.basename(sys.executable)} {' '.join(words[1:])}")
    (found,) = json.loads(call(capsys, "jobs", "--json")[1])["jobs"]
    assert found["post_mortem"]["checkpoint"] == {"path": str(path), "step": 3}
