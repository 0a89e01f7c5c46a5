"""The numbered rules of the option reference that concern strategies and need more than arguments.

A test stands for the rule whose number it has in its name; the last one sees to it that none is
left out. What arguments alone decide is in test_option_rules.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_option_rules import CASES

from headway import (
    AccelTrainer,
    DDPTrainer,
    FSDP2Trainer,
    PipelineTrainer,
    PipelineTrainingArguments,
    Trainer,
)
from headway.config.pipe_schedules import FACTS
from headway.config.rules import all_rules
from headway.dist import init_distributed
from headway.dist.env import DistributedEnv
from headway.errors import ConfigError
from headway.strategies.pipeline.layout import resolve_layout
from headway.testing import run_ranks, tiny_dataset, tiny_decoder

TESTS = Path(__file__).parents[1]
SMALL = {"max_steps": 1, "use_cpu": True, "save_strategy": "no", "seed": 0}
BATCHES = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
ONE_OF_TWO = DistributedEnv(0, 2, 0, 2, 0, "cpu")


def make(kind: type[Trainer], folder: Any, **given: Any) -> Trainer:
    """A trainer of a kind; `arguments` go to its arguments."""
    settings = {**SMALL, **BATCHES, "output_dir": str(folder), **given.pop("arguments", {})}
    options: dict[str, Any] = {
        "args": kind.arguments_class.from_dict(settings),
        "model_init": tiny_decoder,
        "train_dataset": tiny_dataset(8, sequence_length=8),
        "default_callbacks": False,
    }
    return kind(**{**options, **given})


def message_of(act: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """What a user is told; empty when nothing is refused."""
    try:
        act(*arguments, **options)
    except ConfigError as error:
        return str(error)
    return ""


# -- in one process --------------------------------------------------------------------------------


def test_rule_36_trainer_is_one_process(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"one of 2 .*use DDPTrainer, FSDP2Trainer"):
        make(Trainer, tmp_path, distributed_env=ONE_OF_TWO)


@pytest.mark.parametrize("seed", [0, -1])
@pytest.mark.parametrize("kind", [DDPTrainer, FSDP2Trainer, PipelineTrainer])
def test_rule_37_ranks_need_a_process_group(kind: Any, seed: int, tmp_path: Path) -> None:
    trainer = make(
        kind,
        tmp_path,
        distributed_env=ONE_OF_TWO,
        arguments={"seed": seed},
        eval_dataset=tiny_dataset(8, sequence_length=8),
    )
    for act in (trainer.train, trainer.evaluate):
        with pytest.raises(ConfigError, match=rf"{kind.__name__}.*not initialised.*--nproc"):
            act()


def test_rule_38_a_pipeline_needs_two_ranks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least two ranks"):
        make(PipelineTrainer, tmp_path)


def test_rule_39_a_pipeline_takes_no_ready_model(tmp_path: Path) -> None:
    for options in ({}, {"model_init": None}):
        with pytest.raises(ConfigError, match=r"^model: PipelineTrainer takes model_init"):
            make(PipelineTrainer, tmp_path, model=tiny_decoder(), **options)


def test_rule_40_a_pipeline_needs_model_init(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^model_init: PipelineTrainer needs it"):
        make(PipelineTrainer, tmp_path, model_init=None)


def test_rule_46_several_stages_on_a_rank_are_said_or_follow_from_the_schedule() -> None:
    args = PipelineTrainingArguments(**BATCHES)
    assert resolve_layout(args, FACTS["LoopedBFS"], 2).stages_per_rank == 2
    args.stages_per_rank = 2  # set later than rule 45 is checked
    with pytest.raises(ConfigError, match=r"is_multistage=False does not fit .* LoopedBFS"):
        resolve_layout(args, FACTS["LoopedBFS"], 2)
    with pytest.raises(ConfigError, match=r"stages_per_rank=2: .* GPipe runs one stage"):
        resolve_layout(args, FACTS["GPipe"], 2)


@pytest.fixture
def accelerator() -> Any:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    yield Accelerator(cpu=True, gradient_accumulation_steps=2)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_rule_57_an_accelerator_brings_its_precision(
    accelerator: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(
        AccelTrainer,
        tmp_path,
        accelerator=accelerator,
        arguments={"mixed_precision": "bf16", "gradient_accumulation_steps": 2},
    )
    assert trainer.args.mixed_precision is None
    assert "mixed_precision='bf16' is ignored in AccelTrainer" in caplog.text


def test_rule_58_an_accelerator_brings_its_accumulation(
    accelerator: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(AccelTrainer, tmp_path, accelerator=accelerator)
    assert trainer.args.gradient_accumulation_steps == 2
    assert "gradient_accumulation_steps=1 gives way to the Accelerator's 2" in caplog.text


def test_rule_59_an_accelerator_is_needed(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(ConfigError, match=r"needs an accelerate\.Accelerator, got object"):
        make(AccelTrainer, tmp_path, accelerator=object())


# -- on two ranks ----------------------------------------------------------------------------------


class Counted(list[Any]):
    """Samples, and how many were read in this process."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self._samples = tiny_dataset(num_samples, sequence_length=8, seed=1)
        self.num_read = 0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: Any) -> Any:
        self.num_read += 1
        return self._samples[index]

    def __iter__(self) -> Any:  # looking it through before training is not reading
        return iter(self._samples)


