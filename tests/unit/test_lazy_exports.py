"""What packages offer without importing it: three lists of names agree, and each name is there."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import headway
from headway.lazy_exports import lazy_exports

ROOT = Path(headway.__file__).parent
LAZY = [p for p in sorted(ROOT.rglob("__init__.py")) if "= lazy_exports(" in p.read_text()]


def package_of(path: Path) -> str:
    return ".".join(path.parent.relative_to(ROOT.parent).parts)


def for_type_checkers(tree: ast.Module) -> dict[str, str]:
    """Name -> module of the imports that only type checkers make."""
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}


def in_the_table(tree: ast.Module, package: str) -> dict[str, str]:
    (call,) = (
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)
    )
    table: dict[str, tuple[str, ...]] = ast.literal_eval(call.args[2])
    return {
        name: importlib.util.resolve_name(f".{module}", package)
        for module, names in table.items()
        for name in names
    }


@pytest.mark.parametrize("path", LAZY, ids=package_of)
def test_the_three_lists_agree_and_every_name_is_there(path: Path) -> None:
    package, tree = package_of(path), ast.parse(path.read_text())
    module, table = importlib.import_module(package), in_the_table(tree, package)
    assert table == for_type_checkers(tree)
    defined_here = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert sorted(module.__all__) == sorted(table.keys() | defined_here)
    assert dir(module) == sorted(module.__all__)
    for name, home in table.items():
        assert getattr(module, name) is getattr(sys.modules[home], name)


def test_all_packages_with_exports_were_found() -> None:
    assert {"headway", "headway.optim", "headway.models", "headway.callbacks"} <= {
        package_of(path) for path in LAZY
    }
    getters = [p for p in ROOT.rglob("__init__.py") if "def __getattr__" in p.read_text()]
    assert not getters, "lazy_exports is there for it"


def test_a_name_that_is_not_there_is_told_with_its_package() -> None:
    with pytest.raises(AttributeError, match=r"module .headway\.models. has no attribute .Decder."):
        importlib.import_module("headway.models").Decder  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'Trianer'"):
        exec("from headway import Trianer")
    find, names = lazy_exports("headway", ["b", "a"], {"errors": ("ConfigError",)})
    assert find("ConfigError") is headway.ConfigError and names() == ["a", "b"]
