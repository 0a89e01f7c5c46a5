"""The torch scheduler over the curves: rates per group, its state, what it says of a change."""

import itertools
import json
import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from headway import ConfigError, TrainingArguments
from headway.optim import CurveLR, ScheduleSpec, create_scheduler
from headway.optim.build import build_scheduler, follow_scheduler
from headway.optim.schedule_state import ScheduleState

KINDS = [
    ("linear", {}),
    ("cosine", {"min_lr": 0.01}),
    ("cosine_with_restarts", {"num_cycles": 3}),
    ("inverse_sqrt", {}),
    ("wsd", {"decay_type": "1-sqrt"}),
    ("infinite", {"cooldown_steps": 3, "constant_ratio": 0.5}),
    ("sequential", {"schedules": [{"type": "linear", "length": 9, "kwargs": {"min_ratio": 0.1}},
                                  {"type": "cosine", "warmup_steps": 2}]}),
]  # fmt: skip


def make_optimizer(*rates, **more):
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate, "group_name": f"g{number}"}
        for number, rate in enumerate(rates)
    ]
    for name, value in more.items():
        groups[int(name[1:])]["lr_scheduler"] = value
    return torch.optim.SGD(groups)


def arguments(**given):
    return TrainingArguments(output_dir="unused", use_cpu=True, **given)


def advance(scheduler, num_steps, counter=None, tokens=()):
    """The rates of so many updates; `tokens` says what each of them consumes."""
    rates = []
    for _, used in zip(range(num_steps), tokens or itertools.repeat(0)):
        rates.append([group["lr"] for group in scheduler.optimizer.param_groups])
        scheduler.optimizer.step()
        if counter is not None:
            counter[0] += used
        scheduler.step()
    return rates


def through_a_file(scheduler):
    return json.loads(json.dumps(ScheduleState(scheduler).state_dict()))


def spec_of(kind, options, length=24, warmup=4, **more):
    return ScheduleSpec(kind, length, 0 if kind == "sequential" else warmup, options, **more)


@given(
    first=st.sampled_from(KINDS),
    second=st.sampled_from(KINDS),
    done=st.integers(0, 30),
    rates=st.tuples(st.floats(0.05, 1), st.floats(0.05, 1)),
)
@settings(max_examples=60, deadline=None)
def test_a_resumed_schedule_is_the_uninterrupted_one(first, second, done, rates):
    specs = [spec_of(*first), spec_of(*second)]
    whole = advance(CurveLR(make_optimizer(*rates), specs), 40)
    before = CurveLR(make_optimizer(*rates), specs)
    advance(before, done)
    after = CurveLR(make_optimizer(*rates), specs)
    ScheduleState(after).load_state_dict(through_a_file(before))
    assert after.changes == []
    follow_scheduler(after.optimizer, after)
    assert advance(after, 40 - done) == whole[done:]


@given(
    kind=st.sampled_from([pair for pair in KINDS if pair[0] not in ("infinite", "sequential")]),
    used=st.lists(st.integers(1, 200), min_size=20, max_size=20),
    done=st.integers(0, 19),
    restored=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_a_schedule_in_tokens_resumes_also_beside_a_count_that_starts_anew(
    kind, used, done, restored
):
    options = {**kind[1], "timescale": 500} if kind[0] == "inverse_sqrt" else kind[1]
    specs = [ScheduleSpec(kind[0], 1500, 300, options, "tokens", 100)]
    counter = [0]
    whole_run = CurveLR(make_optimizer(0.5), specs, tokens_seen=lambda: counter[0])
    whole = advance(whole_run, 20, counter, used)
    curve = specs[0].draw(0.5)
    seen = [0, *itertools.accumulate(used)]
    assert whole == [[0.5 * curve(tokens)] for tokens in seen[:20]]

    counter[0] = 0
    before = CurveLR(make_optimizer(0.5), specs, tokens_seen=lambda: counter[0])
    advance(before, done, counter, used)
    state = through_a_file(before)
    counter[0] = 0
    after = CurveLR(make_optimizer(0.5), specs, tokens_seen=lambda: counter[0])
    ScheduleState(after).load_state_dict(state)
    counter[0] = seen[done] if restored else 7
    after.mark()
    follow_scheduler(after.optimizer, after)
    assert advance(after, 20 - done, counter, used[done:]) == whole[done:]


def test_it_is_a_scheduler_of_torch_and_its_state_is_plain():
    scheduler = CurveLR(make_optimizer(0.5), [spec_of("linear", {})])
    assert isinstance(scheduler, LRScheduler) and isinstance(scheduler, LambdaLR)
    advance(scheduler, 3)
    assert through_a_file(scheduler) == scheduler.state_dict()
    # Another tool's LambdaLR takes it.
    other = LambdaLR(make_optimizer(0.5), lambda step: 1.0)
    other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == 3


def test_a_rate_in_a_tensor_stays_that_tensor():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate, capturable=False)
    scheduler = CurveLR(optimizer, [spec_of("linear", {})])
    advance(scheduler, 2)
    held = optimizer.param_groups[0]["lr"]
    state = scheduler.state_dict()
    again = CurveLR(optimizer, [spec_of("linear", {}, length=48)])
    again.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] is held and again.changes
    assert float(held) == pytest.approx(0.5 * 3 / 4)


