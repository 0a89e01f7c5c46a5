"""The process group of a run: coming up, going down, and what a process knows of its place in it.

Owns: `DistributedContext`, the default process group, the gloo group for the host's own messages,
and the watch that goes with them. Does not own: the address of the meeting place (rendezvous.py),
meshes and the groups of one strategy (strategies/).
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import platform
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from headway import __version__
from headway.dist import agreement
from headway.dist.device import get_device
from headway.dist.env import DistributedEnv, detect_env, frozen_limit_s, waiting_limit_s
from headway.dist.limits import TIMEOUT_S, collective_limit, set_collective_limit
from headway.dist.processes import ProcessIdentity, identify
from headway.dist.rendezvous import Endpoint, connect, find_endpoint, meet
from headway.dist.watch import Failure, Watch
from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

RENDEZVOUS_S = 600.0
"""How long to wait for all ranks to come; starting machines of a cluster takes minutes."""
_LEAVING_S = 10.0


@dataclass(frozen=True)
class DistributedContext:
    """Where this process stands among all ranks, and how they talk."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    backend: str | None = None
    device_name: str | None = None
    """The device chosen for this rank. None: the best one of its local rank."""

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world_size > 1

    @property
    def device(self) -> torch.device:
        import torch

        if self.device_name is not None:
            return torch.device(self.device_name)
        return get_device(self.local_rank)

    @property
    def host_group(self) -> ProcessGroup:
        return host_group()

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.is_distributed:
            from torch import distributed

            distributed.barrier(group=host_group())

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value (anything JSON has), on every rank."""
        if not self.is_distributed:
            return value
        return agreement.exchange(value if self.is_main_process else None, host_group())[0]


@dataclass
class _Up:
    """What exists while a group is up."""

    context: DistributedContext
    group: Any
    watch: Watch | None
    own_group: bool
    """Whether the default group was made here, so that it is ours to destroy."""
    host: Any = None


_up: _Up | None = None


def init_distributed(
    *,
    backend: str | None = None,
    timeout_s: float = TIMEOUT_S,
    device: str | None = None,
    use_cpu: bool = False,
    environ: Mapping[str, str] | None = None,
    rendezvous_s: float = RENDEZVOUS_S,
    alone: bool = False,
    problems: Sequence[str] = (),
) -> DistributedContext:
    """Join the other ranks that the launcher started; with none, the context of a lone process.

    `backend` is 'gloo' where the device is the CPU and 'cpu:gloo,cuda:nccl' on CUDA unless given.
    `timeout_s` limits one collective, `rendezvous_s` the wait for all ranks to come. `alone` makes
    a group for a single rank too. A group that exists already is kept, and only watched.

    `problems` are a rank's reasons not to go on: every rank meets the others all the same, and all
    raise one `ConfigError` that tells each problem once, with the ranks that have it.
    """
    global _up
    if _up is not None and _is_current(_up):
        return _up.context
    _up = None
    variables = os.environ if environ is None else environ
    facts = detect_env(variables, use_cpu=True)
    reasons = list(problems)
    if _default_group() is not None:
        _up = _adopt(facts, device, use_cpu)
    elif facts.world_size > 1 or alone:
        try:
            frozen_limit_s()
            waiting_limit_s()
            facts = detect_env(variables, use_cpu=use_cpu, device=device)
        except ConfigError as error:
            # Not raised yet: the others are on their way to the rendezvous and must learn of it.
            reasons += error.problems
        set_collective_limit(timeout_s)
        _up = _create(facts, backend, rendezvous_s, variables, reasons)
    elif reasons:
        raise ConfigError(reasons)
    else:
        return _context(detect_env(variables, use_cpu=use_cpu, device=device), None)
    return _up.context


def cleanup_distributed(context: DistributedContext | None = None) -> None:
    """Leave the group: wait for the others, end the watch, take the group down.

    After a failure nobody is waited for, and a group that cannot be taken down is left to the end
    of the process. Without a group nothing happens.
    """
    global _up
    up, _up = _up, None
    if up is None:
        return
    error = sys.exc_info()[1]
    failed = error is not None or _has_failed(up)
    if up.watch is not None:
        _tell_others(up.watch, error)
        failed = failed or not _leave_together(up)
        up.watch.wait_until_known()
        up.watch.stop(ended_well=not failed)
    if up.own_group and _default_group() is up.group:
        _destroy(failed)


def host_group() -> ProcessGroup:
    """The gloo group over all ranks for messages of the host; the first call is collective."""
    global _up
    from torch import distributed

    group = _default_group()
    if group is None:
        raise RuntimeError("there is no process group; call init_distributed() first")
    if _up is None or not _is_current(_up):
        _up = _Up(_context(detect_env(use_cpu=True), None), group, None, own_group=False)
    if _up.host is None:
        _up.host = (
            group
            if _backend_name(group) == "gloo"
            else distributed.new_group(backend="gloo", timeout=collective_limit())
        )
    made: ProcessGroup = _up.host
    return made


def current_context() -> DistributedContext | None:
    """The context of the group that is up, if there is one."""
    return _up.context if _up is not None and _is_current(_up) else None


def current_watch() -> Watch | None:
    """The watch of the group that is up, if there is one."""
    return _up.watch if _up is not None else None


# -- coming up ------------------------------------------------------------------------------


def _create(
    facts: DistributedEnv,
    backend: str | None,
    rendezvous_s: float,
    variables: Mapping[str, str],
    problems: list[str],
) -> _Up:
    import torch
    from torch import distributed
    from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]

    on_cuda = facts.device.startswith("cuda")
    chosen = backend or ("cpu:gloo,cuda:nccl" if on_cuda else "gloo")
    problems = problems or _check_backend(chosen, on_cuda)
    endpoint = _endpoint(variables, facts)
    store: Any = None
    if endpoint is None:
        store = HashStore()
    else:
        store = connect(endpoint, facts.rank, rendezvous_s)
    card = _card(facts.device) if "nccl" in chosen and not problems else ""
    greeting = _greet(facts, problems, card)
    name, said = meet(store, facts.rank, facts.world_size, greeting, rendezvous_s)
    _check_greetings(said)
    if on_cuda:
        torch.cuda.set_device(torch.device(facts.device))
    prefixed = PrefixStore(f"headway/{name}/group", store)
    distributed.init_process_group(
        chosen,
        store=prefixed,
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=collective_limit(),
    )
    up = _Up(_context(facts, chosen), _default_group(), None, own_group=True)
    if endpoint is not None and facts.world_size > 1:
        members = [ProcessIdentity.from_json(greeting["process"]) for greeting in said]
        up.watch = _start_watch(endpoint, facts.rank, f"headway/{name}/watch", members)
    global _up
    _up = up
    host_group()
    return up


def _adopt(facts: DistributedEnv, device: str | None, use_cpu: bool) -> _Up:
    """Watch over a group that someone else made."""
    from torch import distributed

    group = _default_group()
    backend = _backend_name(group)
    facts = detect_env(use_cpu=use_cpu or "nccl" not in backend, device=device)
    facts = replace(facts, rank=distributed.get_rank(), world_size=distributed.get_world_size())
    up = _Up(_context(facts, backend), group, None, own_group=False)
    global _up
    _up = up
    host = host_group()
    if facts.world_size == 1:
        return up
    endpoint = _endpoint_of_default_store()
    greetings = agreement.exchange(
        {**_greet(facts, [], ""), "endpoint": endpoint is not None, "name": os.urandom(8).hex()},
        host,
    )
    _check_greetings(greetings)
    if endpoint is not None and all(greeting["endpoint"] for greeting in greetings):
        members = [ProcessIdentity.from_json(greeting["process"]) for greeting in greetings]
        name = greetings[0]["name"]
        up.watch = _start_watch(endpoint, facts.rank, f"headway/{name}/watch", members)
    return up


def _start_watch(
    endpoint: Endpoint, rank: int, prefix: str, members: list[ProcessIdentity]
) -> Watch:
    from torch import distributed
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    # Its own connection: a call that waits would hold up the other users of a shared one.
    store = PrefixStore(prefix, connect(endpoint, rank, 60.0))
    watch = Watch(
        store,
        rank,
        members,
        keeper=f"{endpoint.keeper} at {endpoint}",
        keeper_rank=None if endpoint.in_launcher else 0,
    )
    watch.announce()
    # Signs of life are read with a call that waits for those that are not there yet.
    distributed.barrier(group=host_group())
    watch.start()
    # Before the interpreter is taken down: a thread inside the store's code would abort it.
    at_exit = functools.partial(_stop_at_exit, watch, os.getpid(), _errors_in_flight())
    atexit.register(at_exit)
    if multiprocessing.parent_process() is not None:
        # A child that multiprocessing forked ends without what atexit has.
        Finalize(None, at_exit, exitpriority=0)
    return watch


def _stop_at_exit(watch: Watch, pid: int, earlier: Sequence[BaseException]) -> None:
    if os.getpid() != pid:
        return
    error = _fatal_error(earlier)
    _tell_others(watch, error)
    if error is None:
        watch.take_leave()
    watch.wait_until_known()
    watch.stop(ended_well=error is None)


def _errors_in_flight() -> list[BaseException]:
    found = (getattr(sys, "last_value", None), sys.exc_info()[1])
    return [error for error in found if error is not None]


def _fatal_error(earlier: Sequence[BaseException]) -> BaseException | None:
    """The exception that ends this process, if one does; what was there `earlier` does not."""
    new = [error for error in _errors_in_flight() if not any(error is one for one in earlier)]
    error = new[0] if new else None
    if isinstance(error, SystemExit):
        # torch.multiprocessing makes an exit of what a function raises.
        return (error.__context__ or error) if error.code else None
    return error


def versions() -> dict[str, str]:
    """What must be the same on all ranks, by name."""
    import torch

    python = ".".join(platform.python_version_tuple()[:2])
    return {"headway": __version__, "torch": torch.__version__, "Python": python}


def _tell_others(watch: Watch, error: BaseException | None) -> None:
    """Report an error that nobody guarded against."""
    from headway.dist.failure import PeerFailure

    if error is None or watch.failure is not None:
        return
    if isinstance(error, PeerFailure):
        # Learned from the other rank itself, whose own report may still be on its way.
        watch.report(Failure(error.rank, error.reason, error.kind))
        return
    first_line = f"{type(error).__name__}: {error}".partition("\n")[0]
    watch.report(Failure(watch.rank, first_line, "error"))


def _greet(facts: DistributedEnv, problems: list[str], card: str) -> dict[str, Any]:
    compared = {f"version of {name}": found for name, found in versions().items()}
    return {
        "process": asdict(identify()),
        "problems": problems,
        "card": card,
        "compared": {"WORLD_SIZE": str(facts.world_size), **compared},
    }


def _check_greetings(said: list[dict[str, Any]]) -> None:
    """Refuse, with the same words on every rank, what cannot train together."""
    held: dict[str, list[int]] = {}
    for rank, greeting in enumerate(said):
        for problem in greeting["problems"]:
            held.setdefault(problem, []).append(rank)
    problems = [
        problem if len(ranks) == len(said) else f"{problem} ({agreement.spell_ranks(ranks)})"
        for problem, ranks in held.items()
    ]
    problems += agreement.find_differences([greeting["compared"] for greeting in said])
    cards: dict[str, list[int]] = {}
    for rank, greeting in enumerate(said):
        if greeting["card"]:
            cards.setdefault(f"{greeting['process']['host']} {greeting['card']}", []).append(rank)
    shared = [ranks for ranks in cards.values() if len(ranks) > 1]
    if shared:
        problems.append(
            f"--nproc: fewer GPUs than ranks: {agreement.spell_ranks(shared[0])} would share one "
            f"card, which NCCL cannot; start at most {len(cards)} in all, or set args.use_cpu"
        )
    if problems:
        raise agreement.CommonMistake(problems)


def _check_backend(backend: str, on_cuda: bool) -> list[str]:
    from torch import distributed

    names = [part.rpartition(":")[2] for part in backend.split(",")]
    problems = [
        f"backend: {name!r} is not built into this torch; allowed: gloo, nccl"
        for name in names
        if not distributed.is_backend_available(name)
    ]
    if "nccl" in names and not on_cuda and not problems:
        problems.append(f"backend: {backend!r} needs a CUDA device, and this rank is on the CPU")
    return problems


def _card(device: str) -> str:
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "uuid", "")) or device


def _endpoint(variables: Mapping[str, str], facts: DistributedEnv) -> Endpoint | None:
    if facts.world_size == 1 and not variables.get("MASTER_ADDR"):
        return None
    return find_endpoint(variables)


def _endpoint_of_default_store() -> Endpoint | None:
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if not isinstance(store, TCPStore):
        return None
    in_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Endpoint(store.host, store.port, in_launcher)


def _context(facts: DistributedEnv, backend: str | None) -> DistributedContext:
    return DistributedContext(
        facts.rank,
        facts.world_size,
        facts.local_rank,
        facts.local_world_size,
        facts.node_rank,
        backend,
        facts.device,
    )


# -- going down -----------------------------------------------------------------------------


def _leave_together(up: _Up) -> bool:
    """Whether all ranks came to the end; the watch ends it when one of them never does."""
    assert up.watch is not None
    from torch import distributed

    try:
        distributed.barrier(group=up.host)
        # Only when nobody misses anybody any more may the first process go.
        up.watch.leave()
        distributed.barrier(group=up.host)
    except RuntimeError:
        return False
    return True


def _has_failed(up: _Up) -> bool:
    return up.watch is not None and up.watch.failure is not None


def _destroy(failed: bool) -> None:
    from torch import distributed

    if not failed:
        distributed.destroy_process_group()
        return
    # With a rank gone this can wait for ever, or for the backend's own limit.
    _within(_LEAVING_S / 2, distributed.destroy_process_group)


def _within(limit_s: float, act: Callable[[], None]) -> None:
    def attempt() -> None:
        try:
            act()
        except RuntimeError:
            pass  # a group in ruins; the process ends soon

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(limit_s)


def _default_group() -> Any:
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed.group.WORLD


def _is_current(up: _Up) -> bool:
    return _default_group() is up.group


def _backend_name(group: Any) -> str:
    """'gloo' where every kind of device has it, else which kind has which."""
    from torch.distributed.distributed_c10d import _world

    config = str(_world.pg_backend_config.get(group, ""))
    names = {part.rpartition(":")[2] for part in config.split(",")}
    return names.pop() if len(names) == 1 else config
