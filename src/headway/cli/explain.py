"""`headway explain OPTION`: type, default, meaning and rules of one option or run-file key."""

from __future__ import annotations

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "option", metavar="OPTION", help="an option (max_steps, ddp.bucket_cap_mb) or a key (data)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print the facts on the option; an unknown one is a ConfigError with the nearest name."""
    from headway.config.fields import find_option

    facts = find_option(options.option)
    if options.json:
        print(json.dumps(facts.as_dict(), indent=2, default=str))
        return 0
    out = sys.stdout
    out.write(f"{facts.name}\n  {facts.meaning}\n\n")
    out.write(f"  type     {facts.type}\n")
    out.write(f"  default  {facts.default!r}\n")
    out.write(f"  class    {', '.join(facts.classes)}\n")
    if facts.rules:
        out.write("\n  rules\n")
    for rule in facts.rules:
        kind = f"{rule.outcome} at {rule.stage}"
        out.write(f"    {rule.number:>4}  {rule.description} ({kind})\n")
    return 0
