"""The files by which a job is found: their modes, and what others may have prepared for them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys

import pytest

from headway.control.client import Client, ControlError
from headway.control.discovery import Registration, clean_stale, find_job, list_jobs
from headway.errors import ConfigError
from headway.testing.controlled import ControlledProcess, Options

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make files of others")


def register(root, job_id="run", tokens=("c" * 64, "r" * 64)):
    registration = Registration(job_id, root)
    registration.write_tokens(dict(zip(("control", "read"), tokens)))
    registration.write_endpoint(
        "127.0.0.1", 4321, None, output_dir="o", logging_dir=None, run_name=None, version="1"
    )
    return registration


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o007])
def test_files_and_all_new_folders_are_private_under_any_umask(tmp_path, umask):
    root = tmp_path / "a" / "b" / "jobs"
    before = os.umask(umask)
    try:
        register(root)
    finally:
        os.umask(before)
    for path in (tmp_path / "a", tmp_path / "a" / "b", root, root / "run"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    files = list((root / "run").iterdir())
    assert {path.name for path in files} == {"token", "read_token", "endpoint.json"}
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_a_secret_is_at_no_time_readable_by_others(tmp_path):
    """Every open that makes a file makes it private; there is no moment before a chmod."""
    program = (
        "import os, sys; from pathlib import Path\n"
        "from headway.control.discovery import Registration\n"
        "def look(event, args):\n"
        "    if event == 'os.chmod': print('chmod', args[0], file=sys.stderr)\n"
        "real = os.open\n"
        "def opened(path, flags, mode=0o777, **how):\n"
        "    if flags & os.O_CREAT: print(oct(mode), bool(flags & os.O_EXCL))\n"
        "    return real(path, flags, mode, **how)\n"
        "os.open = opened; sys.addaudithook(look); os.umask(0)\n"
        "Registration('run', Path(sys.argv[1])).write_tokens({'control': 'c' * 64})\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "jobs")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0o600", "True"] and done.stderr == ""


@as_root
def test_a_folder_that_another_user_made_before_is_refused(tmp_path):
    root = tmp_path / "jobs"
    root.mkdir(mode=0o777)
    os.chown(root, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=r"jobs must be a folder of this user.*HEADWAY_JOBS_DIR"):
        register(root)
    assert list(root.iterdir()) == []
    mine = tmp_path / "mine"
    (mine / "run").mkdir(parents=True)
    os.chown(mine / "run", NOBODY, NOBODY)
    os.chmod(mine, 0o700)
    with pytest.raises(ConfigError, match=r"run must be a folder of this user.*another job_id"):
        register(mine)
    assert list((mine / "run").iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770, 0o702])
def test_a_folder_that_others_can_write_to_is_refused(tmp_path, mode):
    root = tmp_path / "jobs"
    root.mkdir()
    root.chmod(mode)
    with pytest.raises(ConfigError, match="nobody else can write"):
        register(root)
    root.chmod(0o700)
    register(root)
    root.chmod(mode)
    assert list_jobs(root) == []  # somebody else may have written what is there


def test_a_job_s_folder_that_is_open_to_others_is_closed(tmp_path):
    root = tmp_path / "jobs"
    (root / "run").mkdir(parents=True)
    root.chmod(0o700)
    (root / "run").chmod(0o777)
    register(root)
    assert stat.S_IMODE((root / "run").stat().st_mode) == 0o700


def test_links_lead_nowhere(tmp_path):
    root, elsewhere = tmp_path / "jobs", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    victim = elsewhere / "victim"
    victim.write_text("precious")
    # A job's folder.
    root.mkdir(mode=0o700)
    (root / "run").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="no link"):
        register(root)
    assert [p.name for p in elsewhere.iterdir()] == ["victim"]
    # The folder of jobs.
    (tmp_path / "linked").symlink_to(root)
    with pytest.raises(ConfigError, match="no link"):
        register(tmp_path / "linked")
    # Files: what a link names is not written to, and the link is replaced.
    (root / "run").unlink()
    (root / "run").mkdir(mode=0o700)
    for name in ("token", "read_token", "endpoint.json"):
        (root / "run" / name).symlink_to(victim)
    registration = register(root)
    assert victim.read_text() == "precious"
    assert not any(path.is_symlink() for path in (root / "run").iterdir())
    # Neither read nor removed through a link.
    (root / "other").symlink_to(root / "run")
    assert [job.endpoint.job_id for job in list_jobs(root)] == ["run"]
    token = root / "run" / "token"
    token.unlink()
    token.symlink_to(victim)
    assert list_jobs(root)[0].token() is None
    (root / "run" / ".left").symlink_to(victim)
    registration.remove()
    assert victim.read_text() == "precious"


@as_root
def test_files_of_others_are_not_believed(tmp_path):
    register(tmp_path)
    endpoint, token = tmp_path / "run" / "endpoint.json", tmp_path / "run" / "token"
    os.chown(token, NOBODY, NOBODY)
    assert list_jobs(tmp_path)[0].token() is None
    os.chown(endpoint, NOBODY, NOBODY)
    assert list_jobs(tmp_path) == []
    os.chown(endpoint, os.getuid(), os.getgid())
    os.chmod(endpoint, 0o622)
    assert list_jobs(tmp_path) == []


def test_what_is_no_file_holds_nobody_up(tmp_path):
    register(tmp_path)
    for name in ("endpoint.json", "token"):
        (tmp_path / "run" / name).unlink()
        os.mkfifo(tmp_path / "run" / name, 0o600)
    assert list_jobs(tmp_path) == []


def test_clean_up_leaves_what_is_not_a_job_s(tmp_path):
    registration = register(tmp_path)
    path = tmp_path / "run" / "endpoint.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "process_started_at": 1.0}))
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert clean_stale(tmp_path) == ["run"]
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["notes.txt"]
    registration.remove()
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_the_token_of_an_earlier_run_of_the_job_is_worth_nothing(make_target, tmp_path):
    first = make_target(root=str(tmp_path), job_id="again")
    old, stale = dict(first.tokens), find_job("again", tmp_path)
    first.kill()
    assert not find_job("again", tmp_path).alive
    with pytest.raises(ControlError, match="not running any more"):
        Client(find_job("again", tmp_path)).abort()
    port = first.port
    second = make_target(root=str(tmp_path), job_id="again", server={"port": port})
    for role in ("read", "control"):
        assert second.ask("GET", "/jobs", old[role]).status == 401
        body = second.command()
        assert second.ask("POST", second.control_path, old[role], body).status == 401
        assert second.tokens[role] not in old.values()
        assert find_job("again", tmp_path).token(role) == second.tokens[role]
    # Who kept the address of the first, at the same port now, does not command the second.
    forged = stale.__class__(stale.endpoint, stale.folder, alive=True)
    with pytest.raises(ControlError, match="is not that job"):
        Client(forged).abort()
    assert second.take() == []


def test_the_tokens_of_an_earlier_run_do_not_stay(tmp_path):
    register(tmp_path).remove()
    (tmp_path / "run").mkdir(mode=0o700)
    (tmp_path / "run" / "read_token").write_text("r" * 64)
    register(tmp_path, tokens=("d" * 64,))
    (job,) = list_jobs(tmp_path)
    assert (job.token("control"), job.token("read")) == ("d" * 64, None)


@as_root
def test_a_process_number_that_another_user_got_is_not_the_job(tmp_path):
    """Asked as another user, to whom signals to this process are forbidden."""
    os.chown(tmp_path, NOBODY, NOBODY)
    os.chmod(tmp_path, 0o700)
    program = (
        "import json, os, sys; from pathlib import Path\n"
        "from headway.control.discovery import Registration, list_jobs\n"
        f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})\n"
        "os.chdir(sys.argv[1]); root = Path('.')\n"
        "r = Registration('run', root)\n"
        "r.write_endpoint('h', 1, None, output_dir='/', logging_dir=None, run_name=None,"
        " version='1')\n"
        "p = root / 'run' / 'endpoint.json'\n"
        "said = json.loads(p.read_text()); before = list_jobs(root)[0].alive\n"
        "p.write_text(json.dumps({**said, 'pid': 1, 'process_started_at': None}))\n"
        "print(before, list_jobs(root)[0].alive)\n"
    )
    # Entered before the user is changed: the folders above may be closed to others.
    command = [sys.executable, "-c", program, str(tmp_path)]
    program_folder = os.open(tmp_path, os.O_RDONLY)
    try:
        command[-1] = f"/proc/self/fd/{program_folder}"
        done = subprocess.run(command, capture_output=True, text=True, pass_fds=[program_folder])
    finally:
        os.close(program_folder)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_the_unix_socket_of_another_is_not_replaced(tmp_path):
    path = str(tmp_path / "s")
    (tmp_path / "s").write_text("a file")
    with pytest.raises(RuntimeError, match="ended with 1"):
        ControlledProcess(Options(root=str(tmp_path / "jobs"), server={"unix_socket": path}))
    assert (tmp_path / "s").read_text() == "a file"
    (tmp_path / "s").unlink()
    (tmp_path / "s").symlink_to(tmp_path / "t")
    with pytest.raises(RuntimeError, match="ended with 1"):
        ControlledProcess(Options(root=str(tmp_path / "jobs"), server={"unix_socket": path}))


def test_a_unix_socket_asks_for_tokens_too(make_target, tmp_path):
    target = make_target(root=str(tmp_path / "jobs"), server={"unix_socket": str(tmp_path / "s")})
    assert stat.S_IMODE(os.stat(tmp_path / "s").st_mode) == 0o600
    assert target.ask("GET", "/jobs").status == 401
    assert target.ask("GET", "/jobs", target.tokens["read"]).status == 200
    assert target.ask("GET", "/jobs", target.tokens["read"], host="evil.example").status == 421
    target.end()
    assert not (tmp_path / "s").exists()