# What has changed


def changed(now, *, done=12, rates=(0.5,), before=None):
    old = CurveLR(make_optimizer(*rates), [before or spec_of("linear", {})] * len(rates))
    advance(old, done)
    new = CurveLR(make_optimizer(*rates), [now] * len(rates))
    ScheduleState(new).load_state_dict(through_a_file(old))
    return new


def test_another_length_is_told_with_the_rate_before_and_after(caplog):
    with caplog.at_level(logging.WARNING):
        scheduler = changed(spec_of("linear", {}, length=44))
    text = (
        "the learning-rate schedule is not the one of the checkpoint: length 24 -> 44 steps; "
        "at 12 steps the learning rate was 0.3 and is 0.4"
    )
    assert scheduler.changes == [text] and text in caplog.text
    # And the next update has the rate that is announced.
    assert scheduler.get_last_lr() == [pytest.approx(0.4)]
    assert scheduler.optimizer.param_groups[0]["lr"] == pytest.approx(0.4)
    rates = advance(scheduler, 2)
    assert [rate for (rate,) in rates] == pytest.approx([0.4, 0.5 * (1 - 9 / 40)])


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (spec_of("cosine", {}), "linear -> cosine"),
        (spec_of("linear", {"min_ratio": 0.5}), "min_ratio (none) -> 0.5"),
        (spec_of("linear", {}, warmup=14), "warm-up 4 -> 14 steps"),
        (spec_of("linear", {}, length=30, warmup=2), "length 24 -> 30 steps, warm-up 4 -> 2 steps"),
        (spec_of("constant", {}, length=None), "linear -> constant, length 24 -> (none) steps"),
    ],
)
def test_what_else_may_change(now, words):
    scheduler = changed(now)
    assert len(scheduler.changes) == 1 and words in scheduler.changes[0]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("constant_with_warmup", {}),
        ("inverse_sqrt", {"min_lr": 0.1}),
        ("infinite", {"decay_start": 5, "decay_steps": 5, "min_lr": 0.1}),
        ("wsd", {"stable_steps": 5, "decay_steps": 5}),
        ("sequential", {"schedules": [{"type": "linear", "length": 5, "kwargs": {"min_lr": 0.1}}]}),
    ],
)
def test_another_length_of_the_training_is_no_change_of_a_curve_that_does_not_go_by_it(
    kind, options
):
    now = spec_of(kind, options, length=44)
    assert changed(now, before=spec_of(kind, options)).changes == []


def test_the_same_schedule_under_other_spellings_of_its_name_is_no_change():
    before = spec_of("warmup_stable_decay", {})
    assert changed(spec_of("wsd", {}), before=before).changes == []


def test_groups_that_changed_alike_are_told_once_and_others_by_name():
    assert len(changed(spec_of("linear", {}, length=44), rates=(0.5, 0.5)).changes) == 1
    same, other = spec_of("linear", {}), spec_of("cosine", {})
    old = CurveLR(make_optimizer(0.5, 0.5), [same, other])
    new = CurveLR(make_optimizer(0.5, 0.5), [same, spec_of("cosine", {}, length=48)])
    new.load_state_dict(through_a_file(old))
    assert len(new.changes) == 1 and "of the param group g1 is not" in new.changes[0]


def test_a_state_without_a_description_is_judged_by_its_rate():
    plain = LambdaLR(make_optimizer(0.5), lambda step: 1 - step / 20)
    advance(plain, 8)
    state = json.loads(json.dumps(plain.state_dict()))
    same = CurveLR(make_optimizer(0.5), [ScheduleSpec("linear", 20)])
    same.load_state_dict(state)
    assert same.changes == [] and same.last_epoch == 8
    other = CurveLR(make_optimizer(0.5), [ScheduleSpec("linear", 40)])
    other.load_state_dict(state)
    assert "the learning rate was 0.3 and is 0.4" in other.changes[0]


