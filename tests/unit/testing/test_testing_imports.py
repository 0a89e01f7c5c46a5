"""The import guard: it sees a forbidden import, however it is hidden."""

from __future__ import annotations

import pytest

from headway.testing import assert_no_import


def test_code_that_stays_away_returns_its_output() -> None:
    done = assert_no_import("import json, sys; print('out'); print('err', file=sys.stderr)", "csv")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")


@pytest.mark.parametrize(
    "code",
    [
        "import xml.dom",
        "from xml import dom",
        "try:\n    import xml\nexcept ImportError:\n    pass",
        "def reach_it():\n    import xml\nreach_it()",
        "import importlib\nimportlib.import_module('xml.dom')",
    ],
)
def test_a_forbidden_import_fails_even_if_it_is_caught(code: str) -> None:
    with pytest.raises(AssertionError, match="'xml' was imported"):
        assert_no_import(code, "xml")


def test_names_that_only_begin_alike_are_allowed() -> None:
    assert_no_import("import xmlrpc.client_; print()", "xml", returncode=1)


def test_the_stack_shows_who_imported_it() -> None:
    with pytest.raises(AssertionError, match="xmlrpc"):
        assert_no_import("import xmlrpc.client", "xml")


def test_a_command_line_and_its_exit_code() -> None:
    argv = ["python", "-c", "import sys; sys.exit(2)"]
    assert assert_no_import(argv, returncode=2).returncode == 2
    assert assert_no_import(argv, returncode=None).returncode == 2
    with pytest.raises(AssertionError, match="exit code 2, expected 0"):
        assert_no_import(argv)


def test_the_testing_package_itself_needs_no_torch() -> None:
    assert_no_import("import headway.testing as t; t.run_ranks; t.tiny_dataset(); t.RankFailure")
