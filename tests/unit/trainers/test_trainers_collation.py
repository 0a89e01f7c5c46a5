"""What a model gets of a dataset's columns, as a program for Hugging Face's Trainer expects it."""

from __future__ import annotations

import pytest
import torch

from headway import Trainer, TrainingArguments
from headway.errors import ConfigError
from headway.models.hf import predicts_next_token

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")
tokenizers = pytest.importorskip("tokenizers")

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SIZES |= {"num_attention_heads": 2, "vocab_size": 32}
WORDS = ["one", "two", "three", "four", "five"]


@pytest.fixture
def tokenizer():
    vocabulary = {word: n for n, word in enumerate(["[PAD]", "[UNK]", "[MASK]", *WORDS])}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


@pytest.fixture
def data(tokenizer):
    texts = [" ".join(WORDS[: 1 + n % 5]) for n in range(16)]
    columns = {"text": texts, "label": [n % 3 for n in range(16)]}
    columns["tags"] = [[1] * (1 + n % 3) for n in range(16)]
    made = datasets.Dataset.from_dict(columns)
    return made.map(lambda rows: tokenizer(rows["text"]), batched=True)


def train(tmp_path, model, data, **given):
    args = TrainingArguments(
        output_dir=str(tmp_path / "run"), max_steps=2, use_cpu=True, save_strategy="no", seed=1
    )
    trainer = Trainer(model=model, args=args, train_dataset=data, **given)
    return trainer.train()


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def bert(kind, **more):
    return getattr(transformers, kind)(transformers.BertConfig(**SIZES, **more))


def test_their_collators_get_only_columns_that_the_model_takes(tmp_path, tokenizer, data, caplog):
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    assert train(tmp_path, llama(), data, data_collator=collator).global_step == 2
    told = [record.getMessage() for record in caplog.records]
    columns = "train_dataset: LlamaForCausalLM takes no text, tags: these columns are left out"
    assert told.count(columns) == 1


def test_a_collator_of_ones_own_gets_all_of_them(tmp_path, data):
    seen = set()

    def collate(rows):
        seen.update(*rows)
        return {
            "input_ids": torch.ones(len(rows), 2).long(),
            "labels": torch.ones(len(rows), 2).long(),
        }

    train(tmp_path, llama(), data, data_collator=collate)
    assert {"text", "tags", "label", "input_ids"} <= seen


def test_a_classifier_is_given_the_column_label(tmp_path, tokenizer, data):
    torch.manual_seed(0)
    plain = data.remove_columns(["text", "tags"])
    padding = transformers.DataCollatorWithPadding(tokenizer)
    torch.manual_seed(0)
    theirs = train(
        tmp_path, bert("BertForSequenceClassification", num_labels=3), plain, data_collator=padding
    )
    torch.manual_seed(0)
    ours = train(
        tmp_path,
        bert("BertForSequenceClassification", num_labels=3),
        plain,
        processing_class=tokenizer,
    )
    assert ours.training_loss == theirs.training_loss


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_inputs_are_no_labels_of_a_model_that_does_not_predict_the_next_token(
    tmp_path, tokenizer, data, kind
):
    plain = data.remove_columns(["text", "tags", "label"])
    with pytest.raises(ConfigError, match=f"{kind} returns no loss.*add labels"):
        train(tmp_path, bert(kind), plain, processing_class=tokenizer)


@pytest.mark.parametrize(("kind", "predicts"), [
    ("BertForMultipleChoice", False), ("BertForNextSentencePrediction", False),
    ("BertLMHeadModel", True), ("BertForMaskedLM", False),
])  # fmt: skip
def test_a_loss_without_a_name_is_judged_by_who_makes_it(kind, predicts):
    assert predicts_next_token(bert(kind)) == predicts


def test_tokens_that_were_replaced_are_no_next_tokens():
    sizes = SIZES | {"embedding_size": 16}
    electra = transformers.ElectraForPreTraining(transformers.ElectraConfig(**sizes))
    assert not predicts_next_token(electra)
    gpt2 = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)
    assert predicts_next_token(transformers.GPT2LMHeadModel(gpt2))


