"""Samples of a model's text: what is written, when, and that training does not feel it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway import Trainer, TrainerCallback
from headway.callbacks import ResumableSummaryWriter, TextgenCallback
from headway.data.tokenizer import ByteTokenizer
from headway.errors import ConfigError
from headway.testing import tiny_dataset, tiny_decoder, tiny_llama

PROMPTS = ["the boat", "a", "the tide finds the harbour"]
QUIET: dict[str, Any] = {"max_new_tokens": 6, "console": False}


def trainer(folder: Path, callbacks: list[Any], model: Any = tiny_decoder, **more: Any) -> Trainer:
    tokenizer = more.pop("processing_class", ByteTokenizer())
    settings = {
        "output_dir": str(folder / "out"), "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2, "logging_steps": 1, "save_strategy": "no", "seed": 0,
        "use_cpu": True, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4, **more,
    }  # fmt: skip
    return Trainer(
        args=settings,
        model_init=model,
        train_dataset=tiny_dataset(16, sequence_length=8),
        eval_dataset=tiny_dataset(4, sequence_length=8, seed=1),
        processing_class=tokenizer,
        callbacks=callbacks,
        default_callbacks=False,
    )


def records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "out/eval_text.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def steps(folder: Path) -> list[int]:
    return [record["global_step"] for record in records(folder)]


def weights(run: Trainer) -> dict[str, torch.Tensor]:
    assert run.model is not None
    return {name: value.clone() for name, value in run.model.state_dict().items()}


# Where samples go


def test_samples_reach_file_tensorboard_and_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    mine = TextgenCallback(tmp_path / "tb", PROMPTS, max_new_tokens=5)
    trainer(tmp_path, [mine]).train()
    first, second = records(tmp_path)
    assert (first["type"], first["global_step"], second["global_step"]) == ("text", 2, 4)
    assert [sample["prompt"] for sample in first["samples"]] == PROMPTS
    assert all(isinstance(sample["text"], str) for sample in first["samples"])

    read = EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    events = read.Tensors("eval-text/text_summary")
    assert [event.step for event in events] == [2, 4]
    shown = events[0].tensor_proto.string_val[0].decode()
    parts = shown.split("\n\n---\n\n")
    wanted = [f"{s['prompt']} [START] {s['text']}" for s in first["samples"]]
    assert parts == wanted
    err = capsys.readouterr().err
    assert "[step 2, sample 1 of 3] the boat [START] " in err


def test_what_a_terminal_would_obey_is_not_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = TextgenCallback(None, ["a"])
    mine._continue = lambda *args: ["red \x1b[31m\x07, next\nline"]  # type: ignore[method-assign]
    trainer(tmp_path, [mine]).train()
    assert "red \ufffd[31m\ufffd, next\nline" in capsys.readouterr().err
    assert records(tmp_path)[0]["samples"][0]["text"].startswith("red \x1b[31m")


def test_the_run_s_own_writer_is_taken(tmp_path: Path) -> None:
    writer = ResumableSummaryWriter(tmp_path / "tb")
    trainer(tmp_path, [writer, TextgenCallback(None, PROMPTS, **QUIET)]).train()
    assert list((tmp_path / "tb").iterdir())


def test_a_sample_is_what_the_model_would_write_alone(tmp_path: Path) -> None:
    """Left padding must not be seen, and the prompt is not part of the text."""
    options = {"do_sample": False}
    mine = TextgenCallback(None, PROMPTS, options, **QUIET)
    run = trainer(tmp_path, [mine])
    run.train()
    coder, model = ByteTokenizer(), run.strategy.unwrap()  # type: ignore[union-attr]
    for sample in records(tmp_path)[-1]["samples"]:
        row = torch.tensor([coder.encode(sample["prompt"])])
        alone = model.generate(row, do_sample=False, max_new_tokens=6, eos_token_id=256)
        assert sample["text"] == coder.decode(alone[0, row.shape[1] :].tolist())


def test_batches_and_order_of_prompts(tmp_path: Path) -> None:
    options = {"do_sample": False}
    texts = []
    for size in (1, 2, 8):
        folder = tmp_path / str(size)
        trainer(folder, [TextgenCallback(None, PROMPTS, options, batch_size=size, **QUIET)]).train()
        texts.append(records(folder)[-1]["samples"])
    assert texts[0] == texts[1] == texts[2]


# Training is the same


class Dropping(nn.Module):
    """Draws random numbers in every training step, and takes no attention mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(258, 16), nn.Dropout(0.3)
        self.head = nn.Linear(16, 258)
        self.seen_lengths: list[tuple[int, int]] = []

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.seen_lengths.append((input_ids.shape[0], input_ids.shape[1]))
        logits = self.head(self.drop(self.embed(input_ids)))
        if labels is None:  # as a model may that draws its noise at any time
            return {"logits": logits + torch.rand(())}
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


