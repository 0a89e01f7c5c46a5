"""Names that a package offers without importing the modules that define them.

Owns: the `__getattr__` and `__dir__` of such a package. Does not own: which names these are, which
each package lists three times, each time for another reader: `__all__` for people and `import *`,
imports under `TYPE_CHECKING` for type checkers, and the table for this.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any


def lazy_exports(
    package: str, names: Iterable[str], homes: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for a package, to be assigned there under these names.

    `names` is its `__all__`. `homes` tells by module which names it defines; modules are relative
    to the package, a further dot goes up.
    """
    home_of = {name: module for module, defined in homes.items() for name in defined}
    offered = sorted(names)

    def find(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}",
                name=name,
                obj=sys.modules.get(package),
            )
        return getattr(importlib.import_module(f".{home_of[name]}", package), name)

    return find, lambda: list(offered)
