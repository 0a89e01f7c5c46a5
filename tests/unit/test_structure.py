"""The shape of the package: imports go one way, files stay small, torch is imported late."""

from __future__ import annotations

import ast
import re
import shutil
import statistics
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from headway.testing import assert_no_import

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "headway"

# Lower rooms first; a room may import the rooms of its own line and of those above it here.
ROOMS = (
    ("errors", "lazy_exports"),
    ("config", "args"),
    ("dist",),
    ("data", "models", "precision", "optim"),
    ("checkpoint",),
    ("strategies",),
    ("engine",),
    ("control", "diloco"),
    ("callbacks",),
    ("trainers",),
    ("compat", "cli"),
    ("testing",),
)
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}
# The package's face: it exports everything lazily and is imported by nobody inside.
OUTERMOST = {"__init__.py", "__main__.py"}

MAX_FILE_LINES = 500
MAX_MEDIAN_LINES = 180
MAX_FUNCTION_LINES = 80
MAX_STEP_LINES = 60
MAX_STRATEGY_METHODS = 14

# Module names and folders that answer before torch could be imported.
TORCH_FREE = [
    "__init__.py",
    "errors.py",
    "lazy_exports.py",
    "args.py",
    "config/**/*.py",
    "dist/__init__.py",
    "dist/env.py",
    "dist/device.py",
    "dist/seed.py",
    "models/__init__.py",
    "models/config.py",
    "data/__init__.py",
    *(
        f"data/{name}.py"
        for name in ("datasets", "tokens", "order", "packing", "mixing", "tokenizer", "text")
    ),
    "precision/__init__.py",
    "precision/recipes.py",
    "optim/__init__.py",
    "checkpoint/__init__.py",
    "strategies/__init__.py",
    "engine/post_mortem.py",
    "engine/process_note.py",
    "control/**/*.py",
    "callbacks/**/*.py",
    "cli/**/*.py",
    "testing/__init__.py",
    "testing/imports.py",
    "testing/ranks.py",
    "testing/tiny.py",
]

UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "joblib"}
MAY_PICKLE = {
    # Carries values between the processes of one call; nothing of it is ever stored.
    "testing/ranks.py",
    # Reads other tools' files on request, without running what they hold.
    "checkpoint/legacy.py",
}


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, at the top, in functions or for types."""
    package = module_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{target}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield node.lineno, str(argument.value)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "headway":
            yield node.lineno, f"headway.{node.attr}"


def imported_rooms(path: Path) -> Iterator[tuple[int, str]]:
    for line, module in imported_modules(path):
        parts = module.split(".")
        # A bare `import headway` is judged by the attributes that are then used.
        if parts[0] == "headway" and parts[1:2] not in ([], ["__version__"]):
            yield line, parts[1]


def find_import_faults(path: Path) -> list[str]:
    room = room_of(path)
    faults = []
    if room not in LEVEL:
        return [f"{name_of(path)}: the room {room!r} has no place in the order of rooms"]
    for line, target in imported_rooms(path):
        where = f"{name_of(path)}:{line}"
        if target not in LEVEL:
            faults.append(
                f"{where}: imports headway.{target}, which is no room; the package's own names "
                "come from the room that defines them"
            )
        elif target == "testing" != room:
            faults.append(f"{where}: imports headway.testing, which is for tests only")
        elif LEVEL[target] > LEVEL[room]:
            faults.append(
                f"{where}: {room} imports {target}, which is a higher room; "
                "what both need belongs in the lower one"
            )
    return faults


def test_imports_go_one_way() -> None:
    files = [path for path in source_files() if name_of(path) not in OUTERMOST]
    faults = [fault for path in files for fault in find_import_faults(path)]
    assert not faults, "\n".join(faults)


def test_rooms_of_one_level_do_not_import_each_other_both_ways() -> None:
    pairs: dict[tuple[str, str], str] = {}
    for path in source_files():
        for line, target in imported_rooms(path):
            pairs.setdefault((room_of(path), target), f"{name_of(path)}:{line}")
    faults = [
        f"{a} imports {b} ({where}) and {b} imports {a} ({pairs[b, a]})"
        for (a, b), where in pairs.items()
        # The two halves of the lowest room describe each other.
        if a < b and (b, a) in pairs and {a, b} != {"args", "config"} and "__init__" not in (a, b)
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("file", "code", "fault"),
    [
        ("data/x.py", "from headway.engine.loop import Loop", "data imports engine"),
        ("data/x.py", "def f():\n    import headway.trainers", "data imports trainers"),
        ("data/x.py", "from ..engine import loop", "data imports engine"),
        ("data/x.py", "from headway import engine", "data imports engine"),
        ("data/x.py", "from headway import Trainer", "no room"),
        ("data/x.py", "import headway\nheadway.Trainer()", "no room"),
        ("data/x.py", "import_module('headway.cli.main')", "data imports cli"),
        ("trainers/x.py", "from headway.testing import run_ranks", "tests only"),
        ("errors.py", "from headway.config import load", "errors imports config"),
        ("helpers/x.py", "", "no place in the order"),
        ("engine/x.py", "from headway.data import order\nfrom . import state", None),
        ("data/x.py", "import headway\nprint(headway.__version__)", None),
        ("cli/x.py", "from headway.trainers import Trainer", None),
    ],
)
def test_the_import_check_can_fail(
    file: str, code: str, fault: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.PACKAGE", tmp_path / "headway")
    path = tmp_path / "headway" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(code)
    faults = find_import_faults(path)
    assert (fault is None and not faults) or (fault is not None and fault in faults[0])


def test_files_stay_small() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in source_files()}
    long = [f"{name}: {n} lines" for name, n in lines.items() if n >= MAX_FILE_LINES]
    assert not long, f"a file stays under {MAX_FILE_LINES} lines:\n" + "\n".join(long)
    median = statistics.median(lines.values())
    assert median < MAX_MEDIAN_LINES, f"the median file has {median} lines"


Function = ast.FunctionDef | ast.AsyncFunctionDef


def count_lines(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function) is not None
    docstring = (first.end_lineno or 0) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def functions_of(path: Path) -> list[Function]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, Function)]


def test_functions_stay_small() -> None:
    long = [
        f"{name_of(path)}:{function.lineno}: {function.name} has {count_lines(function)} lines"
        for path in source_files()
        for function in functions_of(path)
        if count_lines(function) >= MAX_FUNCTION_LINES
    ]
    assert not long, f"a function stays under {MAX_FUNCTION_LINES} lines:\n" + "\n".join(long)


def test_lines_of_a_function_are_counted_without_its_docstring() -> None:
    tree = ast.parse('@decorated\ndef f(\n    a,\n):\n    """One.\n\n    Two."""\n    return a\n')
    assert isinstance(tree.body[0], ast.FunctionDef)
    assert count_lines(tree.body[0]) == 4


def test_the_step_of_the_loop_stays_small() -> None:
    path = PACKAGE / "engine" / "step.py"
    steps = [function for function in functions_of(path) if function.name == "take"]
    assert steps, "engine/step.py has no function `take` to measure"
    for step in steps:
        num_lines = count_lines(step)
        assert num_lines < MAX_STEP_LINES, f"engine/step.py:{step.lineno}: {num_lines} lines"


def test_the_strategy_has_few_methods() -> None:
    path = PACKAGE / "strategies" / "base.py"
    if not path.exists():
        pytest.skip("there is no strategy yet")
    classes = [node for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    strategy = next((node for node in classes if node.name == "Strategy"), None)
    assert strategy is not None, "strategies/base.py has no class Strategy"
    methods = [node.name for node in strategy.body if isinstance(node, Function)]
    public = [name for name in methods if not name.startswith("_")]
    assert len(public) <= MAX_STRATEGY_METHODS, f"{len(public)} methods: {', '.join(public)}"


def test_there_is_no_room_for_odds_and_ends() -> None:
    odd = [name_of(path) for path in source_files() if path.stem in ("utils", "util", "helpers")]
    assert not odd, f"name these by what they hold: {odd}"


def test_nothing_is_pickled() -> None:
    faults = []
    for path in source_files():
        if name_of(path) in MAY_PICKLE:
            continue
        for line, module in imported_modules(path):
            if module.split(".")[0] in UNPICKLERS:
                faults.append(f"{name_of(path)}:{line}: imports {module}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "torch.load",
                "torch.save",
            ):
                faults.append(f"{name_of(path)}:{node.lineno}: uses {ast.unparse(node)}")
    assert not faults, "\n".join(faults)


def test_pickled_files_are_read_without_running_code() -> None:
    path = PACKAGE / "checkpoint" / "legacy.py"
    calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert loads
    for call in loads:
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert options.get("weights_only") == "True", f"legacy.py:{call.lineno}"
    unsafe = {"pickle.load", "pickle.loads", "pickle.Unpickler"}
    assert not [call.lineno for call in calls if ast.unparse(call.func) in unsafe]


def test_light_modules_do_not_import_torch() -> None:
    paths = sorted({path for pattern in TORCH_FREE for path in PACKAGE.glob(pattern)})
    # An absent room is being built; what is there must hold.
    modules = [module_of(path) for path in paths]
    assert "headway.errors" in modules
    assert_no_import("\n".join(f"import {module}" for module in modules))


def written_files() -> list[Path]:
    folders = ("src", "tests", "docs", "examples", "recipes", "benchmarks")
    suffixes = {".py", ".md", ".yaml", ".yml", ".toml", ".sh"}
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    return [*(path for path in paths if path.suffix in suffixes), ROOT / "README.md"]


def find_in_text(paths: list[Path], pattern: str) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_nothing_is_left_to_be_done_later() -> None:
    found = find_in_text(source_files(), r"\b(TODO|FIXME|XXX)\b")
    assert not found, "\n".join(found)


def test_no_path_of_somebodys_machine_is_written_down() -> None:
    found = find_in_text(written_files(), r"(?<![\w.:~*}/-])/(home|root|Users|work|workspace)/\w")
    assert not found, "\n".join(found)


@pytest.mark.skipif(shutil.which("git") is None, reason="asks git")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="asks the repository")
def test_no_source_file_is_ignored() -> None:
    # The build leaves out of the wheel what .gitignore names, and the linter passes it over.
    paths = [str(path.relative_to(ROOT)) for path in written_files()]
    asked = subprocess.run(
        ["git", "check-ignore", "--no-index", "--verbose", "--stdin"],
        input="\n".join(paths),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert not asked.stdout, f"these are ignored (rule, then file):\n{asked.stdout}"
