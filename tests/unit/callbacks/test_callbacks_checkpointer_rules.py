"""Which checkpoints a checkpointer makes and leaves, against a model of it; its options."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from checkpointer_reference import Reference, Run, Settings
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.callbacks import (
    CheckpointerCallback,
    CheckpointRemovalStrategy,
    ListCheckpointerCallback,
)
from headway.checkpoint.retention import Entry, choose_deletions
from headway.config import Duration
from headway.engine.lifetimes import save_bits, strongest
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError

# HEADWAY_CHECKPOINTER_HISTORIES=5000 takes some minutes.
NUM_HISTORIES = int(os.environ.get("HEADWAY_CHECKPOINTER_HISTORIES", "60"))
steps = st.integers(1, 24)


@st.composite
def draw_settings(draw: Any) -> Settings:
    save = draw(st.none() | st.integers(2, 9))
    ephemeral = draw(st.none() | st.integers(1, save - 1 if save else 5))
    remove = draw(st.sampled_from(["ephemeral_only", "all_non_permanent", "never"]))
    return Settings(
        save=save,
        ephemeral=ephemeral,
        cooldown=draw(st.none() | st.integers(1, 6)),
        fixed=tuple(draw(st.lists(steps, max_size=3))),
        most=None if remove == "never" else draw(st.none() | st.integers(1, 3)),
        remove=remove,
        pre_train=draw(st.sampled_from([None, True, False])),
    )


run_strategy = st.builds(
    Run,
    settings=draw_settings(),
    num_steps=st.integers(1, 14),
    end=st.sampled_from(["completed", "interrupted", "killed"]),
    requests=st.frozensets(steps, max_size=3),
    blocked=st.frozensets(steps, max_size=8),
    from_older=st.sampled_from([0, 0, 0, 1, 2]),
)


class Played:
    """A run directory in memory, driven as the loop and the manager drive a real one."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.last_saved_step: int | None = None
        self._counter = 0

    def play(self, run: Run) -> None:
        s, state, control = run.settings, TrainerState(), TrainerControl()
        options = {"pre_train_checkpoint": s.pre_train, "remove": s.remove}
        callback = CheckpointerCallback(
            s.save,
            s.ephemeral,
            ephemeral_cooldown=s.cooldown,
            fixed_steps=s.fixed,
            max_checkpoints=s.most,
            **options,
        )
        self.last_saved_step = None
        if self.entries:
            by_age = sorted(self.entries, key=lambda entry: entry.save_counter)
            loaded = by_age[-1 - min(run.from_older, len(by_age) - 1)]
            state.global_step = self.last_saved_step = loaded.step
            callback.on_load(state)
        callback.on_train_begin(state, control)
        self.act(callback, state, control)
        for number in range(run.num_steps):
            state.global_step += 1
            callback.on_step_end(state, control, trainer=self)
            if state.global_step in run.requests:
                control.should_save = True
            ends = number == run.num_steps - 1
            saved = self.act(
                callback,
                state,
                control,
                blocked=state.global_step in run.blocked,
                done=ends and run.end == "completed",
            )
            if ends and run.end == "interrupted" and not saved:
                self.store(callback, state.global_step, "regular")

    def act(
        self, callback: Any, state: Any, control: Any, *, blocked: bool = False, done: bool = False
    ) -> bool:
        bits = save_bits(control, blocked=blocked)
        control.should_save, control.save_lifetime = False, "regular"
        if bits or done:
            self.store(callback, state.global_step, "permanent" if done else strongest(bits))
        return bool(bits or done)

    def store(self, callback: CheckpointerCallback, step: int, lifetime: str) -> None:
        self.last_saved_step = step
        self._counter += 1
        earlier = [entry for entry in self.entries if entry.step == step]
        permanent = lifetime == "permanent" or any(entry.permanent for entry in earlier)
        self.entries = [entry for entry in self.entries if entry.step != step]
        self.entries.append(
            Entry(
                f"checkpoint-{step}",
                self._counter,
                step,
                permanent=permanent,
                ephemeral=lifetime == "ephemeral" and not permanent,
            )
        )
        gone = choose_deletions(self.entries, **callback.retention)
        self.entries = [entry for entry in self.entries if entry.id not in gone]

    def listed(self) -> list[tuple[int, str]]:
        words = {(True, False): "permanent", (False, True): "ephemeral", (False, False): "regular"}
        return [(e.step, words[e.permanent, e.ephemeral]) for e in self.entries]


