"""Control of a running job over HTTP: the callback that joins a run to the control plane.

Owns: the options, when the server and the job's files come and go, and which events are shown.
Does not own: the server, its rules and its files (control/), how commands reach all ranks
(engine/commands.py), what they do (acts.py), what is shown (publishing.py).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import ssl
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.callbacks.control.acts import Acts
from headway.callbacks.control.publishing import IncidentHandler, Publisher
from headway.callbacks.control.receipts import Desk
from headway.callbacks.watch.ranges import require_count, require_flag, require_name
from headway.control.discovery import (
    Registration,
    UnusableFolder,
    check_job_id,
    clean_stale,
    new_job_id,
)
from headway.control.inbox import Inbox
from headway.control.security import check_token, is_loopback, new_token
from headway.control.status import StatusBoard
from headway.dist import agreement
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.control.server import ControlServer

logger = logging.getLogger(__name__)

_LAST_PORT = 65535
_STOP_S = 5.0


class TrainerControlCallback(TrainerCallback):
    """Lets a run be watched and steered while it goes on: `headway jobs`, `headway job`, `Client`,
    a browser.

    World rank 0 serves HTTP from a thread of its own, from before the first step to the end of the
    run. Commands take effect on all ranks after the same step, the one under way when they come.
    Those are graceful_stop, save_checkpoint, save_and_stop, abort, pause (with `offload`: weights
    and optimizer state on the host meanwhile), resume, evaluate_now, generate_now,
    set_learning_rate, set_log_level, profile_next_steps, extend_max_steps and status. A receipt
    says what became of each one: `applied`, `refused` (the run cannot do it) or `failed`, and after
    which step. `extend_max_steps` draws a schedule that was planned over the run's length anew over
    the new one, with the warm-up it had; schedules of the user's own making stay as they are.

    `job_id`: by what the job is found; None: the run's name, if it has one, and something random.
    `port`: None or 0 for any that is free. `host`: where to listen, None for 127.0.0.1; other
    machines reach only what is not a loopback address, and never without a token. `unix_socket`: a
    path to listen at instead of a port. `enable_http`: None for whether aiohttp is installed;
    without it, and with False, the run goes on without a server. `auth_token`: what those who may
    send commands send along, `read_token`: those who may only look; None for 256 random bits each,
    in files that only this user can read. `disable_auth`: no tokens. `extra_hosts`: names, with the
    port, under which a proxy passes requests on. `tls_certificate` and `tls_key`: PEM files.
    `dashboard`: serve its pages too.

    A server that cannot start (the port is in use) is told and the run goes on without.
    """

    priority = -100  # it shows what others made of an event, and closes after them
    failure_policy = "disable"

    def __init__(
        self,
        job_id: str | None = None,
        port: int | None = None,
        enable_http: bool | None = None,
        host: str | None = None,
        auth_token: str | None = None,
        disable_auth: bool = False,
        *,
        unix_socket: str | None = None,
        read_token: str | None = None,
        extra_hosts: Sequence[str] = (),
        tls_certificate: str | None = None,
        tls_key: str | None = None,
        dashboard: bool = True,
    ) -> None:
        if job_id is not None:
            check_job_id(job_id)
        require_count("port", port, optional=True)
        if port is not None and port > _LAST_PORT:
            raise ConfigError(
                f"port: {port!r} given; allowed: 0 (any that is free) to {_LAST_PORT}, or none"
            )
        if enable_http is not None:
            require_flag("enable_http", enable_http)
        require_flag("disable_auth", disable_auth)
        require_flag("dashboard", dashboard)
        for option, value in (("host", host), ("unix_socket", unix_socket)):
            if value is not None:
                require_name(option, value)
        self._check_place(host, port, unix_socket, disable_auth)
        self._check_tokens(auth_token, read_token, disable_auth)
        hosts: Any = extra_hosts
        is_list = isinstance(hosts, Collection) and not isinstance(hosts, str)
        if not is_list or not all(isinstance(host, str) and host for host in hosts):
            raise ConfigError(f"extra_hosts: {extra_hosts!r} given; allowed: a list of host names")
        self._check_tls(tls_certificate, tls_key)
        self.job_id, self.port, self.host = job_id, port, host or "127.0.0.1"
        self.enable_http = enable_http
        self.unix_socket, self.disable_auth = unix_socket, disable_auth
        self.extra_hosts = frozenset(extra_hosts)
        self.tls_certificate, self.tls_key = tls_certificate, tls_key
        self.dashboard = dashboard
        self._given_tokens = {"control": auth_token, "read": read_token}
        self.board: StatusBoard | None = None
        """What the run shows; on rank 0 while it serves."""
        self.inbox: Inbox | None = None
        self.server: ControlServer | None = None
        self._registration_files: Registration | None = None
        self._publisher: Publisher | None = None
        self._handler: logging.Handler | None = None
        self._acts: Acts | None = None
        self._desk: Desk | None = None
        self._trainer: Any = None
        self._ended_step = 0

    @staticmethod
    def _check_place(
        host: str | None, port: int | None, unix_socket: str | None, disable_auth: bool
    ) -> None:
        if unix_socket is not None and (host is not None or port is not None):
            raise ConfigError(
                f"unix_socket={unix_socket!r}: given with host={host!r} and port={port!r}; "
                "allowed: one place to listen at"
            )
        if disable_auth and host is not None and not is_loopback(host):
            raise ConfigError(
                f"disable_auth=True with host={host!r}: other machines could steer the run; "
                "allowed: a token, or a loopback address such as 127.0.0.1"
            )

    @staticmethod
    def _check_tokens(auth_token: Any, read_token: Any, disable_auth: bool) -> None:
        for option, token in (("auth_token", auth_token), ("read_token", read_token)):
            if token is None:
                continue
            # What was given is a secret, and not shown.
            if (trouble := check_token(token)) is not None:
                raise ConfigError(f"{option}: {trouble}")
            if disable_auth:
                raise ConfigError(f"{option}: given with disable_auth=True; allowed: one of them")
        if auth_token is not None and auth_token == read_token:
            raise ConfigError("read_token: the same as auth_token, and so no less than it")

    @staticmethod
    def _check_tls(certificate: str | None, key: str | None) -> None:
        if (certificate is None) != (key is None):
            raise ConfigError("tls_certificate and tls_key: one given; allowed: both, or none")
        for option, path in (("tls_certificate", certificate), ("tls_key", key)):
            if path is not None and not Path(path).is_file():
                raise ConfigError(f"{option}: {path!r} given; allowed: a file that is there")

    # The run

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        self._trainer = trainer
        _, name = self._registration()
        if state.is_world_process_zero and self._wants_http():
            self._serve(args, trainer)
        self._acts = Acts(trainer, name)
        exchange: Callable[[Any], list[Any]] = agreement.exchange if args.world_size > 1 else _alone
        self._desk = Desk(self._acts, state, exchange, self.inbox, self.board)
        self._ended_step = state.global_step
        trainer.commands.attach(self.inbox, self._take, self._look_at_step, self._note_held)

    def _wants_http(self) -> bool:
        if self.enable_http is False:
            return False
        is_there = importlib.util.find_spec("aiohttp") is not None
        if not is_there and self.enable_http:
            logger.warning(
                "TrainerControlCallback: enable_http=True needs aiohttp (pip install "
                "'headway[control]'); the run goes on without a server"
            )
        elif not is_there:
            logger.info("TrainerControlCallback: aiohttp is not installed, so nothing is served")
        return is_there

    def _serve(self, args: Any, trainer: Any) -> None:
        """Have the run found and served; what is no mistake of the user's costs only that."""
        job_id = self.job_id or new_job_id(getattr(args, "run_name", None))
        self.board, self.inbox = StatusBoard(job_id), Inbox()
        self._publisher = Publisher(self.board, trainer)
        self._publisher.begin()
        try:
            clean_stale()
            self._start_server(args, job_id)
        except (OSError, RuntimeError, UnusableFolder) as error:
            logger.error("the run cannot be controlled from outside, and goes on: %s", error)
            self._end_server()
            self.board = self.inbox = self._publisher = None
            return
        trainer.timing.on_change = self._publisher.change_phase
        self._handler = IncidentHandler(self._publisher)
        logging.getLogger("headway").addHandler(self._handler)

    def _start_server(self, args: Any, job_id: str) -> None:
        from headway import __version__
        from headway.control.server import ControlServer

        assert self.board is not None and self.inbox is not None
        tokens = {role: given or new_token() for role, given in self._given_tokens.items()}
        if self.disable_auth:
            tokens = {}
            logger.warning("disable_auth=True: every process of this machine can steer the run")
        if self.unix_socket is None and not is_loopback(self.host):
            logger.warning(
                "host=%r: other machines can reach the control of this run%s",
                self.host,
                "" if self.tls_certificate else ", and tokens travel unencrypted",
            )
        files = self._registration_files = Registration(job_id)
        files.write_tokens(tokens)
        self.server = ControlServer(
            self.board,
            self.inbox,
            nonce=files.nonce,
            tokens=tokens,
            version=__version__,
            host=self.host,
            port=self.port or 0,
            unix_socket=self.unix_socket,
            extra_hosts=self.extra_hosts,
            tls=self._make_tls(),
            add_routes=self._mount(args) if self.dashboard else None,
        )
        try:
            self.server.start()
        except ConfigError as error:  # a job that is started again may find its port taken
            raise RuntimeError(str(error)) from error
        files.write_endpoint(
            self.host,
            self.server.port,
            None if self.unix_socket is None else os.path.abspath(self.unix_socket),
            output_dir=str(args.output_dir),
            logging_dir=None if args.logging_dir is None else str(args.logging_dir),
            run_name=getattr(args, "run_name", None),
            version=__version__,
            tls_certificate=self.tls_certificate,
        )
        logger.info("job %s: %s", job_id, self.url)

    @property
    def url(self) -> str | None:
        """Where the run is served; None while it is not."""
        server = self.server
        if server is None or self.board is None:
            return None
        if self.unix_socket is not None:
            return f"unix:{self.unix_socket}"
        if server.port is None:
            return None
        scheme = "http" if self.tls_certificate is None else "https"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{server.port}/jobs/{self.board.job_id}"

    def _make_tls(self) -> ssl.SSLContext | None:
        if self.tls_certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.tls_certificate, self.tls_key)
        except ssl.SSLError as error:
            raise ConfigError(
                f"tls_certificate={self.tls_certificate!r}, tls_key={self.tls_key!r}: {error}"
            ) from None
        return context

    def _mount(self, args: Any) -> Any:
        """What adds the pages of the dashboard to the server; None where they cannot be served."""
        try:
            from headway.control.dashboard.mounted import mount
        except ImportError as error:
            logger.info("the run's server has no dashboard: %s", error)
            return None
        board, inbox = self.board, self.inbox
        assert board is not None and inbox is not None
        output_dir, logging_dir = str(args.output_dir), args.logging_dir

        def add(server: ControlServer) -> None:
            try:
                mount(server, board, inbox, output_dir, logging_dir)
            except ConfigError as error:  # plotly is not installed
                logger.info("the run's server has no dashboard: %s", error)

        return add

    # What is shown, and what commands wait for

    def _take(self, messages: list[dict[str, Any]], deaf: list[int]) -> None:
        """Commands, for all ranks."""
        assert self._desk is not None and self._trainer is not None
        self._desk.take(messages, deaf)
        if self._publisher is not None:  # held, or not held any more
            self._publisher.change_phase(self._trainer.timing.doing)

    def _note_held(self, trouble: str | None) -> None:
        """The run waits; `trouble` says why its state is not on the host, where it should be."""
        assert self._desk is not None and self._trainer is not None
        if self._publisher is not None:
            self._publisher.change_phase(self._trainer.timing.doing)
        self._desk.note_held(trouble)

    def _look_at_step(self) -> None:
        """A step has ended, or a pause of the run goes on."""
        if self._publisher is not None:
            self._publisher.end_step()
        acts, desk = self._acts, self._desk
        assert acts is not None and desk is not None and self._trainer is not None
        before, self._ended_step = self._ended_step, self._trainer.state.global_step
        if acts.profiler is not None and self._ended_step != before:
            acts.end_step()
        if desk.has_open:
            desk.note_step(self._trainer.last_save_step)

    def on_epoch_begin(self) -> None:
        if self._publisher is not None:
            self._publisher.change_phase(None)

    def on_log(self, logs: Mapping[str, Any]) -> None:
        if self._publisher is not None:
            self._publisher.log(logs)

    def on_evaluate(self, metrics: Mapping[str, Any]) -> None:
        if self._publisher is not None:
            self._publisher.evaluate(metrics)
        if self._desk is not None:
            numbers = {key: value for key, value in metrics.items() if isinstance(value, float)}
            self._desk.note_evaluation(json.dumps(numbers))

    def on_save(self, step: int, checkpoint_path: str) -> None:
        if self._publisher is not None:
            self._publisher.save(step, str(checkpoint_path))
        if self._desk is not None:
            self._desk.note_save(step, str(checkpoint_path))

    def on_load(self, state: TrainerState, path: str) -> None:
        if self._publisher is not None:
            self._publisher.load(state.global_step, str(path))

    def on_error(self, exception: BaseException) -> None:
        if self._publisher is not None:
            self._publisher.fail(exception)
        if self._desk is not None:
            self._desk.fail(exception)

    def on_close(self, state: TrainerState) -> None:
        if self._trainer is not None:
            self._trainer.commands.detach()
            self._trainer.timing.on_change = None
        if self._acts is not None:
            self._acts.end()
        if self._desk is not None:
            self._desk.end(f"the run has ended ({state.outcome}) after step {state.global_step}")
        if self._handler is not None:
            logging.getLogger("headway").removeHandler(self._handler)
        if self._publisher is not None:
            self._publisher.end()
        self._end_server()
        self._trainer = self._acts = self._desk = self._handler = self._publisher = None

    def _end_server(self) -> None:
        files, self._registration_files = self._registration_files, None
        if files is not None:
            try:
                files.remove()
            except OSError as error:
                logger.warning("%s is left behind: %s", files.folder, error)
        server, self.server = self.server, None
        if server is not None:
            self.wait_at_close(server.stop, _STOP_S)


def _alone(value: Any) -> list[Any]:
    return [value]