class Stream:
    """Samples one after another, without a length."""

    def __init__(self, num_samples: int) -> None:
        self._samples = tiny_dataset(num_samples, sequence_length=8)

    def __iter__(self) -> Any:
        return iter(self._samples)


def evaluate_dispatched(folder: str, dispatch: bool, eval_dispatch: bool | None) -> tuple[Any, int]:
    """The loss of an evaluation, and how many samples this rank read for it."""
    data = Counted(11)
    trainer = make(
        DDPTrainer,
        folder,
        eval_dataset=data,
        arguments={
            "dispatch_batches": dispatch,
            "dispatch_eval_batches": eval_dispatch,
            "per_device_eval_batch_size": 2,
        },
    )
    trainer.train()
    return trainer.evaluate()["eval_loss"], data.num_read


def with_a_group(folder: str) -> dict[str, Any]:
    """On each of two ranks: by name, what is refused or found."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining.schedules import ScheduleLoopedBFS

    from headway.strategies import wrap_model_distributed

    # A group that someone else made is watched, and trained on.
    distributed.init_process_group("gloo")
    found: dict[str, Any] = {
        f"37 {kind.__name__}": make(kind, folder).train().global_step
        for kind in (DDPTrainer, FSDP2Trainer, PipelineTrainer)
    }
    four = DistributedEnv(distributed.get_rank(), 4, 0, 4, 0, "cpu")
    found["37 world"] = message_of(make(DDPTrainer, folder, distributed_env=four).train)
    found["39"] = message_of(make, PipelineTrainer, folder, model=tiny_decoder())
    found["40"] = message_of(make, PipelineTrainer, folder, model_init=None)
    hand_set = make(PipelineTrainer, folder, pipe_schedule_factory=ScheduleLoopedBFS)
    hand_set.args.stages_per_rank = 2
    found["46"] = message_of(hand_set.train)
    same = make(PipelineTrainer, folder, model_splitter=lambda model, num: [model] * num)
    found["53"] = message_of(same.train)
    lost = make(FSDP2Trainer, folder, arguments={"fsdp2": {"transformer_layers_path": "layer"}})
    found["61"] = message_of(lost.train)
    mesh = init_device_mesh("cpu", (1, 1, 2))
    context = init_distributed(use_cpu=True)
    found["64"] = message_of(
        wrap_model_distributed, tiny_decoder(), strategy="fsdp", ctx=context, mesh=mesh
    )
    for kind, own in ((DDPTrainer, False), (DDPTrainer, True), (FSDP2Trainer, True),
                      (PipelineTrainer, None)):  # fmt: skip
        reading = {} if own is None else {"dispatch_batches": not own}
        few = make(
            kind,
            folder,
            eval_dataset=Stream(3),
            arguments={"dataloader_drop_last": True, "max_eval_steps": 5, **reading},
        )
        found[f"65 {kind.__name__} {own}"] = message_of(few.evaluate)
    few = make(
        DDPTrainer,
        folder,
        eval_dataset=tiny_dataset(3, sequence_length=8),
        arguments={"dataloader_drop_last": True},
    )
    found["map 65"] = message_of(few.evaluate)
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("ranks"))
    return run_ranks(with_a_group, 2, folder, backend=None, timeout_s=120)


def told(ranks: list[dict[str, Any]], name: str) -> str:
    """What all ranks were told, in the same words."""
    (text,) = {rank[name] for rank in ranks}
    return str(text)


def test_rule_37_a_group_of_ones_own_is_trained_on(ranks: list[dict[str, Any]]) -> None:
    for kind in (DDPTrainer, FSDP2Trainer, PipelineTrainer):
        assert told(ranks, f"37 {kind.__name__}") == "1"
    assert "process group has 2 ranks, but the environment says 4" in told(ranks, "37 world")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("39", "model: PipelineTrainer takes model_init"),
        ("40", "model_init: PipelineTrainer needs it"),
        ("46", "is_multistage=False does not fit pipe_schedule LoopedBFS"),
        ("53", "model_splitter"),
        ("61", "fsdp2.transformer_layers_path='layer' leads to nothing in Decoder"),
        ("64", "mesh: 3 axes given; allowed: one"),
    ],
)
def test_rules_39_40_46_53_61_64_on_ranks(
    number: str, words: str, ranks: list[dict[str, Any]]
) -> None:
    assert words in told(ranks, number)


def test_rule_65_an_evaluation_without_a_batch_lists_the_settings(
    ranks: list[dict[str, Any]],
) -> None:
    names = [name for name in ranks[0] if name.startswith("65 ")]
    assert len(names) == 4
    for name in names:
        for words in (
            "eval_dataset yields no batch",
            "per_device_eval_batch_size=4",
            "max_eval_steps=5",
            "dataloader_drop_last=True",
        ):
            assert words in told(ranks, name), name
    # Of data that has a length it is known before.
    assert "3 samples, less than batch_size 4 on 2 rank(s)" in told(ranks, "map 65")


def dispatch_all_ways(folder: str) -> dict[tuple[bool, bool | None], Any]:
    init_distributed(use_cpu=True)
    return {
        (train, evaluation): evaluate_dispatched(folder, train, evaluation)
        for train in (True, False)
        for evaluation in (True, False, None)
    }


def test_evaluation_batches_are_dispatched_or_read_by_each_rank(tmp_path: Path) -> None:
    alone = make(
        Trainer,
        tmp_path,
        eval_dataset=Counted(11),
        arguments={"per_device_train_batch_size": 8},
    )
    alone.train()
    wanted = alone.evaluate()["eval_loss"]
    first, second = run_ranks(dispatch_all_ways, 2, str(tmp_path), timeout_s=120)
    for (train, evaluation), (loss, num_read) in first.items():
        assert loss == second[train, evaluation][0] == pytest.approx(wanted, rel=1e-5)
        dispatched = train if evaluation is None else evaluation
        reads = (num_read, second[train, evaluation][1])
        assert reads == ((11, 0) if dispatched else (6, 5)), (train, evaluation)


# -- none is left out ------------------------------------------------------------------------------

ELSEWHERE = {
    "51": ("contract/test_option_rules.py", "test_rules_that_only_warn"),
    "54": ("dist/test_pipeline.py", "test_two_ranks_train_as_one_device_under_every_schedule"),
    "62": (
        "parity/test_strategy_resume.py",
        "test_any_strategy_goes_on_with_what_any_other_saved",
    ),
    "69": ("dist/test_ddp.py", "test_a_run_with_local_steps_saves_anywhere_and_resumes_bitwise"),
}
# 56 is about the model; 55 is about losses that are given as functions.
NAMES_A_STRATEGY = {
    *map(str, (15, 16, 17, 19, 21, 22, 23)),
    *map(str, range(36, 50)),
    *map(str, (51, 53, 54, 57, 58, 59, 60, 61, 62, 64, 65, 69)),
}


def test_every_rule_that_names_a_strategy_has_a_test() -> None:
    here = {
        number
        for name in globals()
        if name.startswith("test_rule")
        for number in re.findall(r"\d+", name)
    }
    on_arguments = {case[0] for case in CASES}
    assert here | on_arguments | ELSEWHERE.keys() >= NAMES_A_STRATEGY
    assert {rule.number for rule in all_rules()} >= NAMES_A_STRATEGY
    for file, name in ELSEWHERE.values():
        assert f"def {name}(" in (TESTS / file).read_text(), name
