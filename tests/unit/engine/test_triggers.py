from headway.config.duration import Duration
from headway.engine.state import TrainerState
from headway.engine.triggers import Clock, Length, Trigger


def fired(trigger, states, seconds=None):
    seconds = seconds or [0.0] * len(states)
    return [trigger.due(state, s) for state, s in zip(states, seconds)]


def at(step=0, tokens=0, epoch=0.0):
    return TrainerState(global_step=step, num_input_tokens_seen=tokens, epoch=epoch)


def steps(*numbers):
    return [at(step=n) for n in numbers]


def test_steps_fire_at_multiples():
    assert fired(Trigger("steps", 3), steps(1, 2, 3, 4, 5, 6)) == [
        False, False, True, False, False, True,
    ]  # fmt: skip


def test_a_resume_keeps_the_cadence_of_the_whole_run():
    trigger = Trigger("steps", 4)
    trigger.start(at(step=6), 0.0)
    assert fired(trigger, steps(7, 8, 9)) == [False, True, False]


def test_tokens_fire_when_a_multiple_is_crossed_however_large_the_step():
    trigger = Trigger("no", 1, Duration.tokens(100))
    states = [at(1, 70), at(2, 140), at(3, 380), at(4, 399)]
    assert fired(trigger, states) == [False, True, True, False]


def test_fractions_of_epochs():
    trigger = Trigger("no", 1, Duration.epochs(0.1))
    states = [at(n, epoch=n * 0.05) for n in range(1, 7)]
    assert fired(trigger, states) == [False, True, False, True, False, True]


def test_wall_time():
    trigger = Trigger("no", 1, Duration.seconds(60))
    assert fired(trigger, steps(1, 2, 3, 4), [30, 61, 110, 121]) == [False, True, False, True]
    resumed = Trigger("no", 1, Duration.seconds(60))
    resumed.start(at(step=4), 121)
    assert fired(resumed, steps(5, 6), [130, 181]) == [False, True]


def test_delay_and_first_step():
    assert fired(Trigger("steps", 2, delay=4), steps(2, 3, 4)) == [False, False, True]
    assert fired(Trigger("steps", 5, first_step=True), steps(1, 2, 5)) == [True, False, True]


def test_no_and_epoch():
    assert fired(Trigger("no", 1), steps(1, 2)) == [False, False]
    trigger = Trigger("epoch", 1, delay=2)
    assert not any(fired(trigger, steps(1, 2)))
    assert [trigger.due_at_epoch_end(at(epoch=e)) for e in (1.0, 2.0)] == [False, True]
    assert Trigger("epoch", 1).period_steps > 10**12, "never divides a step"


def test_length_by_steps_tokens_and_time():
    clock = Clock(started_at_s=1000, earlier_s=50)
    by_steps = Length(10, None, None)
    assert not by_steps.finished(at(9), clock, 1001) and by_steps.finished(at(10), clock, 1001)
    by_tokens = Length(None, Duration.tokens(500), None)
    assert not by_tokens.finished(at(9, 499), clock, 0) and by_tokens.finished(at(9, 500), clock, 0)
    budget = Length(None, Duration.seconds(60), None)
    assert not budget.finished(at(1), clock, 1009), "59 of 60 seconds over all resumes"
    assert budget.finished(at(1), clock, 1010)


def test_stop_at_counts_time_from_this_process():
    clock = Clock(started_at_s=1000, earlier_s=500)
    length = Length(10, None, Duration.seconds(60))
    assert not length.interrupted(at(1), clock, 1059)
    assert length.interrupted(at(1), clock, 1060)
    assert Length(10, None, Duration.steps(5)).interrupted(at(5), clock, 1000)
