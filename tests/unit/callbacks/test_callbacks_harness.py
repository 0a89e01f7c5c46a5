"""lm-eval-harness: its tasks in a run, and one of ours scored as Headway scores it."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from evaluated import Seen, trainer_with, write_task

from headway import ConfigError
from headway.callbacks import DownstreamEvaluatorCallbackConfig, LMHarnessCallback
from headway.callbacks.evaluate import harness
from headway.callbacks.evaluate.harness import describe_task, figures_of
from headway.callbacks.evaluate.tasks import suite_tasks

has_harness = importlib.util.find_spec("lm_eval") is not None


def stand_in(calls: list[dict[str, Any]]) -> Any:
    """In the place of the harness: knows one task, and that the model's folder is whole."""

    def run(settings: dict[str, Any], place: Path, timeout_s: float) -> dict[str, Any]:
        if settings["model"] is None:
            return {"unknown": [t for t in settings["tasks"] if t not in ("arc", "mine")]}
        calls.append(settings)
        names = {path.name for path in Path(settings["model"]).iterdir()}
        assert {"config.json", "tokenizer.json", "model.safetensors.index.json"} <= names
        figures = {"acc,none": 0.5, "acc_stderr,none": 0.1, "f1,strict": 1, "alias": "arc"}
        return {"results": {"arc": figures}}

    return run


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    find = importlib.util.find_spec
    monkeypatch.setattr(harness, "run_program", stand_in(made))
    monkeypatch.setattr(
        harness.importlib.util,
        "find_spec",
        lambda name: object() if name == "lm_eval" else find(name),
    )
    return made


def test_its_figures_come_under_the_step_of_the_model(tmp_path: Path, calls: list[Any]) -> None:
    seen = Seen()
    task = write_task(tmp_path / "mine.jsonl", {"prompt": "a", "completion": "b"})
    callback = LMHarnessCallback(["arc", task], eval_interval=3, limit=7)
    trainer_with(tmp_path, callback, seen).train()
    figures = {"eval/harness/arc/acc": 0.5, "eval/harness/arc/f1 (strict)": 1.0}
    assert seen.steps == {3: figures, 4: figures}
    assert [Path(c["model"]).name for c in calls] == ["step-3", "step-4"]
    assert calls[0]["limit"] == 7 and calls[0]["tasks"] == ["arc", "mine"]
    assert not list(tmp_path.glob("out/harness/*")), "the models are gone"


def test_tasks_it_does_not_have_are_told_before_the_first_step(
    tmp_path: Path, calls: list[Any]
) -> None:
    trainer = trainer_with(tmp_path, LMHarnessCallback(["arc", "ark"]))
    with pytest.raises(ConfigError, match="tasks: the harness has no ark"):
        trainer.train()
    assert calls == [] and trainer.state.global_step == 0


@pytest.mark.skipif(has_harness, reason="the package is there")
def test_without_the_package_the_extra_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pip install 'headway\[lm-eval\]'"):
        trainer_with(tmp_path, LMHarnessCallback(["arc_easy"])).train()


@pytest.mark.parametrize(
    "options",
    [
        {"tasks": []},
        {"tasks": "arc"},
        {"eval_interval": 0},
        {"fixed_steps": [0]},
        {"limit": 0},
        {"batch_size": 0},
        {"timeout_s": 0},
        {"num_fewshot": -1},
    ],
)
def test_bad_options_are_told_at_once(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^LMHarnessCallback: {next(iter(options))}"):
        LMHarnessCallback(**{"tasks": ["arc"], **options})


def test_numbers_are_taken_and_words_are_not() -> None:
    found = figures_of({"t": {"acc,none": 1, "acc_stderr,none": "N/A", "alias": "t", "x,a": True}})
    assert found == {"t/acc": 1}


def test_a_task_is_described_by_its_kind() -> None:
    files = suite_tasks()
    kinds = {name: describe_task(str(path))["output_type"] for name, path in files.items()}
    assert kinds == {
        "continuations": "loglikelihood",
        "everyday": "multiple_choice",
        "opposites": "multiple_choice",
    }


@pytest.mark.slow
@pytest.mark.skipif(not has_harness, reason="needs lm-eval")
@pytest.mark.timeout(600)
def test_the_harness_scores_our_tasks_as_we_do(tmp_path: Path) -> None:
    """Of a model that has learnt a little, on the folder that Headway writes."""
    files = [str(path) for path in suite_tasks().values()]
    seen = Seen()
    trainer = trainer_with(
        tmp_path,
        DownstreamEvaluatorCallbackConfig(files, eval_interval=None, eval_on_finish=True),
        LMHarnessCallback(files, include_defaults=False),
        seen,
        max_steps=60,
    )
    texts = [line.encode()[:64].ljust(64) for line in Path(files[2]).read_text().splitlines()]
    trainer.train_dataset = [{"input_ids": list(t), "labels": list(t)} for t in texts]
    trainer.train()
    found = seen.steps[60]
    for name in suite_tasks():
        ours = found[f"eval/downstream/{name} (accuracy)"]
        assert found[f"eval/harness/{name}/acc"] == pytest.approx(ours, abs=1e-9), name
        if name != "continuations":
            normed = found[f"eval/downstream/{name} (length-normalized accuracy)"]
            assert found[f"eval/harness/{name}/acc_norm"] == pytest.approx(normed, abs=1e-9), name
    print({name: value for name, value in found.items() if "acc" in name})
