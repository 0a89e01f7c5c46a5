"""What ConfigSaverCallback puts into checkpoints."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.callbacks import ConfigSaverCallback
from headway.callbacks.log import config_saver
from headway.checkpoint import read_manifest
from headway.config.snapshot import redact
from headway.engine.events import TrainerCallback
from headway.errors import ConfigError
from headway.testing import tiny_trainer

SAVING: dict[str, Any] = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}


class Tracker(TrainerCallback):
    config: Any = None


def test_a_checkpoint_holds_the_configuration_under_its_manifest(tmp_path: Path) -> None:
    saver, tracker = ConfigSaverCallback(), Tracker()
    trainer = tiny_trainer(tmp_path, [saver, tracker], **SAVING)
    saver.config = {
        "model": {"size": 3, "tokenizer": "bytes"}, "api_key": "abc",
        "slack_webhook_url": "https://x",
        "hub_token": "t", "auth": {"password": "p"}, "credentials": {"user": "u"},
        "nan": float("nan"),
    }  # fmt: skip
    trainer.train()
    checkpoint = tmp_path / "out/checkpoint-1"
    config = json.loads((checkpoint / "run/experiment/config.json").read_text())
    assert config["model"] == {"size": 3, "tokenizer": "bytes"} and config["nan"] == "nan"
    hidden = "<redacted>"
    assert config["api_key"] == config["slack_webhook_url"] == config["hub_token"] == hidden
    assert config["auth"]["password"] == config["credentials"]["user"] == hidden
    environment = json.loads((checkpoint / "run/experiment/environment.json").read_text())
    assert "torch" in environment["packages"] and environment["versions"]["headway"]
    assert "git" in environment and "headway_git" in environment
    files = set(read_manifest(checkpoint).files)
    assert {"run/experiment/config.json", "run/experiment/environment.json"} <= files
    # The model's own configuration and the run's are as they were.
    assert json.loads((checkpoint / "config.json").read_text())["vocab_size"] == 258
    assert json.loads((checkpoint / "run/config.json").read_text())["args"]["max_steps"] == 1
    assert tracker.config["model"]["size"] == 3 and tracker.config["api_key"] == hidden


def test_looking_at_the_packages_holds_nothing_up_and_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stepped, looked = threading.Event(), []

    def look() -> dict[str, Any]:
        assert stepped.wait(30)  # a step is done meanwhile
        looked.append(threading.current_thread())
        return {"packages": {"a": "1"}}

    class Step(TrainerCallback):
        def on_step_end(self) -> None:
            stepped.set()

    monkeypatch.setattr(config_saver, "_describe_environment", look)
    options = {**SAVING, "max_steps": 2}
    tiny_trainer(tmp_path, [ConfigSaverCallback(), Step()], **options).train()
    assert len(looked) == 1 and looked[0] is not threading.main_thread()
    for step in (1, 2):
        file = tmp_path / f"out/checkpoint-{step}/run/experiment/environment.json"
        assert json.loads(file.read_text()) == {"packages": {"a": "1"}}


def test_without_a_configuration_it_is_the_run_s_own(tmp_path: Path) -> None:
    tiny_trainer(tmp_path, [ConfigSaverCallback(fname="mine.json")], **SAVING).train()
    saved = json.loads((tmp_path / "out/checkpoint-1/run/experiment/mine.json").read_text())
    assert saved["args"]["max_steps"] == 1


def test_paths_of_the_data(caplog: pytest.LogCaptureFixture) -> None:
    inner = SimpleNamespace(files=[SimpleNamespace(path=Path("b.tokens"))])
    mixed = SimpleNamespace(sources=[SimpleNamespace(files=["a.txt"]), inner, inner])
    args = SimpleNamespace(to_dict=dict)

    def paths(saver: ConfigSaverCallback, data: Any) -> str | None:
        trainer = SimpleNamespace(callbacks={}, train_dataset=data, eval_dataset=None)
        saver.on_init_end(args, None, None, trainer)  # type: ignore[arg-type]
        return saver.checkpoint_files(args, None).get("experiment/data_paths.txt")  # type: ignore[arg-type]

    assert paths(ConfigSaverCallback(), mixed) == "a.txt\nb.tokens\n"
    assert paths(ConfigSaverCallback(save_data_paths=False), mixed) is None
    with caplog.at_level(logging.WARNING):
        assert paths(ConfigSaverCallback(), [1]) is None
        assert not caplog.text
        assert paths(ConfigSaverCallback(save_data_paths=True), [1]) is None
        assert "does not tell its files" in caplog.text


def test_a_configuration_set_late_is_in_the_next_checkpoint(tmp_path: Path) -> None:
    saver, tracker = ConfigSaverCallback(), Tracker()

    class Late(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            saver.config = {"late": state.global_step}

    tiny_trainer(tmp_path, [saver, tracker, Late()], **SAVING).train()
    saved = json.loads((tmp_path / "out/checkpoint-1/run/experiment/config.json").read_text())
    assert saved == {"late": 1} and tracker.config == {"late": 1}


def test_mistakes_are_refused(tmp_path: Path) -> None:
    for arguments in ({"fname": "a/b.json"}, {"fname": ""}, {"data_paths_fname": "../x"}):
        with pytest.raises(ConfigError, match="name of a file without a folder"):
            ConfigSaverCallback(**arguments)
    with pytest.raises(ConfigError, match="must differ"):
        ConfigSaverCallback(fname="environment.json")
    with pytest.raises(ConfigError, match="save_data_paths must be"):
        ConfigSaverCallback(save_data_paths="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config must be a mapping"):
        ConfigSaverCallback().config = [1]  # type: ignore[assignment]
    two = {"one": ConfigSaverCallback(), "two": ConfigSaverCallback("b.json")}
    trainer = tiny_trainer(tmp_path, [], **SAVING)
    for name, callback in two.items():
        trainer.add_callback(callback, name)
    with pytest.raises(ConfigError, match="one is enough"):
        trainer.train()


def test_names_that_only_look_like_secrets_stay() -> None:
    plain = {"pad_token": "<pad>", "tokenizer": "bytes", "max_tokens": 5, "keyboard": "x"}
    assert redact(plain) == plain
