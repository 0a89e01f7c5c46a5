"""Where a model is built: on the host, on the device, or nowhere until a checkpoint fills it."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from headway import Trainer, TrainingArguments
from headway.errors import ConfigError
from headway.strategies.blank import build_blank, materialise
from headway.strategies.source import ModelSource
from headway.testing import tiny_dataset, tiny_decoder, tiny_llama


class Model(nn.Module):
    """One of a user's own: a tie, a buffer that is stored and one that is not."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(258, 16)
        self.linear = nn.Linear(16, 16)
        self.head = nn.Linear(16, 258, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("count", torch.full((1,), 3.0))
        self.register_buffer("scale", torch.linspace(1, 2, 16), persistent=False)

    def forward(self, input_ids, labels=None):
        return {"logits": self.head(self.linear(self.embed(input_ids)) * self.scale * self.count)}


class Stray(Model):
    def __init__(self):
        super().__init__()
        self.table = [torch.ones(16)]


MAKERS = {
    "decoder": lambda: tiny_decoder(tie_embeddings=True),
    "llama": lambda: tiny_llama(tie_word_embeddings=True),
    "own": Model,
}


def make(folder, model_init, max_steps, **arguments):
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "logging_steps": 1,
        "save_strategy": "steps",
        "save_steps": 2,
        "save_async": False,
        "seed": 0,
        "use_cpu": True,
        **arguments,
    }
    return Trainer(
        args=TrainingArguments(max_steps=max_steps, **settings),
        model_init=model_init,
        train_dataset=tiny_dataset(8, sequence_length=8),
        default_callbacks=False,
    )


def losses(trainer):
    return {r["step"]: r["loss"] for r in trainer.state.log_history if "loss" in r}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_resumed_run_draws_no_weights_and_is_the_same(tmp_path, kind):
    make_model, drawn = MAKERS[kind], []

    def model_init():
        model = make_model()
        drawn.append(next(model.parameters()).device.type)
        return model

    whole = make(tmp_path / "whole", make_model, 4)
    whole.train()
    make(tmp_path / "part", make_model, 4, stop_at=2).train()
    resumed = make(tmp_path / "part", model_init, 4, construct_model_on="meta")
    resumed.train()
    assert set(drawn) == {"meta"}, "no weight was ever made on the host"
    assert losses(resumed)[3] == losses(whole)[3] and losses(resumed)[4] == losses(whole)[4]
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    assert len(list(resumed.model.parameters())) == len(list(whole.model.parameters()))


def test_without_a_checkpoint_the_model_is_built_in_the_ordinary_way(tmp_path, caplog):
    plain = make(tmp_path / "plain", tiny_decoder, 2)
    plain.train()
    with caplog.at_level(logging.INFO):
        meta = make(tmp_path / "meta", tiny_decoder, 2, construct_model_on="meta")
        meta.train()
    assert "there is no checkpoint to fill the model from" in caplog.text
    assert losses(meta) == losses(plain)


def test_a_resume_that_leaves_out_the_model_draws_it(tmp_path):
    make(tmp_path, tiny_decoder, 2).train()
    trainer = make(
        tmp_path, tiny_decoder, 4, construct_model_on="meta", load_components=["trainer", "dataset"]
    )
    trainer.train()
    assert all(loss < 100 for loss in losses(trainer).values())


def test_a_tensor_that_no_checkpoint_holds_is_told(tmp_path, caplog):
    make(tmp_path, Stray, 2).train()
    trainer = make(tmp_path, Stray, 3, construct_model_on="meta")
    trainer.train()
    assert "table is a tensor that no checkpoint holds; the model is built" in caplog.text
    assert trainer.model.table[0].device.type == "cpu"


def test_random_numbers_are_as_before():
    torch.manual_seed(1)
    source = ModelSource(make=tiny_llama)
    before = torch.get_rng_state()
    model = build_blank(source)
    materialise(model, source, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    name, expected = next(iter(tiny_llama().named_buffers()))
    assert torch.equal(dict(model.named_buffers())[name], expected)


def test_on_the_device(tmp_path):
    seen = []

    def model_init():
        seen.append(torch.get_default_device())
        return tiny_decoder()

    trainer = make(tmp_path, model_init, 2, construct_model_on="device")
    trainer.train()
    assert seen == [torch.device("cpu")]
    source = ModelSource(make=tiny_decoder, device=torch.device("meta"))
    with pytest.raises(ConfigError, match="on the meta device"):  # it went there
        source.build()


@pytest.mark.parametrize("place", ["device", "meta"])
def test_a_ready_model_is_refused(tmp_path, place):
    args = TrainingArguments(output_dir=str(tmp_path), construct_model_on=place, use_cpu=True)
    with pytest.raises(ConfigError, match=f"construct_model_on='{place}' needs model_init"):
        Trainer(args=args, model=tiny_decoder())
    with pytest.raises(ConfigError, match="takes model_init and no ready model"):
        Trainer(args=args, model=tiny_decoder(), model_init=tiny_decoder)


def test_an_unknown_place_is_refused():
    with pytest.raises(ConfigError, match="did you mean 'device'"):
        TrainingArguments(construct_model_on="devise")
