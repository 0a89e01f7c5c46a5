"""What InfoCallback tells when a run begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.callbacks import InfoCallback
from headway.callbacks.log import train_info
from headway.callbacks.log.train_info import alt_repr, format_mapping, format_train_info
from headway.engine.events import TrainerCallback
from headway.engine.state import TrainerState
from headway.errors import ConfigError
from headway.testing import tiny_decoder, tiny_trainer


def told(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)


def test_a_run_tells_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = tiny_trainer(
        tmp_path, [InfoCallback()], max_steps=3, gradient_accumulation_steps=2, num_samples=40
    )
    trainer.train()
    out, err = capsys.readouterr()
    facts = told(err)
    assert out == ""
    assert facts["model"] == "Decoder" and facts["max_steps"] == "3" and facts["seed"] == "0"
    assert facts["total_examples"] == "40" and facts["total_train_samples"] == "12"
    assert facts["total_train_batch_size"] == "4" and facts["gradient_accumulation_steps"] == "2"
    assert facts["precision"] == "parameters float32"
    assert facts["parallel_layout"].endswith("1 process") and "CPUs" in facts["hardware"]
    assert "torch" in err and "git_commit" in err and trainer.run_id in err
    total = int(facts["total_parameters"].replace(",", ""))
    embedding = int(facts["embedding_parameters"].replace(",", ""))
    assert embedding == 258 * 32
    assert int(facts["non_embedding_parameters"].replace(",", "")) == total - embedding


def test_the_rest_is_put_together_only_for_verbose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(state: Any) -> Any:
        raise AssertionError("nobody asked for it")

    with monkeypatch.context() as patched:
        patched.setattr(train_info, "_describe_state", refuse)
        tiny_trainer(tmp_path, [InfoCallback()], max_steps=1).train()
    assert "embed_tokens" not in capsys.readouterr().err
    tiny_trainer(tmp_path / "b", [InfoCallback(verbose=True)], max_steps=1).train()
    err = capsys.readouterr().err
    assert "lr_scheduler:" in err and "'logging_steps': 1" in err and "Linear(" in err


def test_a_failure_to_tell_costs_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Any:
        raise RuntimeError("no versions")

    monkeypatch.setattr(train_info, "versions", fail)
    seen: list[int] = []

    class Watch(TrainerCallback):
        def on_step_end(self, state: Any) -> None:
            seen.append(state.global_step)

    tiny_trainer(tmp_path, [InfoCallback(), Watch()], max_steps=2).train()
    assert seen == [1, 2]


def test_missing_parts_are_left_out() -> None:
    info, extra = format_train_info(SimpleNamespace(output_dir="out"), TrainerState())
    assert info["output_dir"] == "out" and extra["model"] is None
    info, _ = format_train_info(
        SimpleNamespace(output_dir="out"), TrainerState(), model=tiny_decoder(tie_embeddings=True)
    )
    assert info["tied_embeddings"] is True


def test_other_ranks_tell_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    state = TrainerState(is_world_process_zero=False)
    InfoCallback().on_train_begin(SimpleNamespace(output_dir="out"), state, None)  # type: ignore[arg-type]
    assert capsys.readouterr() == ("", "")


def test_mappings_are_written_a_line_each() -> None:
    text = format_mapping({"a": 12345, "b": 0.123456, "c": "x" * 81, "d": [1], "e": True})
    assert text.splitlines() == [
        "a: 12,345",
        "b: 0.1235",
        "c:",
        "    " + "x" * 81,
        "d: [1]",
        "e: True",
    ]


def test_objects_without_a_text_show_what_they_store_and_nothing_is_asked() -> None:
    class Plain:
        def __init__(self) -> None:
            self.size, self._hidden = 3, 4

        @property
        def expensive(self) -> int:
            raise AssertionError

    assert alt_repr(Plain()) == {"class": "Plain", "size": 3}
    assert alt_repr([1]) == [1]


def test_secrets_stay_out_of_the_arguments() -> None:
    args = SimpleNamespace(output_dir="out", to_dict=lambda: {"api_key": "abc", "lr": 1})
    _, extra = format_train_info(args, TrainerState())
    assert extra["args"] == {"api_key": "<redacted>", "lr": 1}


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="verbose must be true or false"):
        InfoCallback(verbose="yes")  # type: ignore[arg-type]
