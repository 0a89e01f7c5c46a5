"""When one rank fails, all of them end soon and say which one it was.

Owns: telling a rank's own error from the loss of another rank, and passing on either.
Does not own: noticing that a rank is gone (watch.py).
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from headway.dist.limits import collective_limit_s
from headway.dist.watch import Failure, Watch, together
from headway.errors import problems_of

_WAITED_IN_VAIN = "timed out waiting"

# What torch says when the rank at the other end is gone, over gloo and over NCCL.
_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "socket timeout",
    "remote process exited",
    "no contact with rank",
    "was lost:",
    "communicator was aborted",
    "gloo/transport",
    "connectfullmesh",
    "nccl error",
    _WAITED_IN_VAIN,
    "application timeout caused pair closure",
    "failed to recv, got 0 bytes",
)


_OWN_WORDS_S = 3.0
"""How long to wait for a rank to say itself how it failed."""


class PeerFailure(RuntimeError):
    """Another rank failed or was lost, and this one cannot go on without it.

    `rank` is that rank (None where it could not be told), `reason` what became of it.
    """

    def __init__(self, failure: Failure, world_size: int) -> None:
        super().__init__(failure.describe(world_size))
        self.rank = failure.rank
        self.reason = failure.reason
        self.kind = failure.kind


@contextmanager
def guard_run() -> Iterator[Callable[[], None]]:
    """Around everything that ranks do together: an error on one rank becomes known to all.

    Yields what to call when the rest is each rank's own: others may end before it is done.

    The loss of another rank comes out as `PeerFailure`, which names it, and so does an error with
    the number of another rank in `failed_rank`; an error of this rank comes out as it is, after the
    others were told. Without a process group nothing happens.
    """
    with ExitStack() as common:
        common.enter_context(together())
        try:
            yield common.close
        except PeerFailure:
            raise
        except BaseException as error:
            _tell_or_blame(error)
            raise


def _tell_or_blame(error: BaseException) -> None:
    """Tell the others of an error of this rank; where it comes of another's loss, raise that."""
    watch = current_watch()
    if watch is None or (isinstance(error, SystemExit) and not error.code):
        return
    failure = None
    elsewhere = getattr(error, "failed_rank", None)
    with _hold_sigterm():
        if elsewhere not in (None, watch.rank):
            # Its own words for it come first, if they come.
            failure = watch.find_culprit(_OWN_WORDS_S)
            failure = failure or watch.report(Failure(elsewhere, _first_line(error), "error"))
        elif is_peer_loss(error):
            failure = watch.find_culprit()
    if failure is not None and failure.rank != watch.rank:
        raise PeerFailure(failure, watch.world_size) from error
    tell_failure(error)


def raised_together(own: Exception | None, told: str, *, rank: int) -> Exception:
    """What each rank is to raise where all of them know that one has failed: its own error there,
    what was told of it elsewhere. Ranks that raise it stand at the same place."""
    error = RuntimeError(told) if own is None else own
    error.failed_rank = rank  # type: ignore[attr-defined]
    error.raised_by_all = True  # type: ignore[attr-defined]
    return error


@contextmanager
def _hold_sigterm() -> Iterator[None]:
    """torchrun ends the others as soon as it sees a rank dead; the message must come first."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def tell_failure(error: BaseException) -> None:
    """Tell the other ranks that this one fails with an error of its own."""
    watch = current_watch()
    if watch is None or isinstance(error, PeerFailure):
        return
    mistakes = problems_of(error)
    if mistakes is None:
        watch.report(Failure(watch.rank, _first_line(error), "error"))
    else:
        watch.report(Failure(watch.rank, "; ".join(mistakes), "mistake"))


def _first_line(error: BaseException) -> str:
    line = f"{type(error).__name__}: {error}".strip().partition("\n")[0]
    if _WAITED_IN_VAIN in line.lower():
        return f"{line} (ranks wait {collective_limit_s():g} s for each other; ddp_timeout sets it)"
    return line


def is_peer_loss(error: BaseException) -> bool:
    """Whether an error, or what caused it, is how torch reports the loss of another rank."""
    chain: list[BaseException] = []
    seen: BaseException | None = error
    # Whoever raises a cause anew makes a circle.
    while seen is not None and not any(seen is known for known in chain):
        chain.append(seen)
        # An OSError is a connection of the user's own, to a data server perhaps.
        if isinstance(seen, RuntimeError):
            text = str(seen).lower()
            if any(phrase in text for phrase in _PEER_LOST):
                return True
        seen = seen.__cause__ or seen.__context__
    return False


def comes_of_lost_rank(error: BaseException) -> bool:
    """Whether an error comes of another rank that has failed, so that this one ends as well."""
    watch = current_watch()
    if watch is None or not is_peer_loss(error):
        return False
    failure = watch.wait_for_failure(_OWN_WORDS_S)
    return failure is not None and failure.rank != watch.rank


def first_to_say(text: str) -> bool:
    """Whether this rank is the one to print a text that others may want to print as well."""
    watch = current_watch()
    return watch is None or watch.is_first(text)


def current_watch() -> Watch | None:
    """The watch of the process group that is up, if there is one."""
    from headway.dist import group

    return group.current_watch()
