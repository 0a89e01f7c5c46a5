"""`headway dashboard`: what is refused before anything is served."""

from __future__ import annotations

import sys

import pytest

from headway.cli.main import main


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("h.py", "RUN_DIR: h.py is a file; allowed: a run's folder (its output_dir), or one that"),
        ("nowhere", "RUN_DIR: nowhere does not exist\n"),
        ("ou", "RUN_DIR: ou does not exist; did you mean out?"),
        ("out --port 99999", "--port: must be 0 to 65535, got 99999"),
        ("out --prot 1", "unknown argument '--prot'"),
    ],
)
def test_mistakes_of_the_command_line(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h.py").touch()
    (tmp_path / "out").mkdir()
    assert main(["dashboard", *words.split()]) == 2
    said = capsys.readouterr().err
    assert told in said and "Traceback" not in said
    assert "did you mean h.py" not in said


def test_without_its_package_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.setitem(sys.modules, "aiohttp.web", None)
    assert main(["dashboard", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "The dashboard needs the package 'aiohttp'" in said
    assert "pip install 'headway[dashboard]'" in said