def test_from_steps_to_tokens():
    counter = [0]
    old = CurveLR(make_optimizer(0.5), [ScheduleSpec("linear", 10)], tokens_seen=lambda: counter[0])
    advance(old, 4, counter, [100] * 4)
    spec = ScheduleSpec("linear", 1000, unit="tokens", stride=100)
    new = CurveLR(make_optimizer(0.5), [spec], tokens_seen=lambda: counter[0])
    new.load_state_dict(through_a_file(old))
    assert "unit steps -> tokens" in new.changes[0] and new.progress == 400
    assert new.get_last_lr() == [pytest.approx(0.3)]


def test_a_floor_as_a_rate_stays_that_rate_when_the_base_rate_was_edited():
    spec = spec_of("linear", {"min_lr": 0.1})
    old = CurveLR(make_optimizer(0.5), [spec])
    state = {**through_a_file(old), "base_lrs": [0.2]}
    new = CurveLR(make_optimizer(0.5), [spec])
    new.load_state_dict(state)
    assert advance(new, 30)[-1] == [pytest.approx(0.1)]


# From arguments


def test_groups_have_schedules_of_their_own():
    optimizer = make_optimizer(
        1.0,
        0.5,
        1.0,
        g1={"type": "constant", "warmup_steps": 2},
        g2={"kwargs": {"min_ratio": 0.5}},
    )
    scheduler = build_scheduler(
        optimizer, arguments(lr_scheduler_type="linear", warmup_ratio=0.4), 10
    )
    assert all("lr_scheduler" not in group for group in optimizer.param_groups)
    rates = advance(scheduler, 11)
    assert rates[0] == [0.25, 0.25, 0.25] and rates[3] == [1.0, 0.5, 1.0]
    assert rates[10] == [pytest.approx(0), 0.5, pytest.approx(0.5)]


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"type": "cosin"}, r"optimizer_groups.g1.config.lr_scheduler: .* did you mean 'cosine'"),
        ({"typ": "cosine"}, "did you mean 'type'"),
        ({"type": "cosine", "kwargs": {"min_lr": 2}}, "lr_scheduler: kwargs.min_lr=2 is above"),
        ("cosine", "must be a mapping"),
        ({"warmup_steps": 20}, "g1.*longer than the training of 10"),
        ({"warmup_steps": 2, "warmup_ratio": 0.2}, "give one of them"),
        ({"warmup_tokens": 2}, "unknown key 'warmup_tokens'"),
        ({"kwargs": [1]}, "kwargs must be a mapping"),
    ],
)
def test_a_group_s_mistake_is_told_with_its_group(own, message):
    with pytest.raises(ConfigError, match=message):
        build_scheduler(make_optimizer(1.0, 0.5, g1=own), arguments(), 10)


def test_tokens_need_a_known_number_of_them():
    args = arguments(lr_scheduler_unit="tokens")
    with pytest.raises(ConfigError, match="how many tokens"):
        build_scheduler(make_optimizer(1.0), args, 10)
    args = arguments(lr_scheduler_unit="tokens", lr_scheduler_type="constant", warmup_ratio=0.1)
    with pytest.raises(ConfigError, match=r"warmup_ratio=0\.1 needs to know how many tokens"):
        build_scheduler(make_optimizer(1.0), args, 10)


def test_a_warm_up_in_tokens_starts_above_zero_also_where_a_step_s_tokens_are_not_known():
    args = arguments(lr_scheduler_unit="tokens", lr_scheduler_type="constant", warmup_tokens=1000)
    known = build_scheduler(make_optimizer(1.0), args, 10, tokens_per_step=100)
    assert known.get_last_lr() == [0.1]
    unknown = build_scheduler(make_optimizer(1.0), args, 10)
    assert unknown.get_last_lr() == [0.01]


# xaytune's function


@pytest.mark.parametrize("kind", ["constant", "constant_with_warmup", "linear", "cosine"])
def test_create_scheduler(kind):
    import math

    scheduler = create_scheduler(make_optimizer(1.0), kind, 20, 4)
    rates = [rate for (rate,) in advance(scheduler, 30)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    after = {
        "linear": lambda s: max(0.0, 1 - (s - 4) / 16),
        "cosine": lambda s: (1 + math.cos(math.pi * min(1, (s - 4) / 16))) / 2,
    }.get(kind, lambda s: 1.0)
    assert rates[4:] == pytest.approx([after(step) for step in range(4, 30)], abs=1e-12)


def test_create_scheduler_refuses():
    for kind, total, warmup, message in [
        ("cosin", 10, 0, "did you mean 'cosine'"),
        ("linear", 10, 11, "longer than the training"),
        ("linear", 10, -1, "not negative"),
    ]:
        with pytest.raises(ValueError, match=message):
            create_scheduler(make_optimizer(1.0), kind, total, warmup)