def test_a_model_of_ones_own_that_does_not_tell_predicts_the_next_token():
    class Own(transformers.PreTrainedModel):
        config_class = transformers.LlamaConfig

        def forward(self, input_ids, labels=None):
            return input_ids

    assert predicts_next_token(Own(transformers.LlamaConfig(**SIZES)))


def test_nor_of_an_encoder_and_a_decoder(tmp_path, tokenizer, data):
    config = transformers.T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_layers=1,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    with pytest.raises(ValueError):
        train(
            tmp_path,
            model,
            data.remove_columns(["text", "tags", "label"]),
            processing_class=tokenizer,
        )


def test_texts_that_nobody_has_tokenised_are_told(tmp_path, tokenizer, data):
    texts = data.select_columns(["text"])
    collator = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False)
    for given in ({"data_collator": collator}, {"processing_class": tokenizer}):
        with pytest.raises(ConfigError, match=r"train_dataset.* text.*LlamaForCausalLM.*input_ids"):
            train(tmp_path, llama(), texts, **given)


def test_a_classifier_of_pictures_is_given_lists_of_numbers_and_the_column_label(tmp_path):
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.ViTConfig(**shape, num_attention_heads=2, image_size=4, patch_size=2)
    samples = [{"pixel_values": [[[0.5] * 4] * 4] * 3, "label": n % 2} for n in range(8)]
    rows = datasets.Dataset.from_list(samples)
    assert train(tmp_path, transformers.ViTForImageClassification(config), rows).global_step == 2


def test_a_model_that_knows_places_by_their_distance_takes_texts_of_any_length(tmp_path):
    shape = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(
        vocab_size=32, decoder_start_token_id=0, n_positions=4, **shape
    )  # as the folders on the Hub have it
    rows = [{"input_ids": [3] * 9, "labels": [4] * 6}] * 4
    model = transformers.T5ForConditionalGeneration(config)
    assert train(tmp_path, model, rows).global_step == 2


def test_a_model_that_says_that_nothing_is_too_long_for_it(tmp_path):
    config = transformers.XLNetConfig(vocab_size=32, d_model=16, n_layer=1, n_head=2, d_inner=16)
    rows = [{"input_ids": [3] * 9, "labels": [4] * 9}] * 4
    assert train(tmp_path, transformers.XLNetLMHeadModel(config), rows).global_step == 2


class Weighing(torch.nn.Module):
    """Takes a number for each sample."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 32)

    def forward(self, input_ids, labels=None, weight=None):
        return {"logits": self.table(input_ids) * weight[:, None, None]}


class Taking(Weighing):
    """Takes what there is."""

    def forward(self, input_ids, **rest):
        return super().forward(input_ids, weight=rest["weight"])


def test_columns_that_nobody_takes_need_not_make_tensors(tmp_path):
    rows = [{"input_ids": [3] * 4, "tags": [1] * n, "weight": 1.0} for n in (1, 2, 3, 1) * 4]
    for n, row in enumerate(rows):
        row["score"] = None if n % 3 else 0.5
    for model in (llama(), Weighing()):
        assert train(tmp_path, model, rows).global_step == 2
    with pytest.raises(ConfigError, match="tags"):
        train(tmp_path, Taking(), rows)
    rows = [{**row, "weight": row["score"]} for row in rows]
    with pytest.raises(ConfigError, match="'weight' must be numbers"):
        train(tmp_path, Weighing(), rows)
    assert train(tmp_path, llama(), rows).global_step == 2


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        (
            "to be or not",
            r"a sample is a text, but Llama.* takes input_ids; allowed: .*TextDataset",
        ),
        ([1, 2, 3], r"a sample is a list of numbers, but Llama.* takes input_ids; allowed: mapp"),
    ],
)
def test_samples_that_are_no_mappings_are_told_as_such(tmp_path, sample, says):
    with pytest.raises(ConfigError, match=f"train_dataset: {says}"):
        train(tmp_path, llama(), [sample] * 4)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["accelerator", "floating_point_ops", "num_examples"])
def test_attributes_of_hugging_faces_trainer_are_told_what_takes_their_place(tmp_path, name):
    args = TrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    trainer = Trainer(model=llama(), args=args)
    with pytest.raises(AttributeError, match=rf"'{name}' \(Hugging Face's\): use "):
        getattr(trainer, name)
