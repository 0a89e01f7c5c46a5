"""The process that reads a run's files for the server inside the run itself.

Owns: its end of the two pipes. Does not own: the answers (answers.py), nor when it is started
(source.py). It is a process of its own, of low priority, so that no curve is read or encoded under
the interpreter's lock of the training; it ends when the run does, or when nobody asks any more.
"""

from __future__ import annotations

import json
import os
import select
import sys
from pathlib import Path
from typing import Any, BinaryIO

from headway.control.dashboard.answers import Answers
from headway.control.dashboard.shelf import Place, Shelf
from headway.control.schema import BadRequest

IDLE_S = 300.0
_NICENESS = 10


def main(argv: list[str]) -> int:
    """Answer questions, a line each, until the pipe is closed."""
    folder, logging_dir, name = (json.loads(word) for word in argv)
    os.nice(_NICENESS)
    place = Place(Path(folder), None if logging_dir is None else Path(logging_dir), name)
    answers = Answers(Shelf(more=lambda: [place]))
    serve(answers, sys.stdin.fileno(), sys.stdout.buffer)
    return 0


def serve(answers: Answers, questions: int, replies: BinaryIO) -> None:
    """A reply is a line with status and length, then so many bytes of JSON."""
    waiting = b""
    while select.select([questions], [], [], IDLE_S)[0]:
        block = os.read(questions, 1 << 16)
        if not block:
            return
        waiting += block
        *lines, waiting = waiting.split(b"\n")
        for line in lines:
            status, body = _answer(answers, json.loads(line))
            replies.write(json.dumps({"status": status, "bytes": len(body)}).encode() + b"\n")
            replies.write(body)
            replies.flush()


def _answer(answers: Answers, question: dict[str, Any]) -> tuple[int, bytes]:
    query = [(key, value) for key, value in question["query"]]
    try:
        return 200, answers.ask(question["what"], question["run"], query)
    except BadRequest as error:
        return error.status, json.dumps(error.to_dict()).encode()
    except Exception as error:
        message = f"the run's files cannot be read: {type(error).__name__}: {error}"
        return 500, json.dumps({"error": message}).encode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
