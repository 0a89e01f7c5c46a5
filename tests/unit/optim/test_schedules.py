"""The curves: closed forms, and what holds for every one of them."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.optim.curves import DECAY_TYPES, WARMUP_TYPES
from headway.optim.schedules import SCHEDULES, ScheduleSpec, make_schedule

TOLERANCE = 1e-12
COMPOSED = ("sequential", "wsd")  # the one has tests of its own, the other is a second name
ENDLESS = ("constant", "constant_with_warmup", "inverse_sqrt", "infinite")


@st.composite
def options_of(draw, kind, total, warmup):
    """Options that the schedule takes, with a floor that its decay can reach."""
    low = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    options = {"warmup_type": draw(st.sampled_from(WARMUP_TYPES))}
    if not kind.startswith("constant"):
        options["min_ratio"] = low
    if kind == "cosine_with_restarts":
        options["num_cycles"] = draw(st.integers(1, 5))
    if kind == "polynomial":
        options["power"] = draw(st.sampled_from([0.5, 1.0, 2.0, 3]))
    if kind in ("warmup_stable_decay", "infinite"):
        kinds = [name for name in DECAY_TYPES if low or name != "exponential"]
        options["decay_type"] = draw(st.sampled_from(kinds))
    if kind == "warmup_stable_decay":
        options["decay_steps"] = draw(st.integers(0, total - warmup))
    if kind == "infinite":
        cooldown = draw(st.integers(0, total - warmup))
        if cooldown and low < 1:
            level = draw(st.floats(max(low, 0.05), 0.99))
            options |= {"cooldown_steps": cooldown, "constant_ratio": level}
        else:
            cooldown = 0
        if draw(st.booleans()):
            options["decay_start"] = warmup + cooldown + draw(st.integers(0, 50))
            options["decay_steps"] = draw(st.integers(1, 50))
    return options


@st.composite
def specs(draw, kind):
    total = draw(st.integers(1, 120))
    warmup = draw(st.integers(0, total))
    return ScheduleSpec(kind, total, warmup, draw(options_of(kind, total, warmup)))


def for_every_kind(check):
    """Each of the schedules, with lengths and options drawn at random."""

    @pytest.mark.parametrize("kind", [name for name in SCHEDULES if name not in COMPOSED])
    @settings(max_examples=80, deadline=None)
    @given(data=st.data())
    def test(kind, data):
        check(data.draw(specs(kind)))

    return test


def values_of(spec, extra=40):
    curve = spec.draw()
    return [curve(step) for step in range(spec.length + extra)]


def restarts_of(spec):
    """Steps at which a new cycle is under way."""
    if spec.kind != "cosine_with_restarts":
        return set()
    return {math.ceil(s.start) for s in spec.draw().segments if s.name.startswith("cycle")}


@for_every_kind
def test_a_factor_is_never_negative_and_never_above_one(spec):
    assert all(0 <= value <= 1 + TOLERANCE for value in values_of(spec))


@for_every_kind
def test_the_first_update_of_a_warm_up_moves_and_its_last_has_the_full_rate(spec):
    values = values_of(spec)
    if spec.warmup:
        assert values[0] > 0
        assert values[spec.warmup - 1] == pytest.approx(1.0)
        climb = values[: spec.warmup]
        assert all(b >= a - TOLERANCE for a, b in itertools.pairwise(climb))


@for_every_kind
def test_after_the_warm_up_nothing_rises_but_at_a_restart(spec):
    values, restarts = values_of(spec), restarts_of(spec)
    for step in range(spec.warmup + 1, len(values)):
        if step not in restarts:
            assert values[step] <= values[step - 1] + TOLERANCE, step


@for_every_kind
def test_segments_meet_without_a_jump(spec):
    segments = spec.draw().segments
    for left, right in itertools.pairwise(segments):
        assert left.end == pytest.approx(right.start)
        if right.name.startswith("cycle") and left.name.startswith("cycle"):
            continue  # a restart is a jump
        if spec.kind == "cosine_warmup_with_min_lr":
            continue  # one step of the decay is already done there, see below
        assert left.value(left.end - left.start) == pytest.approx(right.value(0.0))


def test_the_curve_that_starts_its_decay_one_step_early_makes_no_larger_step_there():
    spec = ScheduleSpec("cosine_warmup_with_min_lr", 100, 10, {"min_ratio": 0.1})
    values = values_of(spec)
    changes = [abs(b - a) for a, b in itertools.pairwise(values)]
    assert changes[9] < max(changes[10:])


@for_every_kind
def test_past_its_end_a_curve_stands_still(spec):
    values = values_of(spec)
    if spec.kind not in ENDLESS and spec.warmup < spec.length:
        assert set(values[spec.length :]) == {values[spec.length]}


@for_every_kind
def test_a_decay_ends_at_its_floor_and_never_goes_below(spec):
    low = spec.options.get("min_ratio", 0.0)
    values = values_of(spec, extra=200)
    assert all(value >= low - TOLERANCE for value in values[spec.warmup :])
    if spec.kind in ENDLESS or spec.warmup == spec.length:
        return
    if spec.options.get("decay_steps", 1):
        assert values[spec.length] == pytest.approx(low)


@st.composite
def sequences(draw):
    """Pieces of whole lengths, each valid for its own length; the first starts at the base rate."""
    pieces, total = [], 0
    kinds = [name for name in SCHEDULES if name not in ("sequential", "wsd", "infinite")]
    kinds = [name for name in kinds if not name.startswith("cosine_w")]
    for _ in range(draw(st.integers(1, 4))):
        kind, length = draw(st.sampled_from(kinds)), draw(st.integers(2, 40))
        piece = {"type": kind, "length": length}
        if pieces == [] or draw(st.booleans()):
            piece["warmup_steps"] = draw(st.integers(0, length // 2))
        if kind in ("linear", "cosine", "polynomial"):
            piece["kwargs"] = {"min_ratio": draw(st.sampled_from([1e-6, 1e-5]))}
        if kind == "warmup_stable_decay":
            piece["kwargs"] = {"min_ratio": 1e-5, "decay_type": "1-sqrt"}
        pieces.append(piece)
        total += length
    return ScheduleSpec("sequential", total, 0, {"schedules": pieces})


@given(sequences())
@settings(max_examples=200)
def test_a_sequence_goes_on_where_the_piece_before_it_ended(spec):
    try:
        curve = spec.draw()
    except ValueError as error:
        assert "above the" in str(error)  # a floor above what is left of the rate
        return
    for left, right in itertools.pairwise(curve.segments):
        before = left.value(left.end - left.start)
        # A warm-up of the next piece has its first update under way.
        lead = 1.0 if right.name.endswith("warm-up") else 0.0
        assert right.value(-lead) == pytest.approx(before, abs=1e-12)
    assert all(curve(step) >= 0 for step in range(spec.length + 20))
    assert curve(spec.length + 20) == curve(spec.length)


def test_a_sequence_may_jump_where_it_is_asked_to():
    pieces = [
        {"type": "linear", "length": 0.5, "kwargs": {"min_ratio": 0.2}},
        {"type": "constant", "length": 10},
        {"type": "linear", "peak": 0.5},
    ]
    curve = make_schedule("sequential", total_steps=100, schedules=pieces)
    assert curve(25) == pytest.approx(0.6) and curve(49) == pytest.approx(0.216)
    assert curve(50) == curve(59) == pytest.approx(0.2)
    assert curve(60) == 0.5 and curve(80) == pytest.approx(0.25) and curve(100) == 0


def test_a_sequence_warms_up_again_from_where_it_is():
    pieces = [
        {"type": "cosine", "length": 20, "warmup_steps": 4, "kwargs": {"min_ratio": 0.1}},
        {"type": "constant", "warmup_steps": 5},
    ]
    curve = make_schedule("sequential", total_steps=None, schedules=pieces)
    assert curve(0) == 0.25 and curve(3) == 1.0
    assert curve(20) == pytest.approx(0.1 + 0.9 / 5) and curve(24) == curve(10**6) == 1.0


def test_closed_forms():
    assert make_schedule("linear", total_steps=100, warmup_steps=10)(55) == pytest.approx(0.5)
    assert make_schedule("linear", total_steps=100, warmup_steps=10)(0) == 0.1
    cosine = make_schedule("cosine", total_steps=100)
    assert cosine(25) == pytest.approx((1 + math.cos(math.pi * 0.25)) / 2)
    assert make_schedule("polynomial", total_steps=10, power=2.0)(5) == pytest.approx(0.25)
    inverse = make_schedule("inverse_sqrt", total_steps=None, warmup_steps=4)
    assert inverse(12) == pytest.approx(math.sqrt(4 / 12))
    slow = make_schedule("inverse_sqrt", total_steps=None, timescale=100, min_ratio=0.1)
    assert slow(300) == 0.5 and slow(10**6) == 0.1
    assert make_schedule("cosine", total_steps=10, min_ratio=0.1)(10) == pytest.approx(0.1)
    restarts = make_schedule("cosine_with_restarts", total_steps=40, num_cycles=4)
    assert [restarts(s) for s in (0, 5, 10, 15, 39.999999, 40)] == pytest.approx(
        [1, 0.5, 1, 0.5, 0, 0], abs=1e-6
    )


@pytest.mark.parametrize(
    ("decay_type", "half"),
    [
        ("linear", 0.5),
        ("cosine", 0.5),
        ("1-sqrt", 1 - math.sqrt(0.5)),
        ("1-square", 0.75),
        ("polynomial", 0.125),
        ("exponential", 0.1),
    ],
)
def test_shapes_of_the_stable_schedule(decay_type, half):
    given = {"power": 3.0} if decay_type == "polynomial" else {}
    low = 0.01 if decay_type == "exponential" else 0.0
    curve = make_schedule(
        "wsd", total_steps=100, warmup_steps=10, decay_ratio=0.2, decay_type=decay_type,
        min_ratio=low, **given,
    )  # fmt: skip
    assert curve(10) == curve(79) == curve(80) == 1.0
    assert curve(90) == pytest.approx(half) and curve(100) == pytest.approx(low)


def test_lengths_of_the_stable_schedule():
    by_stable = make_schedule("wsd", total_steps=100, stable_steps=60, decay_type="linear")
    assert by_stable(60) == 1.0 and by_stable(80) == 0.5
    free = make_schedule(
        "wsd", total_steps=None, num_stable_steps=10, num_decay_steps=10, decay_type="linear"
    )
    assert free(15) == 0.5 and free(1000) == 0
    by_default = make_schedule("wsd", total_steps=100, decay_type="linear")
    assert by_default(90) == 1.0 and by_default(95) == 0.5


def test_the_infinite_schedule_waits_for_its_decay():
    # Warm-up, cool-down to a level, the level for ever, and a decay when it is time for one.
    level = {"cooldown_steps": 20, "constant_ratio": 0.5}
    endless = make_schedule("infinite", total_steps=None, warmup_steps=10, **level)
    assert endless(9) == 1.0 and endless(20) == pytest.approx(0.75)
    assert endless(30) == endless(10**9) == 0.5
    decaying = make_schedule(
        "infinite", total_steps=None, warmup_steps=10, **level,
        decay_start=100, decay_steps=50, min_ratio=0.005,
    )  # fmt: skip
    assert all(decaying(step) == endless(step) for step in range(101))
    assert decaying(125) == pytest.approx(0.05) and decaying(150) == pytest.approx(0.005)
    at_the_end = make_schedule("infinite", total_steps=80, decay_steps=20, decay_type="linear")
    assert at_the_end(60) == 1.0 and at_the_end(70) == 0.5


@pytest.mark.parametrize("shape", DECAY_TYPES)
@pytest.mark.parametrize("kind", ["infinite", "wsd"])
def test_after_its_decay_a_schedule_stays_at_its_floor(kind, shape):
    until = {"decay_start": 30} if kind == "infinite" else {"stable_steps": 30, "num_cycles": 1}
    curve = make_schedule(
        kind, total_steps=None, decay_steps=7, decay_type=shape, power=2, min_ratio=0.07, **until
    )
    assert [curve(step) for step in (37.5, 38, 1000, 10**12)] == [0.07] * 4
    assert min(curve(step / 8) for step in range(8 * 40)) == 0.07


def test_a_floor_as_a_rate_is_a_part_of_the_base_rate():
    assert make_schedule("linear", total_steps=10, base_lr=0.5, min_lr=0.1)(10) == pytest.approx(
        0.2
    )
    assert make_schedule("linear", total_steps=10, base_lr=0.0, min_lr=0.1)(10) == 0


def test_tokens_move_the_same_curve():
    in_steps = ScheduleSpec("wsd", 100, 10, {"decay_steps": 20, "decay_type": "1-sqrt"}).draw()
    in_tokens = ScheduleSpec(
        "wsd", 51200, 5120, {"decay_tokens": 10240, "decay_type": "1-sqrt"}, "tokens", 512
    ).draw()
    assert [in_tokens(512 * step) for step in range(120)] == pytest.approx(
        [in_steps(step) for step in range(120)]
    )
