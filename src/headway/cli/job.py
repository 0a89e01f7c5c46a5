"""`headway job ...`: ask something of a running job.

Owns: the shell's words for commands, which job is meant, and what is printed. Does not own: the
commands and what they take (control/schema.py), nor talking to a job (control/client.py).

Exit codes: 0 done, 2 a mistake in the command, a job that nobody knows, or it was not confirmed, 3
the job is gone or does not answer in time, 4 the run refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.control.client import Client
    from headway.control.discovery import Job

MISTAKE, GONE, REFUSED = 2, 3, 4
COMMANDS = {
    # the shell's word: the command
    "save": "save_checkpoint",
    "stop": "graceful_stop",
    "save-stop": "save_and_stop",
    "abort": "abort",
    "pause": "pause",
    "resume": "resume",
    "set-lr": "set_learning_rate",
    "eval": "evaluate_now",
    "generate": "generate_now",
    "profile": "profile_next_steps",
    "extend": "extend_max_steps",
    "log-level": "set_log_level",
}
_OTHERS = {
    "status": "What the job does.",
    "tail": "Follow what happens to the job, until it ends.",
}
# Words that take a value beside the job: its name, and the option that can stand for it.
_VALUES = {
    "set-lr": ("RATE", "scale"),
    "extend": ("MAX_STEPS", "by"),
    "log-level": ("LEVEL", None),
}
_TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    from headway.control.schema import COMMANDS as KINDS

    helps = {**_OTHERS, **{word: KINDS[name].help for word, name in COMMANDS.items()}}
    verbs = parser.add_subparsers(dest="action", required=True, metavar=f"{{{','.join(helps)}}}")
    made = {
        word: verbs.add_parser(word, help=text.rstrip("."), description=text)
        for word, text in helps.items()
    }
    for word, each in made.items():
        value = _VALUES.get(word)
        each.add_argument(
            "words",
            nargs="*",
            metavar="JOB" if value is None else f"JOB {value[0]}",
            help="a job's id or the beginning of it; may be left out where one job runs",
        )
        each.add_argument("--json", action="store_true", help="print JSON")
        if word in COMMANDS:
            each.add_argument(
                "--no-wait", action="store_true", help="return when it is accepted, not done"
            )
            each.add_argument(
                "--timeout",
                type=_read_number,
                default=_TIMEOUT_S,
                metavar="S",
                help=f"wait at most so many seconds ({_TIMEOUT_S:g})",
            )
    _add_fields(made)


def _add_fields(made: dict[str, argparse.ArgumentParser]) -> None:
    """Options that become a command's fields. What they may be, the schema says."""
    made["set-lr"].add_argument(
        "--scale", type=_read_number, metavar="X", help="a factor of the present rate, for RATE"
    )
    made["set-lr"].add_argument(
        "--once", action="store_true", help="forget the change when the run is resumed"
    )
    made["pause"].add_argument(
        "--offload", action="store_true", help="move weights and optimizer state to the host"
    )
    made["generate"].add_argument("--prompt", metavar="TEXT", help="what to continue")
    made["generate"].add_argument(
        "--max-new-tokens", type=_read_number, metavar="N", help="tokens to write"
    )
    made["profile"].add_argument(
        "--steps", type=_read_number, metavar="N", help="steps to trace (3)"
    )
    made["extend"].add_argument(
        "--by", type=_read_number, metavar="N", help="steps to add, for MAX_STEPS"
    )
    made["abort"].add_argument("--yes", action="store_true", help="do not ask for confirmation")


def run(options: argparse.Namespace) -> int:
    """Do what was asked; problems on stderr, with --json on stdout as well."""
    from headway.cli.messages import print_json, say_error
    from headway.control.client import ControlError

    with _mistakes_as_json(options.json):
        job_words, data = _split_words(options)
        _check(options, data)
        try:
            client = _open(job_words, options)
            if options.action == "status":
                _show_status(client.status(), as_json=options.json)
            elif options.action == "tail":
                _follow(client, as_json=options.json)
            elif options.action == "abort" and not _confirm(client, options):
                say_error(["not confirmed: nothing was done"])
                return MISTAKE
            else:
                _send(client, options, data)
        except ControlError as error:
            if options.json:
                print_json({"error": str(error), "status": error.status, "answer": error.answer})
            say_error([printable(line) for line in str(error).splitlines()])
            return _code_of(error)
    return 0


def _code_of(error: Any) -> int:
    if error.status == 400:
        return MISTAKE
    if error.status is not None:
        return GONE if error.status == 410 else REFUSED
    # The receipt may also be one that was never settled: then nobody has refused.
    state = error.answer.get("state") if isinstance(error.answer, dict) else None
    return REFUSED if state in ("refused", "failed") else GONE


@contextmanager
def _mistakes_as_json(wanted: bool) -> Iterator[None]:
    from headway.cli.messages import print_json

    try:
        yield
    except ConfigError as error:
        if wanted:
            print_json({"error": "\n".join(error.problems), "status": None, "answer": None})
        raise


# -- the command line ---------------------------------------------------------------------------