@settings(max_examples=NUM_HISTORIES, deadline=None, database=None, derandomize=True)
@given(st.lists(run_strategy, min_size=1, max_size=4))
def test_what_lies_on_disk_is_what_the_reference_says(runs: list[Run]) -> None:
    played, reference = Played(), Reference()
    for run in runs:
        played.play(run)
        reference.play(run)
        assert played.listed() == [(one.step, one.lifetime) for one in reference.disk]
        there = {step for step, lifetime in played.listed() if lifetime == "permanent"}
        assert there == reference.permanent_ever, "a permanent checkpoint is gone"


# Intervals that are not steps


def test_intervals_in_tokens_and_seconds_and_a_cooldown_in_seconds(monkeypatch: Any) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    callback = CheckpointerCallback("10s", "1 tokens", ephemeral_cooldown=Duration.seconds(3))
    asked: dict[int, list[str]] = {}
    for rank in (0, 1):
        state, trainer = TrainerState(is_world_process_zero=rank == 0), SimpleNamespace()
        trainer.last_saved_step, asked[rank], now[0] = None, [], 100.0
        callback.on_train_begin(state, TrainerControl())
        for _ in range(12):
            now[0] += 1.0
            state.global_step += 1
            state.num_input_tokens_seen += 1
            control = TrainerControl()
            callback.on_step_end(state, control, trainer)
            bits = save_bits(control)
            asked[rank].append(strongest(bits) if bits else "")
            if asked[0][len(asked[rank]) - 1]:  # what one rank asks for, all of them do
                trainer.last_saved_step = state.global_step
    e, p = "ephemeral", "permanent"
    assert asked[0] == [e, "", "", e, "", "", e, "", "", p, "", ""]
    assert asked[1] == [e, *[""] * 11], "a rank other than the first went by its own clock"


# Options


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"save_interval": 0}, "save_interval is 0"),
        ({"save_interval": -5}, "save_interval"),
        ({"save_interval": "0s"}, "save_interval is '0s'"),
        ({"save_interval": 2.5}, "save_interval"),
        ({"save_interval": "5 parsecs"}, "save_interval: unknown unit 'parsecs'"),
        ({"save_interval": True}, "save_interval"),
        ({"ephemeral_save_interval": 250}, "must be below save_interval"),
        ({"save_interval": "1h", "ephemeral_save_interval": "2h"}, "must be below save_interval"),
        ({"ephemeral_cooldown": 0}, "ephemeral_cooldown is 0"),
        ({"max_checkpoints": 0}, "max_checkpoints is 0"),
        ({"max_checkpoints": 2, "remove": "never"}, "remove='never' forbids it"),
        ({"remove": "ephemral_only"}, "remove: unknown .* did you mean 'ephemeral_only'"),
        ({"fixed_steps": [0]}, "fixed_steps has 0.*pre_train_checkpoint"),
        ({"fixed_steps": 7}, "fixed_steps is 7"),
        ({"fixed_steps": ["7"]}, "fixed_steps"),
        ({"pre_train_checkpoint": "yes"}, "pre_train_checkpoint is 'yes'"),
        ({"save_async": 1}, "save_async is 1"),
        ({"enabled": None}, "enabled is None"),
    ],
)
def test_a_wrong_option_is_told_with_what_is_allowed(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as raised:
        CheckpointerCallback(**options)
    assert "CheckpointerCallback: " in str(raised.value)


def test_options_of_the_list_form() -> None:
    for steps_given in (None, [], ()):
        with pytest.raises(ConfigError, match="ListCheckpointerCallback: save_steps is empty"):
            ListCheckpointerCallback(steps_given)
    with pytest.raises(ConfigError, match="ListCheckpointerCallback: save_steps has -1"):
        ListCheckpointerCallback([3, -1])
    with pytest.raises(ConfigError, match=r"^ListCheckpointerCallback: remove: unknown"):
        ListCheckpointerCallback([3], remove="x")
    made = ListCheckpointerCallback([5, 3, 3], remove=CheckpointRemovalStrategy.never)
    assert made.save_steps == (3, 5) and made.save_interval is None
    assert made.retention["keep_ephemeral"]


def test_a_request_never_weakens_another() -> None:
    control = TrainerControl()
    control.request_save("permanent")
    control.request_save("ephemeral")
    control.request_save()
    assert strongest(save_bits(control)) == "permanent"
    control = TrainerControl()
    control.request_save("ephemeral")
    control.should_save = True  # a callback of Hugging Face asks for a save
    assert strongest(save_bits(control)) == "regular"
    blocked = TrainerControl(save_lifetime="ephemeral")
    assert save_bits(blocked, blocked=True) == 0
    with pytest.raises(ConfigError, match="did you mean 'permanent'"):
        control.request_save("permanet")
