"""Models inside a wrapper that passes everything on, as PEFT does: folders tell no untruth."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from headway import Trainer, TrainingArguments
from headway.models.hf import hf_config_of
from headway.testing import tiny_dataset

transformers = pytest.importorskip("transformers")


class Adapted(nn.Module):
    """Stands for a PeftModel: other tensor names than the model inside, all else from there."""

    def __init__(self, base):
        super().__init__()
        self.base_model = base
        base.requires_grad_(False)
        self.adapter = nn.Linear(1, base.config.vocab_size, bias=False)
        self.peft_config = {"default": {"r": 1}}

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        logits = self.base_model(input_ids=input_ids, attention_mask=attention_mask).logits
        return {"logits": logits + self.adapter.weight[:, 0]}

    def save_pretrained(self, directory):
        torch.save(self.adapter.state_dict(), f"{directory}/adapter_model.bin")


def adapted():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(vocab_size=256, num_attention_heads=2, **shape)
    return Adapted(transformers.LlamaForCausalLM(config))


@pytest.fixture
def trained(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path / "run"), max_steps=2, use_cpu=True)
    trainer = Trainer(model=adapted(), args=args, train_dataset=tiny_dataset(8, 8))
    trainer.train()
    return trainer


def test_a_wrapper_has_not_the_configuration_of_what_is_inside():
    model = adapted()
    assert model.config_class is transformers.LlamaConfig
    assert hf_config_of(model) is None and hf_config_of(model.base_model) is not None


def test_transformers_does_not_take_its_checkpoint_for_a_model(trained, tmp_path):
    folder = tmp_path / "run" / "checkpoint-2"
    assert folder.is_dir()
    with pytest.raises((OSError, ValueError)):
        transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_save_model_leaves_the_form_of_the_folder_to_it(trained, tmp_path):
    trained.save_model(str(tmp_path / "model"))
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["adapter_model.bin"]
