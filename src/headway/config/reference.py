"""The option reference as Markdown, made from the dataclasses so that it cannot go stale.

Owns: `render_options`, the text of docs/options.md; `python -m headway.config.reference` prints it.
"""

from __future__ import annotations

import sys
from typing import Any

from headway.config.fields import ARGUMENT_CLASSES, NESTED_CLASSES, all_options, own_fields
from headway.config.rules import all_rules

_HEAD = """# Options

This page is generated from the dataclasses in `headway.args`; do not edit it.
Write it anew with `python -m headway.config.reference > docs/options.md`.
`headway explain OPTION` prints one entry.
"""


def render_options() -> str:
    """The whole page."""
    parts = [_HEAD]
    options = all_options()
    for cls in ARGUMENT_CLASSES:
        names = own_fields(cls)
        base = cls.__mro__[1].__name__
        parts.append(f"## {cls.__name__}\n\n{_first_line(cls)}\n")
        if base != "Arguments":
            parts.append(f"Has all options of `{base}`.\n")
        if names:
            parts.append(_table([options[name] for name in names]))
    for prefix, cls in NESTED_CLASSES.items():
        parts.append(f"## {cls.__name__} (`{prefix}.*`)\n\n{_first_line(cls)}\n")
        parts.append(_table([options[f"{prefix}.{name}"] for name in own_fields(cls)]))
    parts.append(_rules())
    return "\n".join(parts)


def _table(facts: list[Any]) -> str:
    lines = ["| Option | Type | Default | Meaning |", "|---|---|---|---|"]
    for fact in facts:
        default = "its defaults" if fact.name in NESTED_CLASSES else f"`{fact.default!r}`"
        lines.append(f"| `{fact.name}` | {fact.type} | {default} | {fact.meaning} |")
    return "\n".join(lines) + "\n"


def _rules() -> str:
    lines = [
        "## Rules",
        "",
        "Rules of the stage `args` are checked together when the arguments are built; the others",
        "where the model, the device or the data is known.",
        "",
        "| Rule | Options | Checked at | If broken | What it says |",
        "|---|---|---|---|---|",
    ]
    for rule in all_rules():
        options = ", ".join(f"`{option}`" for option in rule.options)
        lines.append(
            f"| {rule.number} | {options} | {rule.stage} | {rule.outcome} | {rule.description} |"
        )
    return "\n".join(lines) + "\n"


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0]


if __name__ == "__main__":
    sys.stdout.write(render_options())
