"""Tasks of EleutherAI's lm-eval-harness, run on the model as a Hugging Face folder.

Owns: writing the model, starting the harness beside the run, taking its figures.
Does not own: the harness (harness_program.py calls it).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from headway.callbacks.evaluate.options import check_steps
from headway.callbacks.evaluate.tasks import read_task
from headway.callbacks.watch.ranges import (
    require_count,
    require_flag,
    require_name,
    require_positive,
)
from headway.callbacks.watch.sharing import on_all_ranks
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerControl, TrainerState
from headway.errors import ConfigError, missing_extra

logger = logging.getLogger(__name__)

# What a launcher tells the ranks of a run; the harness would take itself for one of them.
_OF_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_MOST_SAID = 2000


class LMHarnessCallback(TrainerCallback):
    """Runs tasks of lm-eval-harness (`pip install 'headway[lm-eval]'`) at steps of a run.

    `tasks` are names that the harness knows, also by the YAML files in `include_path`, and task
    files of Headway (`.jsonl`, by their name). At each due step the model is written to
    `<output_dir>/harness/step-<N>` (kept with `keep_models`), and the harness runs beside training
    in a process of its own, started by the first rank, on `device`. What it finds is recorded under
    that step as `eval/{name}/{task}/{metric}`. `num_fewshot`, `limit` and `batch_size` are the
    harness's own; a run takes `timeout_s` at most. A run that is due while one is under way waits
    for it.
    """

    def __init__(
        self,
        tasks: Sequence[str],
        eval_interval: int | None = None,
        fixed_steps: Sequence[int] | None = None,
        eval_on_finish: bool = True,
        num_fewshot: int | None = None,
        limit: int | None = None,
        batch_size: int = 8,
        include_path: str | None = None,
        include_defaults: bool = True,
        device: str = "cpu",
        dtype: str = "float32",
        timeout_s: float = 3600.0,
        name: str = "harness",
        keep_models: bool = False,
    ) -> None:
        kind = type(self).__name__
        if isinstance(tasks, str) or not isinstance(tasks, Sequence) or not tasks:
            raise ConfigError(f"{kind}: tasks: {tasks!r} given; allowed: a list of names of tasks")
        require_count(f"{kind}: eval_interval", eval_interval, least=1, optional=True)
        for option, flag in (
            ("eval_on_finish", eval_on_finish),
            ("include_defaults", include_defaults),
            ("keep_models", keep_models),
        ):
            require_flag(f"{kind}: {option}", flag)
        require_count(f"{kind}: num_fewshot", num_fewshot, optional=True)
        require_count(f"{kind}: limit", limit, least=1, optional=True)
        require_count(f"{kind}: batch_size", batch_size, least=1)
        require_positive(f"{kind}: timeout_s", timeout_s)
        for option, text in (("name", name), ("device", device), ("dtype", dtype)):
            require_name(f"{kind}: {option}", text)
        self.tasks, self.name_of_metrics = list(tasks), name
        self.eval_interval, self.fixed_steps = eval_interval, check_steps(kind, fixed_steps)
        self.eval_on_finish, self.keep_models = eval_on_finish, keep_models
        self.timeout_s = timeout_s
        self._settings = {
            "num_fewshot": num_fewshot,
            "limit": limit,
            "batch_size": batch_size,
            "device": device,
            "dtype": dtype,
            "include_defaults": include_defaults,
            "log_samples": False,
        }
        self._include_path = include_path
        self._begun_step: int | None = None
        for package, extra in (("lm_eval", "lm-eval"), ("transformers", "transformers")):
            if importlib.util.find_spec(package) is None:
                raise missing_extra(package, extra, kind)

    def on_init_end(self, args: Any, state: TrainerState, control: TrainerControl) -> None:
        self._begun_step = None
        on_all_ranks(partial(self._check, state.is_world_process_zero))

    def _check(self, leads: bool) -> None:
        if leads:
            unknown = self._call(None).get("unknown")
            if unknown:
                raise ConfigError(
                    f"{type(self).__name__}: tasks: the harness has no {', '.join(unknown)}; "
                    "`lm-eval ls tasks` lists what it has"
                )

    def on_step_settled(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        step = state.global_step
        by_interval = self.eval_interval is not None and step % self.eval_interval == 0
        if by_interval or step in self.fixed_steps:
            self._begin(args, state, trainer)

    def on_run_settled(
        self, args: Any, state: TrainerState, control: TrainerControl, trainer: Any
    ) -> None:
        if self.eval_on_finish and self._begun_step != state.global_step:
            self._begin(args, state, trainer)

    def _begin(self, args: Any, state: TrainerState, trainer: Any) -> None:
        """Write the model on all ranks, then start the harness on the first."""
        self._begun_step = step = state.global_step
        folder = Path(args.output_dir, "harness", f"step-{step}")
        with trainer.evaluation_weights():
            trainer.save_model(str(folder), overwrite_output_dir=True)
        if not state.is_world_process_zero:
            return

        def take(found: dict[str, Any]) -> None:
            for metric, value in figures_of(found["results"]).items():
                name = f"eval/{self.name_of_metrics}/{metric}"
                trainer.record_metric(name, value, merge_strategy="latest", step=step)

        trainer.run_bookkeeping_op(
            self._evaluate,
            folder,
            cb=take,
            op_name=f"lm-eval of step {step}",
            soft_timeout=self.timeout_s,
            hard_timeout=self.timeout_s + 60,
        )

    def _evaluate(self, folder: Path) -> dict[str, Any]:
        try:
            return self._call(folder)
        finally:
            if not self.keep_models:
                shutil.rmtree(folder, ignore_errors=True)

    def _call(self, model: Path | None) -> dict[str, Any]:
        """What the program gives for a model; without one, which tasks there are not."""
        with tempfile.TemporaryDirectory(prefix="headway-harness-") as place:
            settings = {
                **self._settings,
                "model": None if model is None else str(model.absolute()),
                "tasks": self._name_tasks(Path(place)),
                "include_path": [p for p in (self._include_path, place) if p is not None],
            }
            return run_program(settings, Path(place), self.timeout_s)

    def _name_tasks(self, place: Path) -> list[str]:
        """The harness's names of the tasks; those of Headway are described to it first."""
        names = []
        for task in self.tasks:
            if not task.endswith(".jsonl"):
                names.append(task)
                continue
            described = describe_task(task)
            path = place / f"{described['task']}.yaml"
            path.write_text(json.dumps(described), encoding="utf-8")  # which is YAML as well
            names.append(described["task"])
        return names


