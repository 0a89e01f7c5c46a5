"""The garbage collector rests while a process imports what it trains with, and only then."""

import gc
import subprocess
import sys

import pytest

from headway.args import TrainingArguments
from headway.cli.first_imports import import_compiler, resting_collector

PROGRAM = """
import gc, sys
from headway.cli.first_imports import resting_collector
assert "torch" not in sys.modules
seen = []
try:
    with resting_collector() as wake:
        seen.append(gc.isenabled())
        kept = [[] for _ in range(100_000)]
        seen.append(gc.get_freeze_count())
        if {wakes}:
            wake()
            seen.append(gc.isenabled())
            seen.append(gc.get_freeze_count() > 100_000)
            gc.disable()  # by someone else, whose choice it remains
            wake()
            seen.append(gc.isenabled())
            gc.enable()
        else:
            raise OSError
except OSError:
    seen.append("told")
print(seen, gc.isenabled())
"""


@pytest.mark.parametrize(
    ("wakes", "expected"),
    [(True, "[False, 0, True, True, False] True"), (False, "[False, 0, 'told'] True")],
)
def test_the_collector_rests_until_it_is_woken_or_something_fails(wakes, expected):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(wakes=wakes)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stdout.strip() == expected, done.stderr


def test_a_process_that_has_torch_already_keeps_its_collector():
    assert "torch" in sys.modules or __import__("torch")
    frozen = gc.get_freeze_count()
    with resting_collector() as wake:
        assert gc.isenabled()
        wake()
    assert gc.get_freeze_count() == frozen


@pytest.mark.parametrize(
    ("options", "is_imported"),
    [({}, False), ({"torch_compile": True}, True),
     ({"torch_compile": True, "torch_compile_backend": "aot_eager"}, False)],
)  # fmt: skip
def test_the_compiler_is_imported_where_it_will_be_needed(options, is_imported, monkeypatch):
    name = "torch._inductor.compile_fx"
    monkeypatch.setitem(sys.modules, name, None)  # to import it is an error now
    args = TrainingArguments(output_dir="out", use_cpu=True, **options)
    if is_imported:
        with pytest.raises(ImportError, match="compile_fx"):
            import_compiler(args)
    else:
        import_compiler(args)