def _split_words(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """Which words name the job, and the command's fields.

    A single word of a command that takes a value is that value, unless an option stands for it, or
    the value would be a number and the word is none.
    """
    words, action = list(options.words), options.action
    value: str | None = None
    name, instead = _VALUES.get(action, (None, None))
    replaced = instead is not None and getattr(options, instead) is not None
    if name is not None and len(words) > replaced and not _is_job_alone(action, words):
        value = words.pop()
    if len(words) > 1:
        expected = "JOB" if name is None else f"JOB and {name}"
        raise ConfigError(
            f"headway job {action}: {expected} expected, {len(options.words)} words given: "
            f"{' '.join(options.words)}"
        )
    given: dict[str, dict[str, Any]] = {
        "set-lr": {
            "value": None if value is None else _read_number(value),
            "scale": getattr(options, "scale", None),
            "keep": False if getattr(options, "once", False) else None,
        },
        "pause": {"offload": getattr(options, "offload", False) or None},
        "generate": {
            "prompt": getattr(options, "prompt", None),
            "max_new_tokens": getattr(options, "max_new_tokens", None),
        },
        "profile": {"num_steps": getattr(options, "steps", None)},
        "extend": {
            "max_steps": None if value is None else _read_number(value),
            "by": getattr(options, "by", None),
        },
        "log-level": {"level": value},
    }
    fields = given.get(action, {})
    return words, {key: field for key, field in fields.items() if field is not None}


def _is_job_alone(action: str, words: list[str]) -> bool:
    is_number = not isinstance(_read_number(words[-1]), str)
    return len(words) == 1 and _VALUES[action][1] is not None and not is_number


def _read_number(word: str) -> Any:
    """A number; what is none stays text, for the schema to refuse in its own words."""
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _check(options: argparse.Namespace, data: dict[str, Any]) -> None:
    """Before anything is asked of a job: the command is one that it could take."""
    from headway.control.schema import COMMANDS as KINDS
    from headway.control.schema import BadRequest, check_data

    if options.action not in COMMANDS:
        return
    name, option = _VALUES.get(options.action, (None, None))
    kind = KINDS[COMMANDS[options.action]]
    num_given = sum(key in data for key in kind.exactly_one_of)
    if option is not None and num_given != 1:
        raise ConfigError(
            f"headway job {options.action}: {'both' if num_given else 'neither'} given of {name} "
            f"and --{option}; allowed: one of them"
        )
    try:
        check_data(COMMANDS[options.action], data)
    except BadRequest as error:
        raise ConfigError(error.message) from None
    timeout_s = options.timeout
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < float("inf"):
        raise ConfigError(f"--timeout: {timeout_s!r} given; allowed: seconds, above 0")


def _open(words: list[str], options: argparse.Namespace) -> Client:
    """The job that is named, or the only one that runs."""
    from headway.cli.messages import write_line
    from headway.control.client import Client
    from headway.control.discovery import list_jobs

    if words:
        return Client(words[0])
    running: list[Job] = [job for job in list_jobs() if job.alive]
    if not running:
        raise ConfigError("JOB is missing, and no job is running (see: headway jobs)")
    if len(running) > 1:
        names = ", ".join(job.endpoint.job_id for job in running)
        raise ConfigError(f"JOB is missing, and several jobs are running: {names}")
    if not options.quiet:
        write_line(f"job: {running[0].endpoint.job_id}")
    return Client(running[0])


# -- what is done -------------------------------------------------------------------------------


def _confirm(client: Client, options: argparse.Namespace) -> bool:
    """Ask on a terminal before work is thrown away; elsewhere nobody could answer."""
    if options.yes or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return True
    status = client.status()
    step = status.get("global_step")
    at = "" if step is None else f" at step {step:,}"
    print(
        f"End {client.job_id}{at} without a save? What came after its last checkpoint is lost. "
        "[y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _send(client: Client, options: argparse.Namespace, data: dict[str, Any]) -> None:
    from headway.cli.messages import print_json

    name, wait = COMMANDS[options.action], not options.no_wait
    receipt = client.send(name, data, wait=wait, timeout_s=options.timeout)
    if options.json:
        print_json(receipt)
    elif wait:
        more = f": {printable(receipt['message'])}" if receipt["message"] else ""
        step = receipt["step"]
        when = "" if step is None else f" after step {step:,}"
        print(f"{name} took effect{when}{more}")
    else:
        print(f"{name} was accepted; its id is {receipt['id']}")


def _show_status(status: dict[str, Any], *, as_json: bool) -> None:
    from headway.cli.messages import print_json, print_table

    if as_json:
        print_json(status)
        return
    rows = []
    for key, value in status.items():
        if key == "incidents" and isinstance(value, list):
            value = "\n".join(_spell_incident(incident) for incident in value)
        elif isinstance(value, dict):
            value = "\n".join(f"{name} {inner}" for name, inner in value.items())
        if value not in (None, "", [], {}):
            rows.append((key, printable(value)))
    print_table(rows)


def _spell_incident(incident: Any) -> str:
    if not isinstance(incident, dict):
        return str(incident)
    return f"step {incident.get('step')}: {incident.get('message')}"


def _follow(client: Client, *, as_json: bool) -> None:
    import json
    import time

    for event in client.events():
        if as_json:
            print(json.dumps(event), flush=True)
            continue
        at = time.strftime("%H:%M:%S", time.localtime(event.pop("timestamp", None)))
        kind = printable(event.pop("event", ""))
        said = "  ".join(f"{key} {printable(value)}" for key, value in event.items())
        print(f"{at}  {kind}  {said}", flush=True)


def printable(value: Any) -> str:
    """Text from a run, without anything that a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in str(value))
