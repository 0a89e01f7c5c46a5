"""The training loop: the only place that steps, logs, evaluates, saves, rolls back and stops.

Callbacks raise flags on the control; the loop reads them at the end of a step, after all ranks
agreed. Devices belong to the strategy, cadence to the triggers, bytes to the checkpoint room.
"""

from __future__ import annotations

import logging
import signal
import time

import torch

from headway.dist.agreement import exchange
from headway.dist.forced_end import at_forced_end
from headway.engine.best import evaluation_of_step, update_best
from headway.engine.delivery import MetricDelivery
from headway.engine.flushing import Flusher
from headway.engine.last_metrics import dump_last_metrics
from headway.engine.lifetimes import (
    ANY_SAVE,
    LASTING_SAVE,
    PERMANENT_SAVE,
    REGULAR_SAVE,
    save_bits,
    strongest,
)
from headway.engine.parts import LoopParts
from headway.engine.rescue import LastStep, rescue
from headway.engine.rollback import RollbackRequest
from headway.engine.signals import SignalRequests
from headway.engine.step import Stepper
from headway.engine.triggers import Clock
from headway.errors import ConfigError

logger = logging.getLogger(__name__)

(
    _LOG, _EVALUATE, _STOP, _ABORT, _ROLLBACK, _SKIP_DATA, _END_EPOCH, _SAVED, _DONE,
    _INTERRUPT, _SIGINT, _SIGTERM, _CANCEL, _OPERATION, _COMMAND,
) = (1 << n for n in range(15))  # fmt: skip
_BY_SIGNAL = {signal.SIGINT: _SIGINT, signal.SIGTERM: _SIGTERM}


