"""Finding running jobs by the files they leave, and not being misled by them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headway.control.discovery import (
    Registration,
    check_job_id,
    clean_stale,
    find_job,
    jobs_folder,
    list_jobs,
    new_job_id,
)
from headway.errors import ConfigError


def register(root, job_id, pid=None, **changes):
    registration = Registration(job_id, root)
    registration.write_tokens({"control": "c" * 64, "read": "r" * 64})
    registration.write_endpoint(
        "127.0.0.1", 4321, None, output_dir="out", logging_dir=None, run_name=None, version="1"
    )
    if pid is not None or changes:
        path = registration.folder / "endpoint.json"
        said = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({**said, "pid": said["pid"] if pid is None else pid}))
    return registration


def test_a_job_is_found_with_its_tokens_and_only_its_user_can_read_them(tmp_path):
    registration = register(tmp_path / "jobs", "run-1")
    (job,) = list_jobs(tmp_path / "jobs")
    assert job.alive and job.endpoint.port == 4321 and job.endpoint.pid == os.getpid()
    assert job.endpoint.output_dir == os.path.abspath("out")
    assert job.token() == "c" * 64 and job.token("read") == "r" * 64
    assert stat.S_IMODE(os.stat(registration.folder).st_mode) == 0o700
    for path in registration.folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    registration.remove()
    assert list_jobs(tmp_path / "jobs") == [] and not registration.folder.exists()


def test_a_killed_job_is_told_from_a_running_one_and_cleaned(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    register(tmp_path, "gone", pid=ended.pid)
    # The process number was given to another process meanwhile.
    register(tmp_path, "reused", process_started_at=1.0)
    register(tmp_path, "here")
    assert {job.endpoint.job_id: job.alive for job in list_jobs(tmp_path)} == {
        "gone": False,
        "reused": False,
        "here": True,
    }
    assert sorted(clean_stale(tmp_path)) == ["gone", "reused"]
    assert [job.endpoint.job_id for job in list_jobs(tmp_path)] == ["here"]


DIES = (
    "import os, sys; from pathlib import Path; from headway.control.discovery import Registration;"
    "r = Registration('run', Path(sys.argv[1])); r.write_tokens({'control': 'c' * 64});"
    "r.write_endpoint('127.0.0.1', 1, None, output_dir='out', logging_dir=None, run_name=None,"
    " version='1'); os.kill(os.getpid(), 9)"
)


def test_a_killed_job_of_which_its_parent_took_no_note_is_gone(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", DIES, str(tmp_path)])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it stays in the table
        (job,) = list_jobs(tmp_path)
        assert job.endpoint.pid == child.pid and not job.alive and job.gone
        again = register(tmp_path, "run")
        assert find_job("run", tmp_path).endpoint.nonce == again.nonce
    finally:
        child.wait(60)


def test_a_process_may_be_called_anything(tmp_path):
    name = Path(f"/proc/{os.getpid()}/comm")
    before = name.read_bytes().removesuffix(b"\n")
    try:
        name.write_bytes(b"\xff) \xfe")
        register(tmp_path, "run")
        assert find_job("run", tmp_path).alive
    finally:
        name.write_bytes(before)


AWAY = "another boot pid:[1]"


def test_jobs_of_other_machines_and_containers_are_not_judged(tmp_path, caplog):
    """Their process numbers are none of ours, though one may happen to be in use here."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    register(tmp_path, "away-1", place=AWAY)
    register(tmp_path, "away-2", pid=ended.pid, place=AWAY)
    register(tmp_path, "dead", pid=ended.pid)
    old = register(tmp_path, "old", pid=ended.pid).folder / "endpoint.json"
    said = json.loads(old.read_text())
    del said["place"]  # an older version's
    old.write_text(json.dumps(said))
    for name in ("away-1", "away-2"):
        job = find_job(name, tmp_path)
        assert job.elsewhere and not job.alive and not job.gone
    assert sorted(clean_stale(tmp_path)) == ["dead", "old"]
    assert find_job("away-2", tmp_path).token() == "c" * 64
    # Nobody can tell that it is gone, nor that it is not: a restart elsewhere goes on.
    assert "is replaced" not in caplog.text
    register(tmp_path, "away-1")
    assert find_job("away-1", tmp_path).alive
    assert caplog.text.count("job_id='away-1': what process") == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"job_id": "odd"}',
        "[" * 50000,
        '{"job_id":"odd","nonce":1,"pid":-1,"process_started_at":null,"host":"","port":1,'
        '"unix_socket":null,"started_at":0,"output_dir":"","logging_dir":null,"run_name":null,'
        '"version":"1"}',
    ],
)
def test_files_that_make_no_sense_are_no_jobs(tmp_path, content):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "endpoint.json").write_text(content)
    assert list_jobs(tmp_path) == []


def test_links_are_not_followed(tmp_path):
    register(tmp_path / "a", "real")
    root = tmp_path / "b"
    (root / "real").mkdir(parents=True)
    (root / "real" / "endpoint.json").symlink_to(tmp_path / "a" / "real" / "endpoint.json")
    assert list_jobs(root) == []


def test_another_job_of_the_same_id_is_refused_while_it_runs(tmp_path):
    first = register(tmp_path, "run")
    with pytest.raises(ConfigError, match="job_id='run' is taken by the running process"):
        register(tmp_path, "run")
    (job,) = list_jobs(tmp_path)
    assert job.endpoint.nonce == first.nonce
    second = Registration("run", tmp_path)
    second.remove()  # what is another's stays
    assert list_jobs(tmp_path)


def test_prefixes_must_be_unambiguous(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    register(tmp_path, "alpha-1"), register(tmp_path, "alpha-2"), register(tmp_path, "beta")
    register(tmp_path, "beta-old", pid=ended.pid)
    assert find_job("beta", tmp_path).endpoint.job_id == "beta"
    assert find_job("alpha-2", tmp_path).endpoint.job_id == "alpha-2"
    assert find_job("be", tmp_path).endpoint.job_id == "beta"  # the one that runs
    with pytest.raises(ConfigError, match=r"'alpha' is not one: alpha-\d, alpha-\d begin"):
        find_job("alpha", tmp_path)
    with pytest.raises(ConfigError, match="no job 'betaa'; did you mean 'beta'"):
        find_job("betaa", tmp_path)
    with pytest.raises(ConfigError, match="No job of this user"):
        find_job("x", tmp_path / "none")


@pytest.mark.parametrize(
    "job_id", ["", "..", ".", "a/b", "a\\b", "a b", "é", "x" * 65, "-x", 5, None]
)
def test_a_job_id_is_a_plain_word(job_id):
    with pytest.raises(ConfigError, match="job_id must be"):
        check_job_id(job_id)


def test_new_ids_are_plain_words_and_differ():
    ids = {new_job_id(name) for name in ("demo", "de/mo", None, "x" * 200, "é") for _ in range(20)}
    assert len(ids) == 100 and all(check_job_id(i) for i in ids)


def test_the_folder_follows_the_environment(tmp_path):
    assert jobs_folder({"HEADWAY_JOBS_DIR": "/x"}).as_posix() == "/x"
    assert jobs_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "headway" / "jobs"
    # Of a batch system's other machine.
    away = {"XDG_RUNTIME_DIR": str(tmp_path / "away"), "XDG_STATE_HOME": str(tmp_path)}
    assert jobs_folder(away).parent == tmp_path / "headway" / "jobs"
    # A home may be shared by machines; their process numbers are not.
    shared = jobs_folder({"XDG_STATE_HOME": "/s"})
    assert shared.parent.as_posix() == "/s/headway/jobs"
    assert check_job_id(shared.name)