@pytest.mark.parametrize("model", [Dropping, tiny_llama, lambda: tiny_decoder(dropout=0.2)])
def test_training_is_bitwise_the_same_with_samples(tmp_path: Path, model: Any) -> None:
    plain = trainer(tmp_path / "plain", [], model)
    plain.train()
    mine = TextgenCallback(None, PROMPTS, **QUIET)
    watched = trainer(tmp_path / "watched", [mine], model)
    watched.train()
    assert len(records(tmp_path / "watched")) == 2 and not watched.bus.disabled
    one, two = weights(plain), weights(watched)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert watched.model is not None and watched.model.training


def test_equal_weights_give_equal_samples_and_seeds_differ(tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate((1, 1, 2)):
        folder = tmp_path / str(number)
        mine = TextgenCallback(None, PROMPTS, {"temperature": 2.0}, seed=seed, **QUIET)
        trainer(folder, [mine], learning_rate=0.0).train()
        found.append([record["samples"] for record in records(folder)])
    assert found[0] == found[1] and found[0][0] == found[0][1]
    assert found[0] != found[2]


def test_prompts_of_a_model_without_mask_are_not_padded(tmp_path: Path) -> None:
    run = trainer(tmp_path, [TextgenCallback(None, PROMPTS, **QUIET)], Dropping)
    run.train()
    model = run.strategy.unwrap()  # type: ignore[union-attr]
    assert (1, len(PROMPTS[1])) in model.seen_lengths
    assert not any(size == 3 for size, _ in model.seen_lengths)


@pytest.mark.parametrize("fails", [False, True])
def test_compiled_models_are_called_eagerly_and_stay_compiled(tmp_path: Path, fails: bool) -> None:
    calls: list[str] = []
    phase = ["train"]

    def backend(graph: Any, inputs: Any) -> Any:
        calls.append(f"compile {phase[0]}")

        def run(*args: Any) -> Any:
            calls.append(f"run {phase[0]}")
            return graph.forward(*args)

        return run

    class Phases(TrainerCallback):
        priority = 1

        def on_evaluate(self) -> None:
            phase[0] = "sample"

        def on_step_begin(self) -> None:
            phase[0] = "train"

    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    def build() -> nn.Module:
        model = Dropping()
        model.head = Inner(16, 258)
        model.head.compile(backend=backend)
        return model

    mine = TextgenCallback(None, PROMPTS, **QUIET)
    if fails:
        mine._continue = _fail  # type: ignore[method-assign]
    run = trainer(tmp_path, [Phases(), mine], build)
    run.train()
    assert not [call for call in calls if call.endswith("sample")]
    assert calls[-1] == "run train" and bool(run.bus.disabled) == fails


def _fail(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no tokens today")


def test_an_error_costs_the_samples_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = TextgenCallback(None, PROMPTS, **QUIET)
    mine._continue = _fail  # type: ignore[method-assign]
    run = trainer(tmp_path, [mine])
    assert run.train().global_step == 4
    assert list(run.bus.disabled) == ["TextgenCallback"] and "no tokens today" in caplog.text


# When


def test_samples_keep_their_distance_and_a_resume_does_not_repeat_them(tmp_path: Path) -> None:
    common: dict[str, Any] = {"eval_steps": 1, "save_strategy": "steps", "save_steps": 4}
    mine = TextgenCallback(None, PROMPTS, generation_steps=3, **QUIET)
    trainer(tmp_path, [mine], max_steps=5, **common).train()
    assert steps(tmp_path) == [1, 4]
    again = TextgenCallback(None, PROMPTS, generation_steps=3, **QUIET)
    trainer(
        tmp_path, [again], max_steps=8, resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"),
        **common,
    ).train()  # fmt: skip
    assert steps(tmp_path) == [1, 4, 7]


def test_records_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    common: dict[str, Any] = {"eval_steps": 1, "save_strategy": "steps", "save_steps": 2}
    for resume in (False, str(tmp_path / "out/checkpoint-2")):
        mine = TextgenCallback(None, PROMPTS, **QUIET)
        trainer(tmp_path, [mine], resume_from_checkpoint=resume, **common).train()
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_state_goes_round_and_strange_state_is_taken(tmp_path: Path) -> None:
    mine = TextgenCallback(None, PROMPTS, **QUIET)
    trainer(tmp_path, [mine]).train()
    saved = json.loads(json.dumps(mine.state_dict()))
    other = TextgenCallback(None, PROMPTS, **QUIET)
    other.load_state_dict(saved)
    assert other.state_dict() == saved and saved["version"] == 1
    other.load_state_dict({})
    assert other.state_dict()["last_step"] is None


def test_a_run_without_evaluations(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = TextgenCallback(None, PROMPTS, generation_steps=2, **QUIET)
    trainer(tmp_path / "a", [mine], eval_strategy="no", max_steps=5).train()
    assert steps(tmp_path / "a") == [2, 4]
    trainer(tmp_path / "b", [TextgenCallback(None, PROMPTS, **QUIET)], eval_strategy="no").train()
    assert steps(tmp_path / "b") == [] and "no evaluations" in caplog.text


def test_an_evaluation_outside_of_a_run_leaves_the_file_alone(tmp_path: Path) -> None:
    mine = TextgenCallback(None, PROMPTS, **QUIET)
    run = trainer(tmp_path, [mine])
    run.train()
    run.evaluate()
    trainer(tmp_path, [TextgenCallback(None, PROMPTS, **QUIET)]).evaluate()
    assert steps(tmp_path) == [2, 4]


# Configs, tokenizers, limits


@pytest.mark.parametrize("model", [tiny_decoder, tiny_llama])
def test_ids_and_length_in_the_config_come_first(tmp_path: Path, model: Any) -> None:
    config = {
        "do_sample": False, "max_new_tokens": 3, "eos_token_id": list(range(258)),
        "pad_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    mine = TextgenCallback(None, PROMPTS, config, console=False)
    run = trainer(tmp_path, [mine], model)
    run.train()
    assert not run.bus.disabled
    assert [s["text"] for s in records(tmp_path)[-1]["samples"]] == ["", "", ""]  # ended at once


def test_a_pad_id_of_zero_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class ZeroPads(ByteTokenizer):
        pad_token_id = 0

    mine = TextgenCallback(None, PROMPTS, **QUIET)
    run = trainer(tmp_path, [mine], processing_class=ZeroPads())
    run.train()
    assert mine._options is not None and mine._options.pad == 0


def test_transformers_models_take_all_of_their_options(tmp_path: Path) -> None:
    config = {"do_sample": False, "num_beams": 2, "no_repeat_ngram_size": 2, "use_cache": True}
    run = trainer(tmp_path, [TextgenCallback(None, PROMPTS, config, **QUIET)], tiny_llama)
    run.train()
    assert not run.bus.disabled and steps(tmp_path) == [2, 4]
    model = run.strategy.unwrap()  # type: ignore[union-attr]
    assert model.generation_config.num_beams in (None, 1)
    bad = trainer(tmp_path, [TextgenCallback(None, PROMPTS, {"num_beam": 2}, **QUIET)], tiny_llama)
    with pytest.raises(ConfigError, match="num_beams"):
        bad.train()


def test_prompts_and_texts_share_a_short_model(tmp_path: Path) -> None:
    mine = TextgenCallback(
        None, ["x" * 500, "y"], {"do_sample": False}, max_new_tokens=200, console=False
    )
    run = trainer(tmp_path, [mine])
    run.train()
    assert not run.bus.disabled and len(records(tmp_path)) == 2


def test_a_transformers_tokenizer_and_an_empty_prompt(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ByteTokenizer().save_pretrained(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    mine = TextgenCallback(None, ["", "a  b"], {"do_sample": False}, **QUIET)
    run = trainer(tmp_path, [mine], tiny_llama, processing_class=tokenizer)
    run.train()
    assert not run.bus.disabled and len(records(tmp_path)[0]["samples"]) == 2


def test_prompts_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "prompts.yaml"
    path.write_text("- one\n- 'two: words'\n")
    assert TextgenCallback(None, path).prompts == ["one", "two: words"]
    assert TextgenCallback(None, str(path)).prompts == ["one", "two: words"]
    assert TextgenCallback(None, "Once upon a time.").prompts == ["Once upon a time."]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: 1", "must be a list of texts, got dict"),
        ("- a\n- 3", "entry 2 must be a text, got int 3"),
        ("[a", "is not YAML"),
        ("[]", "is empty"),
        (None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_prompts(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "prompts.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        TextgenCallback(None, path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompts": None}, "prompts: a list of texts"),
        ({"prompts": 3}, "got int 3"),
        ({"prompts": ["a", None]}, "entry 2 must be a text"),
        ({"generation_steps": 0}, "generation_steps: 0 given"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 given"),
        ({"generation_config": {"max_new_tokens": -1}}, "generation_config.max_new_tokens: -1"),
        ({"generation_config": "greedy"}, "generation_config: 'greedy' given"),
        ({"seed": -1}, "seed: -1 given"),
        ({"batch_size": 0}, "batch_size: 0 given"),
        ({"console": "yes"}, "console: 'yes' given"),
        ({"summary_writer": 3}, "summary_writer: 3 given"),
        ({"file_name": "a/b"}, "without a folder"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextgenCallback(**{"prompts": PROMPTS, **options})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"top_q": 3}, "did you mean 'top_p'"),
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": "hot"}, "generation_config"),
        ({"num_return_sequences": 2}, "continued once"),
        ({"max_length": 20}, "max_length: .*give max_new_tokens"),
    ],
)
def test_bad_configs_end_the_run_before_it_starts(
    tmp_path: Path, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(tmp_path, [TextgenCallback(None, PROMPTS, config, **QUIET)]).train()


def test_a_tokenizer_is_needed(tmp_path: Path) -> None:
    run = trainer(tmp_path, [TextgenCallback(None, PROMPTS)], processing_class=None)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        run.train()
