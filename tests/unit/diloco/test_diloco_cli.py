"""`headway diloco`: mistakes before anything is started, status, and a worker as a command."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoint.tensors import read_shards
from headway.cli.diloco_server import load_first_model
from headway.cli.main import main
from headway.testing import assert_no_import
from headway.testing.diloco import ToyWorker, serving, stopped, toy_model

RUN = """\
model: {vocab_size: 64, hidden_size: 16, num_layers: 2, num_heads: 2, max_seq_len: 16}
data:
  train:
    class_path: SyntheticDataset
    init_args: {num_samples: 32, sequence_length: 8, vocab_size: 64}
args:
  output_dir: out
  max_steps: 4
  per_device_train_batch_size: 2
  use_cpu: true
  seed: 1
"""
TOKEN = "k" * 40


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("DILOCO_SERVER", "DILOCO_TOKEN", "DILOCO_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port: int = closed.getsockname()[1]
    return port


# Mistakes


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("server --workers 0", "--workers=0"),
        ("server --workers 2 --min-workers 3", "--min-workers=3: allowed is 1 to --workers=2"),
        ("server --workers 2 --min-workers 0", "--min-workers=0"),
        ("server --workers 2 --sync-every 0", "--sync-every=0"),
        ("server --workers 1 --outer-lr -1", "--outer-lr=-1"),
        ("server --workers 1 --momentum 1", "--momentum=1"),
        ("server --workers 1 --model nowhere", "--model: nowhere does not exist"),
        ("server --workers 1 --tls-key key.pem", "tls_key='key.pem' needs tls_cert"),
        ("server --workers 1 --args.seed=1", "--args.seed=1"),
        ("server", "--workers"),
        ("local run.yaml --workers 0", "--workers=0"),
        ("local run.yaml --workers 2 --sync-every 0", "--sync-every"),
        ("local run.yaml --workers 2 --comm int4", "unknown comm 'int4'"),
        ("local none.yaml --workers 2", "none.yaml"),
        ("worker run.yaml", "--server: no address given"),
        ("worker run.yaml --server kite", "server_addr: 'kite'"),
        ("worker run.yaml --server kite:1 --sync-every 0", "sync_every: 0"),
        ("worker run.yaml --server kite:1 --dilly", "--dilly"),
        ("status", "DILOCO_SERVER is not set"),
        ("status kite", "HOST:PORT"),
        ("stats", "stats"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_started(
    here: Path, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    assert main(["diloco", *words.split()]) == 2
    err = capsys.readouterr().err
    assert "error: " in err and told in err and "Traceback" not in err
    assert [path.name for path in here.iterdir()] == ["run.yaml"]


def test_mistakes_and_status_import_no_torch(here: Path) -> None:
    for words, code in (
        (("local", "run.yaml", "--workers", "0"), 2),
        (("server", "--workers", "1", "--momentum", "1"), 2),
        (("status", f"127.0.0.1:{closed_port()}"), 2),
        (("--help",), 0),
    ):
        assert_no_import(["headway", "diloco", *words], returncode=code, cwd=here)


MISTAKES = {
    "nobody": "nothing listens there",
    "unknown-host": "'kite.invalid' is no known host",
    "no-token": "there is no token",
    "token": "it is not one that this server knows",
    "version": "this server speaks version 1 of the protocol, not '2'",
    "fragments": "num_fragments=3: allowed are 1 to 2",
    "other-fragments": "num_fragments=2: this server works with 1",
    "model": "it is not this server's model",
    "dtype": "lm_head.weight is float32 [64, 16] instead of bfloat16 [64, 16]",
    "id": "a worker 'worker-0' is there already",
    "no-server": "this is no DiLoCo server",
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_worker_that_cannot_take_part_ends_with_2_before_it_trains(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    model = {"model": toy_model, "dtype": lambda: load_first_model("run.yaml").bfloat16()}
    auth = {"disable_auth": False, "token": TOKEN} if "token" in case else {}
    (here / "token").write_text("w" * 40)
    (here / "token").chmod(0o600)
    more = {
        "token": ["--token-file", "token"],
        "fragments": ["--num-fragments", "3", "--sync-every", "6"],
        "other-fragments": ["--num-fragments", "2", "--sync-every", "6"],
        "id": ["--worker-id", "worker-0"],
    }.get(case, [])
    if case == "version":
        monkeypatch.setattr("headway.diloco.client.PROTOCOL", 2)
    first = model[case]() if case in model else None
    with ExitStack() as stack:
        server = stack.enter_context(serving(here / "server", first, **auth))
        if case == "id":
            other = ToyWorker(server.address, model=load_first_model("run.yaml"), comm="bf16")
            stack.enter_context(stopped(other.start()))
        address = {
            "nobody": f"127.0.0.1:{closed_port()}",
            "unknown-host": "kite.invalid:7650",
            "no-server": f"127.0.0.1:{stack.enter_context(answering_404())}",
        }.get(case, server.address)
        words = ["worker", "run.yaml", "--server", address, *more]
        words += ["--callbacks=[{class_path: DiLoCoCallback, init_args: {max_sync_retries: 0}}]"]
        assert main(["diloco", *words]) == 2
        assert server.core.totals.num_rounds == 0
    err = capsys.readouterr().err
    assert MISTAKES[case] in err and "Traceback" not in err
    assert not (here / "out").exists()


@contextmanager
def answering_404() -> Iterator[int]:
    """Some other server of the web; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def test_a_server_that_is_asked_again_is_told_of_meanwhile(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "{max_sync_retries: 2, first_retry_s: 0.01}"
    words = ["worker", "run.yaml", "--server", f"127.0.0.1:{closed_port()}"]
    words += [f"--callbacks=[{{class_path: DiLoCoCallback, init_args: {own}}}]"]
    assert main(["diloco", *words]) == 2
    assert capsys.readouterr().err.count("it is asked again") == 2


def test_a_run_file_with_the_callback_and_no_address_says_once_that_it_trains_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "run.yaml", "-v", "--callbacks=[{class_path: DiLoCoCallback}]"]
    assert main(words) == 0
    assert capsys.readouterr().err.count("DiLoCoCallback: not active") == 1


