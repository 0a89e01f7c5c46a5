"""Which stages go where, and what does not fit together."""

import functools

import pytest

from headway.args import PipelineTrainingArguments
from headway.config.pipe_schedules import FACTS
from headway.errors import ConfigError
from headway.strategies.pipeline.layout import Layout, resolve_layout
from headway.strategies.pipeline.schedules import find_schedule


def arguments(**given):
    return PipelineTrainingArguments(output_dir="out", **given)


def resolve(name, world_size, **given):
    return resolve_layout(arguments(**given), FACTS[name], world_size)


def test_loop_deals_stages_round_robin():
    layout = Layout(2, 2)
    assert [layout.stages_of(place) for place in range(2)] == [[0, 2], [1, 3]]


def test_v_goes_there_and_back():
    layout = Layout(2, 2, is_v=True)
    assert [layout.stages_of(place) for place in range(2)] == [[0, 3], [1, 2]]
    layout = Layout(4, 2, is_v=True)
    assert [layout.stages_of(place) for place in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("style", ["loop", "v"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
def test_layouts_are_those_of_torch(style, num_ranks):
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    layout = Layout(num_ranks, 2, is_v=style == "v")
    theirs = generate_stage_to_rank_mapping(num_ranks, 2 * num_ranks, style=style)
    assert {stage: layout.rank_of(stage) for stage in range(2 * num_ranks)} == theirs


def test_pipelines_side_by_side_cover_all_ranks():
    layout = Layout(2, 1, num_replicas=3)
    assert [layout.pipeline_ranks(replica) for replica in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [layout.replica_ranks(place) for place in range(2)] == [[0, 1, 2], [3, 4, 5]]
    for rank in range(6):
        assert rank in layout.pipeline_ranks(layout.replica_of(rank))
        assert rank in layout.replica_ranks(layout.place_of(rank))


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("GPipe", Layout(4)),
        ("1F1B", Layout(4)),
        ("LoopedBFS", Layout(4, 2)),
        ("Interleaved1F1B", Layout(4, 2)),
        ("InterleavedZeroBubble", Layout(4, 2)),
        ("ZBVZeroBubble", Layout(4, 2, is_v=True)),
        ("DualPipeV", Layout(4, 2, is_v=True)),
    ],
)
def test_what_is_left_out_follows_from_the_schedule(name, wanted):
    assert resolve(name, 4, n_microbatches=8) == wanted


def test_what_is_set_by_hand_is_taken():
    given = {"is_multistage": True, "stages_per_rank": 3}
    assert resolve("LoopedBFS", 2, **given) == Layout(2, 3)
    assert resolve("GPipe", 4, pipeline_size=2) == Layout(2, num_replicas=2)


@pytest.mark.parametrize(
    ("name", "world_size", "given", "words"),
    [
        ("GPipe", 1, {}, ["PipelineTrainer", "two ranks", "WORLD_SIZE is 1"]),
        ("GPipe", 6, {"pipeline_size": 4}, ["pipeline_size=4", "multiple", "6"]),
        ("GPipe", 2, {"pipeline_size": 4}, ["pipeline_size=4", "multiple", "2"]),
        ("GPipe", 2, {"is_multistage": True}, ["is_multistage=True", "GPipe", "one stage"]),
        ("1F1B", 2, {"is_multistage": True, "stages_per_rank": 2},
         ["is_multistage=True", "stages_per_rank=2", "1F1B"]),
        ("ZBVZeroBubble", 2, {"is_multistage": True, "stages_per_rank": 2},
         ["pp_stage_type='loop'", "ZBVZeroBubble", "'v'"]),
        ("ZBVZeroBubble", 2, {"is_multistage": True, "stages_per_rank": 3},
         ["stages_per_rank=3", "exactly 2"]),
        ("Interleaved1F1B", 2,
         {"is_multistage": True, "stages_per_rank": 2, "pp_stage_type": "v"},
         ["pp_stage_type='v'", "Interleaved1F1B", "'loop'"]),
        ("1F1B", 4, {"n_microbatches": 2}, ["n_microbatches=2", "1F1B", "4"]),
        ("DualPipeV", 4, {"n_microbatches": 4}, ["n_microbatches=4", "DualPipeV", "8"]),
        ("Interleaved1F1B", 2, {"n_microbatches": 5}, ["n_microbatches=5", "2 equal rounds"]),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name(name, world_size, given, words):
    given = {"per_device_train_batch_size": 40, "per_device_eval_batch_size": 40, **given}
    with pytest.raises(ConfigError) as caught:
        resolve(name, world_size, **given)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"])
def test_zero_bubble_is_not_compiled_whoever_chose_it(name):
    args = arguments(n_microbatches=8)
    args.torch_compile = True  # of a schedule class given to the trainer the arguments know nothing
    with pytest.raises(ConfigError, match=f"torch_compile=True .* {name}"):
        resolve_layout(args, FACTS[name], 2)
    args = arguments()
    args.torch_compile = True
    resolve_layout(args, FACTS["Interleaved1F1B"], 2)


def test_a_schedule_is_found_by_name_and_by_class():
    from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleLoopedBFS

    assert find_schedule(None, None).make is ScheduleGPipe
    for name in ("1F1B", "Schedule1F1B"):
        assert find_schedule(None, name).make is Schedule1F1B
    assert find_schedule(ScheduleLoopedBFS, "1F1B").facts.name == "LoopedBFS"
    part = functools.partial(ScheduleLoopedBFS)
    assert find_schedule(part, None).make is part

    class Mine(ScheduleLoopedBFS):
        pass

    assert find_schedule(Mine, None).facts.is_multistage


def test_every_schedule_we_know_is_one_of_torch():
    for name in FACTS:
        kind = find_schedule(None, name).make
        assert kind.__name__ == f"Schedule{name}"
        assert FACTS[name].is_multistage == any(
            base.__name__ == "PipelineScheduleMulti" for base in kind.__mro__
        )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("GPip", "did you mean 'GPipe'"),
        (lambda stages: None, "pipe_schedule_factory must be a schedule class"),
        (dict, "pipe_schedule_factory must derive"),
    ],
)
def test_what_is_no_schedule_is_refused(given, words):
    with pytest.raises(ConfigError, match=words):
        find_schedule(given, None)