def describe_task(path: str) -> dict[str, Any]:
    """A task file of Headway as the harness wants to have tasks described."""
    task = read_task(Path(path).stem, path)
    described = {
        "task": task.name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": str(Path(path).absolute())},
        "test_split": "train",
        "doc_to_text": "{{prompt}}",
        "target_delimiter": "",
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    if task.kind == "completion":
        return described | {
            "output_type": "loglikelihood",
            "doc_to_target": "{{completion}}",
            "metric_list": [{"metric": "acc", **mean}],
        }
    return described | {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", **mean}, {"metric": "acc_norm", **mean}],
    }


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`{task}/{metric}` of what the harness gives, without its estimates of errors."""
    figures = {}
    for task, metrics in results.items():
        for name, value in metrics.items():
            metric, comma, way = name.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not comma or not is_number or metric.endswith("_stderr"):
                continue
            figures[f"{task}/{metric}" if way == "none" else f"{task}/{metric} ({way})"] = value
    return figures


def run_program(settings: dict[str, Any], place: Path, timeout_s: float) -> dict[str, Any]:
    """Run the harness in a process of its own and read what it wrote."""
    given, target = place / "settings.json", place / "results.json"
    given.write_text(json.dumps(settings), encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name not in _OF_RANKS}
    environment.setdefault("HF_DATASETS_CACHE", str(place / "datasets"))
    command = [sys.executable, "-m", "headway.callbacks.evaluate.harness_program"]
    try:
        ended = subprocess.run(
            [*command, str(given), str(target)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"lm-eval-harness took longer than timeout_s={timeout_s}") from error
    if ended.returncode != 0 or not target.is_file():
        said = (ended.stderr or ended.stdout).strip()[-_MOST_SAID:]
        raise RuntimeError(f"lm-eval-harness failed (exit code {ended.returncode}): {said}")
    results: dict[str, Any] = json.loads(target.read_text(encoding="utf-8"))
    return results
