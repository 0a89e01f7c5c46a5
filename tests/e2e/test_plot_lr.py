"""`headway plot-lr` shows the schedule that the training then follows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli.main import main
from headway.config.load import load_run
from headway.testing import assert_no_import

RUN: dict[str, Any] = {
    "model": {"vocab_size": 258, "hidden_size": 16, "num_layers": 1, "num_heads": 2},
    "tokenizer": "bytes",
    "data": {
        "train": {
            "class_path": "SyntheticDataset",
            "init_args": {"num_samples": 20, "sequence_length": 16, "vocab_size": 258},
        }
    },
    "optimizer_groups": {
        "norms": {"regex": "norm", "config": {"lr_scheduler": {"type": "constant"}}},
        "embeddings": {"regex": "embed", "config": {"weight_decay": 0.0}},
    },
    "args": {
        "output_dir": "out",
        "max_steps": 12,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"min_ratio": 0.1},
        "use_cpu": True,
        "save_strategy": "no",
    },
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(json.dumps(RUN))  # JSON is YAML
    return tmp_path


def plot(capsys, *words: str, code: int = 0) -> str:
    assert main(["plot-lr", "run.yaml", *words]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def trained_rates(*overrides: str) -> dict[str, list[float]]:
    """The rates of every update of the run itself, by group."""
    from headway.trainers.from_config import build_trainer

    trainer = build_trainer(load_run("run.yaml", overrides))
    rates: dict[str, list[float]] = {}

    class Watch:
        def on_step_begin(self, optimizer):
            names = [group["group_name"] for group in optimizer.param_groups]
            for name, group in zip(names, optimizer.param_groups):
                if names.count(name) > 1:
                    name += f" ({group['optimizer_class']})"
                rates.setdefault(name, []).append(group["lr"])

    trainer.add_callback(Watch())
    trainer.train()
    return rates


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("--args.max_steps=-1", "--args.num_train_epochs=1.3"),
        ("--args.lr_scheduler_unit=tokens", "--args.warmup_steps=0", "--args.warmup_ratio=0.25"),
        ("--args.lr_scheduler_type=wsd", "--args.warmup_steps=0"),
        (
            "--optimizer_groups.heads={regex: head, factory: {class_path: torch.optim.SGD, "
            "init_args: {lr: 0.5}}}",
            "--optimizer_groups.nothing={regex: adapter}",
            "--args.no_decay_on=[norm, bias]",
        ),
        ("--args.optim=muon", "--args.optim_args={adamw_lr: 0.002}"),
        ("--optimizer={class_path: torch.optim.SGD, init_args: {lr: 0.3}}",),
    ],
    ids=["steps", "epochs", "tokens", "wsd", "factory", "muon", "optimizer"],
)
def test_it_shows_what_the_training_does(here, capsys, overrides):
    shown = json.loads(plot(capsys, "--json", *overrides))
    trained = trained_rates(*overrides, "--default_callbacks=false")
    assert {name for part in shown["schedules"] for name in part["groups"]} == set(trained)
    stride = shown["tokens_per_step"] if shown["unit"] == "tokens" else 1
    for part in shown["schedules"]:
        at = dict(zip(part["progress"], part["learning_rate"]))
        for name in part["groups"]:
            for step, rate in enumerate(trained[name]):
                assert at[step * stride] == pytest.approx(rate, abs=1e-15), (name, step)
    assert {len(rates) for rates in trained.values()} == {shown["steps"]}


def test_text_has_a_line_per_schedule_and_its_key_points(here, capsys):
    text = plot(capsys)
    assert "* norms: constant" in text and "o embeddings, __default__: cosine" in text
    assert " 0.01 |" in text and "12 steps" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["first", "update", "3.3333e-03", "at", "0", "steps"] in lines
    assert ["warm-up,", "last", "update", "1.0000e-02", "at", "2", "steps"] in lines
    assert ["decay", "begins", "1.0000e-02", "at", "3", "steps"] in lines
    assert ["end", "1.0000e-03", "at", "12", "steps"] in lines
    assert not list(here.glob("out*"))


def test_pictures(here, capsys):
    plot(capsys, "--output", "plots/lr.png")
    assert (here / "plots/lr.png").read_bytes().startswith(b"\x89PNG")
    out = plot(capsys, "--output=lr.html")
    page = (here / "lr.html").read_text()
    assert "drawn into lr.html" in out and "embeddings, __default__: cosine" in page


def test_a_scheduler_of_torch_is_tried_out(here, capsys):
    words = [
        "--lr_scheduler={class_path: OneCycleLR, init_args: {max_lr: 0.01, total_steps: 13}}",
        "--optimizer_groups.norms=null",
        "--json",
    ]
    (part,) = json.loads(plot(capsys, *words))["schedules"]
    assert max(part["learning_rate"]) == pytest.approx(0.01, rel=0.05)
    assert part["learning_rate"][0] == pytest.approx(0.01 / 25)


def test_a_schedule_without_an_end(here, capsys):
    words = ["--args.lr_scheduler_type=infinite", "--args.train_for=1h", "--args.max_steps=-1",
             "--args.lr_scheduler_kwargs={cooldown_steps: 10, constant_ratio: 0.5}"]  # fmt: skip
    assert "shown until" in plot(capsys, *words)
    assert "30 steps" in plot(capsys, *words, "--steps=30")
    assert "needs to know how many steps" in plot(
        capsys, "--args.train_for=1h", "--args.max_steps=-1", code=2
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output=lr.pdf"], "unknown ending '.pdf'"),
        (["--steps=0"], "--steps: must be 1 or more"),
        (["--args.lr_scheduler_type=cosin"], "did you mean 'cosine'"),
        (["--args.lr_scheduler_kwargs={min_rato: 0.1}"], "did you mean 'min_ratio'"),
        (["--args.warmup_steps=13"], "longer than the training of 12 steps"),
        (["--args.warmup_ratio=0.5"], "give one of them"),
        (["--optimizer_groups.norms.config.lr_scheduler.type=line"], "optimizer_groups.norms"),
        (["--optimizer_groups.norms.config.lrr=0.1"], "did you mean 'lr'?"),
        (["--optimizer_groups.norms.confg={lr: 0.1}"], "did you mean 'config'?"),
    ],
)
def test_mistakes(here, capsys, words, message):
    assert message in plot(capsys, *words, code=2)


def test_no_torch_is_needed_where_the_arguments_tell_length_and_rates(here):
    assert_no_import(["headway", "plot-lr", "run.yaml", "--optimizer_groups=null"], cwd=here)


def test_a_missing_package_is_named_before_any_work(here, capsys, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "plotly" else real(name, *a)
    )
    assert "headway[plot]" in plot(capsys, "--output=lr.html", code=2)