class TrainingLoop:
    """Runs one training from the state it is given to the end of its length."""

    def __init__(self, parts: LoopParts, signals: SignalRequests) -> None:
        self.parts = parts
        self.signals = signals
        self.stopped = False
        self.aborted = False
        self.interrupted_by: str | None = None
        """What stopped it from outside before its length was done: a signal, or `stop_at`."""
        self.delivery = MetricDelivery(
            parts.args, parts.state, parts.bus, Flusher(parts.metrics, parts.channel)
        )
        self._clock = Clock(
            time.monotonic(),
            parts.state.train_seconds,
            stands=not parts.state.is_world_process_zero,
        )
        self._done, self._saved_step = False, -1
        self._owes_save = False
        """Whether this step is to be saved once it is logged and evaluated."""
        self._last_metrics = evaluation_of_step(parts.state, parts.args)  # if it is resumed
        self._evaluated_step = parts.state.global_step if self._last_metrics else -1
        self.stepped = False
        self._last_step = LastStep(parts.loader, parts.bus, active=parts.args.save_on_error)
        self.stepper = Stepper(parts, self._last_step)
        self._settles = False
        self._logs, self._evaluates = parts.log_trigger.active, parts.eval_trigger.active
        self.saves_at_end = parts.save_trigger.active or parts.checkpointed
        """Whether the end of the run is saved, also where it comes early."""

    def run(self) -> None:
        """Train until the length is done or a stop is asked for."""
        self.parts.bus.fire("on_start_settled")
        self._start()
        self.parts.commands.begin(self.parts.strategy.agree)
        # By all ranks alike, also once a callback is disabled on one: what follows takes them all.
        listens, agree = self.parts.bus.listens, self.parts.strategy.agree
        self._settles = bool(agree(listens("on_step_settled")))
        self.stepper.edits_windows = bool(agree(listens("on_window")))
        if self._done:
            logger.warning(
                "nothing to train: step %d is done and the run's length ends there",
                self.parts.state.global_step,
            )
        try:
            with at_forced_end(self._dump_metrics):
                self._evaluate_at_start()
                self._save_at_start()
                is_over = False
                while not is_over:
                    while not (self._told_to_stop() or self._done):
                        self._epoch()
                    is_over = self.aborted or not self._finish()
        except BaseException as error:
            self._dump_metrics(f"{type(error).__name__}: {error}")
            self.delivery.close(wait=False)
            if isinstance(error, Exception) and not self.aborted:
                seconds = self._clock.of_run(time.monotonic())
                rescue(error, self.parts, self._last_step, seconds, is_due=self._owes_save)
            raise
        finally:
            self.parts.commands.end()

    def close(self) -> None:
        """After the last save was announced: hand out what was recorded since the last flush."""
        self.delivery.flush()
        self.delivery.close()

    @property
    def cut_short(self) -> bool:
        """Whether somebody outside wants it to end, and waits: nothing more than a save then."""
        return self.interrupted_by is not None or self.parts.cancel.agreed

    @property
    def asked_to_end(self) -> bool:
        """Whether this rank is asked to end, by somebody who waits; the others need not be."""
        late = self.parts.length.out_of_time(self._clock, time.monotonic())
        return late or self.cut_short or bool(self._outside_bits())

    @property
    def outcome(self) -> str:
        """How the run ended, in the words of `TrainerState.outcome`."""
        if self.aborted:
            return "aborted"
        if self._done or not self.stopped:
            return "completed"
        if self.parts.cancel.agreed:
            return "canceled"
        return "stopped" if self.interrupted_by is None else "interrupted"

    def _start(self) -> None:
        """Count from where the run stands."""
        p = self.parts
        for trigger in (p.log_trigger, p.eval_trigger, p.save_trigger):
            trigger.start(p.state, p.state.train_seconds)
        self._done = bool(p.strategy.agree(self._length_bits(time.monotonic())) & _DONE)

    def _told_to_stop(self) -> bool:
        """Also where no step was done: in `on_train_begin`, `on_epoch_begin`, or at `stop_at`."""
        control = self.parts.bus.control
        wanted = _STOP * control.should_training_stop | _ABORT * control.should_abort_without_save
        wanted |= self._outside_bits() | self._length_bits(time.monotonic())
        agreed = self.parts.strategy.agree(wanted)
        self._note_stops(agreed)
        self._done = bool(agreed & _DONE)  # the end of a stream may have been that of the run
        return self.stopped

    def _evaluate_at_start(self) -> None:
        p = self.parts
        if p.args.eval_on_start and p.state.global_step == 0 and not self._done:
            self._note_stops(self._evaluate())

    def _save_at_start(self) -> None:
        """A save that was asked for in `on_train_begin`: of the state before the first step."""
        control = self.parts.bus.control
        wanted = self.parts.strategy.agree(save_bits(control))
        control.should_save, control.save_lifetime = False, "regular"
        if wanted and not self._done:
            self.parts.state.train_seconds = self._clock.of_run(time.monotonic())
            self.parts.save_at_start(strongest(wanted))

    def _outside_bits(self) -> int:
        """What asks from outside for an end."""
        bits, stop = _CANCEL * self.parts.cancel.wanted, self.signals.stop_signal
        return bits if stop is None else bits | _INTERRUPT | _BY_SIGNAL[stop]

    def _length_bits(self, now_s: float) -> int:
        p = self.parts
        bits = _DONE * p.length.finished(p.state, self._clock, now_s)
        return bits | _INTERRUPT * p.length.interrupted(p.state, self._clock, now_s)

    def _note_stops(self, agreed: int) -> None:
        self.aborted |= bool(agreed & _ABORT)
        if agreed & _INTERRUPT:
            by = next((s.name for s, bit in _BY_SIGNAL.items() if agreed & bit), "stop_at")
            self.interrupted_by = self.interrupted_by or by
        if agreed & _CANCEL:
            several = self.parts.args.world_size > 1
            self.parts.cancel.agree(exchange if several else lambda own: [own])
        self.stopped |= bool(agreed & (_ABORT | _INTERRUPT | _STOP | _CANCEL))

    def _epoch(self) -> None:
        p = self.parts
        p.bus.control.should_epoch_stop = False
        p.bus.fire("on_epoch_begin")
        if self._told_to_stop():
            return
        first_step, fresh = p.state.global_step, p.loader.position == 0
        self._last_step.leave()
        for window in p.timing.time_fetches(p.strategy.feed(p.loader)):
            self.stepper.take(window)
            if not self.stepped:
                self.stepped = True
                p.on_first_step()
            if self._boundary() or self._settle():
                return  # rolled back: the windows in flight are of another time
            if self.stopped or p.bus.control.should_epoch_stop or self._done:
                break
            self._last_step.leave()
        self._last_step.reach()
        if fresh and p.state.global_step == first_step:
            raise ConfigError(
                "train_dataset: a whole epoch yields no batch "
                f"(per_device_train_batch_size={p.args.per_device_train_batch_size}, "
                f"dataloader_drop_last={p.args.dataloader_drop_last})"
            )
        complete = not self.stopped and not self._done
        if complete or p.loader.at_end or p.bus.control.should_epoch_stop:
            # The position moves on before anything is saved, so that a checkpoint made at the
            # end of an epoch resumes at the start of the next.
            p.state.raw_epoch += 1
            p.state.epoch = float(p.state.raw_epoch)
            p.state.epoch_start_step = p.state.global_step
            p.loader.start_epoch(p.loader.epoch + 1)
        self.delivery.flush()
        p.bus.fire("on_epoch_end")
        if not self.aborted and p.state.epoch == p.state.raw_epoch:
            self._act_at_epoch_end()

    def _boundary(self) -> bool:
        """Act on what is due and what was asked for; returns whether the run was rolled back."""
        p, state = self.parts, self.parts.state
        p.relieve()
        self.delivery.deliver()
        p.bookkeeping.deliver()
        now = time.monotonic()
        seconds = self._clock.of_run(now)
        wanted = self._take_flags() | self._take_news(now)
        wanted |= _LOG * p.log_trigger.due(state, seconds)
        wanted |= _EVALUATE * p.eval_trigger.due(state, seconds)
        wanted |= REGULAR_SAVE * p.save_trigger.due(state, seconds)
        wanted = p.strategy.agree(wanted)
        self._done = bool(wanted & _DONE)
        rolled_back = self._follow(wanted) if wanted else False
        while p.commands.paused and not self.stopped:
            rolled_back |= self._wait_paused()
        if not rolled_back:
            self.delivery.collect()
        return rolled_back

    def _take_news(self, now_s: float) -> int:
        """What came from outside the step, or from work beside it."""
        p, bits = self.parts, self._outside_bits() | self._length_bits(now_s)
        if self.signals.take_save_request():
            bits |= REGULAR_SAVE
        if p.saves.finished:
            bits |= _SAVED
        bits |= _OPERATION * p.bookkeeping.shared_is_due
        return bits | _COMMAND * p.commands.look()

    def _follow(self, wanted: int) -> bool:
        """Do what ranks agreed on, and what comes of it; returns whether the run went back."""
        p = self.parts
        if wanted & (_SAVED | _OPERATION | _COMMAND):
            if wanted & _SAVED:
                p.deliver_save()
            if wanted & _OPERATION:
                p.bookkeeping.deliver_shared()
            if wanted & _COMMAND:
                p.commands.deliver()
                if p.commands.take_change():
                    self._saved_step = -1
            asked = self._take_flags()
            if wanted & _COMMAND:  # one of them may have made the run longer, or shorter
                asked |= self._length_bits(time.monotonic())
            asked = p.strategy.agree(asked)
            if wanted & _COMMAND:
                self._done = bool(asked & _DONE)
            wanted |= asked
        return self._act(wanted)

    def _wait_paused(self) -> bool:
        """Wait for news of a run that is held, and follow them."""
        p, began_s = self.parts, time.monotonic()
        if p.strategy.before_apply is not None:  # a save may still read the state
            p.strategy.before_apply()
        with p.timing.aside():
            p.timing.tell("pause", p.commands.hold)(self._has_news)
        self._clock.leave_out(time.monotonic() - began_s)
        p.bookkeeping.deliver()
        wanted = p.strategy.agree(self._take_flags() | self._take_news(time.monotonic()))
        needs_state = ANY_SAVE | _EVALUATE
        if wanted & (needs_state | _ROLLBACK | _STOP | _INTERRUPT | _CANCEL):
            try:
                p.commands.bring_back()
            except RuntimeError as error:
                if wanted & ~needs_state:
                    raise
                logger.error("nothing is saved or evaluated in this pause: %s", error)
                wanted &= ~needs_state
        return self._follow(wanted)

    def _has_news(self) -> bool:
        """Whether something on this rank should not wait for the end of a pause."""
        p = self.parts
        return (
            self.asked_to_end
            or self.signals.save_requested
            or p.saves.finished
            or p.bookkeeping.has_ended
        )

    def _settle(self) -> bool:
        """After all that was due: the event for it, and what its handlers ask for.

        Returns whether the run was rolled back.
        """
        p = self.parts
        if self.aborted or not (self._settles or p.bus.listens("on_step_settled")):
            return False
        p.bus.fire("on_step_settled")
        wanted = self._take_flags() | self._outside_bits() | self._length_bits(time.monotonic())
        wanted = p.strategy.agree(wanted)
        return self._act(wanted) if wanted else False

    def _take_flags(self) -> int:
        """What callbacks ask for; requests of one step are lowered as they are read."""
        control = self.parts.bus.control
        flags = (
            _LOG * control.should_log
            | _EVALUATE * control.should_evaluate
            | save_bits(control, blocked=bool(self.parts.bus.ephemeral_blockers))
            | _STOP * control.should_training_stop
            | _ABORT * control.should_abort_without_save
            | _ROLLBACK * control.rollback
            | _SKIP_DATA * (control.rollback and control.rollback_skip_data)
            | _END_EPOCH * control.should_epoch_stop
            | _CANCEL * self.parts.cancel.wanted
        )
        control.should_log = control.should_evaluate = control.should_save = False
        control.save_lifetime = "regular"
        control.rollback = False
        return flags

    @property
    def _keeps_end(self) -> bool:
        """Whether a save made now is of the end of a complete run, and stays."""
        return self.parts.checkpointed and self._done

    @property
    def _lacks_evaluation(self) -> bool:
        """Whether the end of the run is still to be evaluated."""
        evaluated = self._evaluated_step == self.parts.state.global_step
        return self._evaluates and not (evaluated or self.cut_short)

    def _act(self, wanted: int) -> bool:
        """Log, evaluate, save, roll back or stop; returns whether the run was rolled back."""
        p, given_up = self.parts, _ABORT | _ROLLBACK
        self._owes_save = bool(wanted & ANY_SAVE) and not wanted & given_up
        # The checkpoint of the end has the last record and evaluation; that may have asked for it.
        if wanted & _LOG or (self._done and wanted & (ANY_SAVE | _EVALUATE) and self._logs):
            self._log()
            wanted |= p.strategy.agree(self._take_flags())  # what handlers of the log asked for
        lasting = ANY_SAVE if self._keeps_end else LASTING_SAVE
        due = wanted & _EVALUATE or (wanted & lasting and p.args.eval_on_save)
        if self._done and wanted & ANY_SAVE and not wanted & (_INTERRUPT | _CANCEL):
            due = due or self._lacks_evaluation
        if due and not wanted & given_up:
            wanted |= self._evaluate()
            wanted |= p.strategy.agree(self._take_flags())
        # An evaluation may have found that this state is not worth keeping.
        if wanted & ANY_SAVE and not wanted & given_up:
            self._save(strongest(wanted | PERMANENT_SAVE * self._keeps_end))
            wanted |= p.strategy.agree(self._take_flags())
        self._owes_save = False
        p.bus.control.should_epoch_stop = bool(wanted & _END_EPOCH)
        if wanted & _ROLLBACK and not wanted & _ABORT:
            self._rollback(skip_data=bool(wanted & _SKIP_DATA))
            return True
        self._note_stops(wanted)
        return False

    def _act_at_epoch_end(self) -> None:
        p = self.parts
        wanted = self._take_flags() & ~_END_EPOCH
        if p.log_trigger.due_at_epoch_end(p.state):
            wanted |= _LOG
        if p.eval_trigger.due_at_epoch_end(p.state) and self._lacks_evaluation:
            wanted |= _EVALUATE  # unless it was evaluated for a save of the last step
        if p.save_trigger.due_at_epoch_end(p.state):
            wanted |= REGULAR_SAVE
        self._act(p.strategy.agree(wanted))
        p.bus.control.should_epoch_stop = False

    def _log(self) -> None:
        self.delivery.flush()
        p = self.parts
        if self.delivery.interval.empty:
            return
        record = self.delivery.interval.record(p.state)
        if p.strategy.device.type == "cuda":
            record["peak_mem_allocated"] = self._peak_bytes_of_ranks()
            torch.cuda.reset_peak_memory_stats(p.strategy.device)
        self.delivery.start_interval()
        p.log(record)

    def _peak_bytes_of_ranks(self) -> list[int]:
        p = self.parts
        peaks = torch.zeros(p.args.world_size, dtype=torch.float64)
        peaks[p.args.process_index] = torch.cuda.max_memory_allocated(p.strategy.device)
        return [int(peak) for peak in p.strategy.reduce(peaks, "sum").tolist()]

    def _evaluate(self) -> int:
        """Returns what ended it before it was through, if anything: then it did not happen."""
        self.delivery.flush()
        p, ended_by = self.parts, 0

        def must_end() -> bool:
            """Whether whoever stops this process does not want to wait."""
            nonlocal ended_by
            late = p.length.out_of_time(self._clock, time.monotonic())
            ended_by = p.strategy.agree(self._outside_bits() | _INTERRUPT * late)
            return bool(ended_by)

        metrics = p.evaluate(must_end)
        if metrics is None:
            logger.warning("the evaluation at step %d ended early, unused", p.state.global_step)
            return ended_by
        self._evaluated_step, self._last_metrics = p.state.global_step, metrics
        update_best(p.state, p.args, metrics)
        return 0

    def _dump_metrics(self, reason: str) -> None:
        p = self.parts
        if self.stepped:  # a run that cannot start changes nothing on disk
            steps = self.delivery.pending()
            dump_last_metrics(p.args.output_dir, steps, p.state, p.args.process_index, reason)

    def _save(self, lifetime: str = "regular") -> None:
        self.delivery.mark()
        p = self.parts
        self._saved_step, self._owes_save = p.state.global_step, False
        p.state.train_seconds = self._clock.of_run(time.monotonic())
        evaluated_here = self._evaluated_step == p.state.global_step
        p.save(self._last_metrics if evaluated_here else None, lifetime)

    def _rollback(self, *, skip_data: bool) -> None:
        p, self._owes_save = self.parts, False
        self.delivery.flush()
        if not self.stopped:
            p.bus.withdraw_stop()
        p.rollback(RollbackRequest.take(p.bus.control, skip_data=skip_data))
        self._start()
        self.delivery.go_back()
        self._evaluated_step = self._saved_step = -1

    def _finish(self) -> bool:
        """The last log, evaluation and save, unless they were just done.

        Returns whether the run was rolled back, so that it is not over.
        """
        p = self.parts
        unsaved = self._saved_step != p.state.global_step
        self._owes_save = self.saves_at_end and self.stepped and unsaved
        if self._logs:
            self._log()
        self.delivery.flush()
        if self._gives_up_end():
            return not self.aborted
        if self._lacks_evaluation:
            self._note_stops(self._evaluate())
            if self._gives_up_end():
                return not self.aborted
        idle = self.cut_short and not self.stepped
        saves = p.strategy.agree(self.saves_at_end or self.signals.take_save_request())
        if saves and unsaved and not idle:
            self._save("permanent" if self._keeps_end else "regular")
        p.state.train_seconds = self._clock.of_run(time.monotonic())
        if not self.cut_short:
            p.bus.fire("on_run_settled")
            return self._gives_up_end() and not self.aborted
        return False

    def _gives_up_end(self) -> bool:
        """Whether a callback found at the end that it is not to be kept: it asked for an abort, or
        for a rollback, which is done here."""
        wanted = self._take_flags() & (_ABORT | _ROLLBACK | _SKIP_DATA)
        wanted = self.parts.strategy.agree(wanted)
        if wanted & _ABORT:
            self._note_stops(_ABORT)
            return True
        if wanted & _ROLLBACK and not self.cut_short:
            self._rollback(skip_data=bool(wanted & _SKIP_DATA))
            return True
        return False