# What works


def test_a_worker_trains_a_run_file_with_a_server(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(here / "server", disable_auth=False, token=TOKEN) as server:
        (here / "token").write_text(TOKEN)
        (here / "token").chmod(0o600)
        words = ["worker", "run.yaml", "--server", server.address, "--worker-id", "kite"]
        words += ["--sync-every", "2", "--token-file", "token", "--json", "-q"]
        assert main(["diloco", *words]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["steps"] == 4 and server.core.totals.num_rounds == 2
        state = server.core.state
        assert state is not None and list(server.core.book.applied[0]) == ["kite"]
        stored = read_shards(Path(result["checkpoint"]), "model")
        for name, value in state.parameters.items():
            assert bool((stored[name] == value).all()), name


def test_a_server_can_begin_from_a_run_file_or_from_a_run(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.yaml", "-q", "--args.output_dir=first"]) == 0
    for name, given in (("file", "run.yaml"), ("run", "first")):
        with serving(here / f"server-{name}", load_first_model(given)) as server:
            first = server.state_hash
            words = ["worker", "run.yaml", "--server", server.address, "--sync-every", "4", "-q"]
            assert main(["diloco", *words, f"--args.output_dir={name}"]) == 0
            assert server.core.totals.num_rounds == 1 and server.state_hash != first
    capsys.readouterr()


def test_a_run_file_that_has_the_callback_keeps_its_options(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = "{class_path: DiLoCoCallback, init_args: {sync_every: 4, comm: float32}}"
    for name, form in (("listed", f"[{own}]"), ("named", f"{{exchange: {own}}}")):
        with serving(here / f"server-{name}") as server:
            words = ["worker", "run.yaml", "--server", server.address, "-q"]
            words += [f"--args.output_dir={name}", f"--callbacks={form}"]
            assert main(["diloco", *words]) == 0
            assert server.core.totals.num_rounds == 1
    capsys.readouterr()


def test_status_in_lines_and_as_json(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(here / "server", num_workers=2) as server:
        worker = ToyWorker(server.address).start()
        with stopped(worker):
            assert main(["diloco", "status", server.address]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert f"{server.address}: sync, 1/2 workers, round 1 has 0/2" in lines[0]
            assert lines[2].startswith("worker-0 ")
            monkeypatch.setenv("DILOCO_SERVER", server.address)
            assert main(["diloco", "status", "--json"]) == 0
            status: dict[str, Any] = json.loads(capsys.readouterr().out)
            assert status["expected"] == 2 and status["workers"][0]["id"] == "worker-0"
