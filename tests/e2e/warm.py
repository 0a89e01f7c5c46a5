"""Programs that begin with torch imported: forked from a process that has imported it once.

Not a test. For tests of what many programs do, not of how one starts or ends: torch and its
compiler take most of the time of a short program. Everything else is as in a process of its own:
Headway is imported anew, and the program finds its words, folder, environment and streams.

As a program it listens at the address that it is given until its standard input ends. A client
sends its streams and a request; the answer is the exit code, or none where the program was killed.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

CLIENT = """\
#!{python} -IS
import json, os, socket, sys
words = {words} + sys.argv[1:]
request = json.dumps([words, os.getcwd(), dict(os.environ)]).encode()
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(request)
    answer = server.recv(1)
sys.exit(answer[0] if answer else words[0] + " was killed")
"""


@contextmanager
def warm_programs(programs: Mapping[str, list[str]]) -> Iterator[Path]:
    """A folder with programs by name: each runs a file of Python with the words given here.

    The first word is the file; a program of no words takes it from its own.
    """
    with tempfile.TemporaryDirectory(prefix="warm-") as name:
        folder, address = Path(name), f"{name}/address"
        for program, words in programs.items():
            path = folder / program
            path.write_text(CLIENT.format(python=sys.executable, words=words, address=address))
            path.chmod(0o755)
        command = [sys.executable, __file__, address]
        server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert server.stdin is not None and server.stdout is not None
        try:
            assert server.stdout.readline(), "the server of warm programs did not start"
            yield folder
        finally:
            server.stdin.close()
            server.wait(60)
            server.stdout.close()


def become(descriptors: list[int], words: list[str], folder: str, environ: dict[str, str]) -> int:
    """Run a program as `python FILE WORD...` would, in this process; returns its exit code."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    import numpy as np

    random.seed()
    np.random.seed()
    program = os.path.abspath(words[0])
    sys.argv, sys.path[0] = words, os.path.dirname(program)
    code: object = 0
    try:
        runpy.run_path(program, run_name="__main__")
    except SystemExit as stop:
        code = stop.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    # As at the end of a program, less the time that taking down an interpreter takes.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return int(code or 0) & 0xFF  # type: ignore[call-overload]


def receive(connection: socket.socket) -> tuple[list[int], list[str], str, dict[str, str]]:
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as stream:
        words, folder, environ = json.loads(stream.read(int.from_bytes(size, "big")))
    return descriptors, words, folder, environ


def serve(address: str) -> None:
    gc.disable()
    import torch
    import torch._dynamo  # the first optimizer would import it

    torch.set_num_threads(1)
    gc.freeze()
    gc.enable()
    children: set[int] = set()

    def reap(*_: object) -> None:
        for child in list(children):
            if os.waitpid(child, os.WNOHANG)[0]:
                children.discard(child)

    signal.signal(signal.SIGCHLD, reap)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            request = receive(connection)
            # A child that ends before it is known would not be waited for.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
            child = os.fork()
            if child == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
                listener.close()
                code = become(*request)
                connection.sendall(bytes([code]))
                os._exit(code)
            children.add(child)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            connection.close()
            for descriptor in request[0]:
                os.close(descriptor)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


if __name__ == "__main__":
    serve(sys.argv[1])
