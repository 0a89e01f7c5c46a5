"""Training one model together with others that are far away.

Owns: a worker's options and where they come from, and which events it acts at. Does not own: the
exchange (diloco/).
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.callbacks.diloco.environment import choose
from headway.callbacks.save.averages import refuse_strategy
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from headway.diloco.worker import DiLoCoWorker
    from headway.engine.state import TrainerState

logger = logging.getLogger(__name__)

_SESSION_FILE = "diloco-session.json"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class DiLoCoCallback(TrainerCallback):
    """Makes a run one of several workers that a DiLoCo server joins.

    What is not given comes from the environment (`DILOCO_SERVER`, `DILOCO_SYNC_EVERY` and so on),
    else it is the default. Without an address it is not active; an empty one, given here, switches
    it off whatever the environment says. A server that cannot be reached, or that refuses this
    worker, ends the run before its first step.

    `comm` (float32, bf16, int8) is what pseudo-gradients travel as; `bf16_comm` is the short form.
    With `bf16_fetch` the new parameters come back as bfloat16 too.
    The token of this worker is in `token_file`, or in the environment as `DILOCO_TOKEN`.
    """

    priority = 10  # averages, checkpoints and records of a step are of what it leaves

    def __init__(
        self,
        server_addr: str | None = None,
        sync_every: int | None = None,
        worker_id: str | None = None,
        bf16_comm: bool | None = None,
        dylu: bool | None = None,
        heartbeat_interval: float | None = None,
        num_fragments: int | None = None,
        timeout: float = 600.0,
        max_sync_retries: int = 3,
        comm: str | None = None,
        overlap_steps: int | None = None,
        merge_alpha: float = 1.0,
        token_file: str | None = None,
        tls_ca: str | None = None,
        first_retry_s: float = 2.0,
        bf16_fetch: bool | None = None,
    ) -> None:
        from headway.diloco.options import WorkerOptions

        try:
            _require_text("server_addr", server_addr)
            self.server_addr = str(choose(server_addr, "DILOCO_SERVER", "")).strip()
            bf16 = choose(bf16_comm, "DILOCO_BF16_COMM", True)
            if not isinstance(bf16, bool):
                raise ConfigError(f"bf16_comm: {bf16!r} given; allowed: true or false")
            self.comm = choose(comm, "DILOCO_COMM", "bf16" if bf16 else "float32")
            self.options = WorkerOptions(
                sync_every=choose(sync_every, "DILOCO_SYNC_EVERY", 500),
                num_fragments=choose(num_fragments, "DILOCO_NUM_FRAGMENTS", 1),
                comm=self.comm,
                bf16_fetch=choose(bf16_fetch, "DILOCO_BF16_FETCH", False),
                dylu=choose(dylu, "DILOCO_DYLU", False),
                heartbeat_interval=choose(heartbeat_interval, "DILOCO_HEARTBEAT_INTERVAL", 30.0),
                timeout=timeout,
                max_sync_retries=max_sync_retries,
                overlap_steps=overlap_steps,
                merge_alpha=merge_alpha,
            )
            for option, text in (
                ("worker_id", worker_id),
                ("token_file", token_file),
                ("tls_ca", tls_ca),
            ):
                _require_text(option, text)
            self.worker_id: str = choose(worker_id, "DILOCO_WORKER_ID", "")
            if self.worker_id and not _ID.fullmatch(self.worker_id):
                raise ConfigError(
                    f"worker_id: {self.worker_id!r} given; allowed: up to 64 letters, digits, '.', "
                    "'_' and '-', the first a letter or a digit"
                )
            is_number = isinstance(first_retry_s, int | float)
            if not is_number or isinstance(first_retry_s, bool) or not 0 < first_retry_s <= 60:
                raise ConfigError(
                    f"first_retry_s: {first_retry_s!r} given; allowed: up to 60, above 0"
                )
            if self.server_addr:
                from headway.diloco.client import parse_address

                parse_address(self.server_addr)
        except ConfigError as error:
            raise ConfigError([f"DiLoCoCallback: {text}" for text in error.problems]) from None
        self.token_file = choose(token_file, "DILOCO_TOKEN_FILE", "")
        self.tls_ca = choose(tls_ca, "DILOCO_TLS_CA", "")
        self.first_retry_s = first_retry_s
        self.max_parameter_slots = int(self.active) * (2 if self.comm == "int8" else 1)
        self._worker: DiLoCoWorker | None = None
        self._pending: dict[str, Any] = {}
        """State of a checkpoint that no worker has taken yet."""
        self._pending_slots: dict[str, dict[str, Tensor]] = {}
        self._restored = self._must_rejoin = False

    parameter_state_on_host = True

    @property
    def active(self) -> bool:
        """Whether there is a server to work with."""
        return bool(self.server_addr)

    @property
    def worker(self) -> DiLoCoWorker | None:
        """The worker while a run goes on."""
        return self._worker

    # -- events -----------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, trainer: Any) -> None:
        self._require_same(trainer)
        if not self.active:
            if state.is_world_process_zero:
                logger.info(
                    "DiLoCoCallback: not active, as no server_addr (DILOCO_SERVER) is given; this "
                    "run trains alone"
                )
            return
        refuse_strategy("DiLoCoCallback", trainer)
        self._worker = self._make_worker(args, trainer)
        if self._pending_slots:
            self._worker.load_parameter_state(self._pending_slots)
        try:
            self._worker.start(self._pending or None, state.global_step)
        except BaseException:
            self._close()
            raise
        self._pending, self._pending_slots, self._must_rejoin = {}, {}, False
        left = state.max_steps - state.global_step
        if state.is_world_process_zero and 0 < left < self._worker.steps_to_turn:
            logger.warning(
                "DiLoCoCallback: this run ends after %d more steps and exchanges nothing: its next "
                "turn is in %d (sync_every=%d)",
                left,
                self._worker.steps_to_turn,
                self._worker.sync_every,
            )

    def on_load(self) -> None:
        """A checkpoint was loaded; one without state of this callback leaves none behind."""
        if not self._restored:
            self._pending, self._pending_slots = {}, {}
        self._restored, self._must_rejoin = False, self._worker is not None

    def on_step_begin(self, state: TrainerState) -> None:
        if self._must_rejoin and self._worker is not None:
            self._must_rejoin = False
            self._worker.load_parameter_state(self._pending_slots)
            self._worker.rejoin(self._pending, state.global_step)
            self._pending, self._pending_slots = {}, {}

    def on_step_end(self, state: TrainerState, trainer: Any) -> None:
        if self._worker is None:
            return
        last = 0 < state.max_steps <= state.global_step
        if self._worker.after_step(state.global_step, last=last):
            for name, value in self._worker.sync_metrics.items():
                trainer.record_metric(name, float(value), None, None, "latest")

    def on_log_step(self, logs: dict[str, Any]) -> None:
        if self._worker is not None:
            logs.update(self._worker.sync_metrics)

    def on_train_end(self) -> None:
        self._close()

    def on_close(self) -> None:
        """Also after an error: the server is not left waiting for this worker."""
        self._close()

    def _close(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            self._pending = worker.state_dict()
            worker.stop()

    # -- the worker -------------------------------------------------------------------------

    def _require_same(self, trainer: Any) -> None:
        """Variables of the environment may differ between ranks, which would then wait for ever."""
        if trainer.env.world_size > 1:
            from headway.dist.agreement import require_equal

            facts = {"server_addr": self.server_addr, **vars(self.options)}
            require_equal({"DiLoCoCallback": json.dumps(facts)})

    def _make_worker(self, args: Any, trainer: Any) -> DiLoCoWorker:
        from headway.checkpoint.distributed import DistributedRanks
        from headway.checkpoint.ranks import SoloRanks
        from headway.diloco.client import DiLoCoClient
        from headway.diloco.parameters import ParameterView
        from headway.diloco.worker import DiLoCoWorker

        strategy = trainer.strategy
        several = trainer.env.world_size > 1
        options = self.options
        # The leader may wait for other workers, and for a server, as long as this in all.
        limit_s = 2 * options.timeout * (options.max_sync_retries + 2) + 600
        ranks = DistributedRanks(timeout_s=limit_s) if several else SoloRanks()
        worker_id = ranks.share(self.worker_id or self._pending.get("worker_id") or _make_id())
        return DiLoCoWorker(
            ParameterView(strategy.unwrap(), ranks, lambda: _call(strategy.before_apply)),
            DiLoCoClient(
                self.server_addr,
                self._read_token(worker_id) if ranks.is_main else None,
                tls_ca=self.tls_ca or None,
                timeout_s=options.timeout,
                bf16_fetch=options.bf16_fetch,
            ),
            options,
            worker_id=worker_id,
            group={"world_size": trainer.env.world_size, "strategy": strategy.name},
            should_end=lambda: trainer.asked_to_end,
            session_file=Path(args.output_dir, _SESSION_FILE),
            first_pause_s=self.first_retry_s,
        )

    def _read_token(self, worker_id: str) -> str | None:
        """This worker's own token, or the one of all."""
        if not self.token_file:
            return choose(None, "DILOCO_TOKEN", "") or None
        from headway.diloco.credentials import read_tokens

        try:
            tokens = read_tokens(self.token_file)
        except ConfigError as error:
            raise ConfigError([f"DiLoCoCallback: {text}" for text in error.problems]) from None
        found = tokens.workers.get(worker_id, tokens.join)
        if found is None:
            raise ConfigError(
                f"DiLoCoCallback: token_file: {self.token_file!r} has a token neither for "
                f"{worker_id!r} nor for all workers"
            )
        return found

    # -- checkpoints ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        if self._worker is not None:
            return self._worker.state_dict()
        return {"version": 1, **self._pending}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Kept until the worker begins: a checkpoint is loaded before that."""
        self._pending = dict(state) if "worker_id" in state else {}
        self._restored = True

    def parameter_state(self) -> dict[str, dict[str, Tensor]]:
        """What the interval began from, for checkpoints."""
        if self._worker is None or self._must_rejoin:
            return self._pending_slots
        return self._worker.parameter_state()

    def load_parameter_state(self, slots: dict[str, dict[str, Tensor]]) -> None:
        self._pending_slots = dict(slots) if self.active else {}


def _require_text(option: str, given: Any) -> None:
    if given is not None and not isinstance(given, str):
        raise ConfigError(f"{option}: {given!r} given; allowed: text")


def _call(act: Any) -> None:
    if act is not None:
        act()


def _make_id() -> str:
    host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname())[:40]
    return f"worker_{host}_{secrets.token_hex(4)}"
