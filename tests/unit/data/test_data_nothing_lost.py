"""Data that would be read twice, never, or as something else, without a word."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from headway import ConfigError, Trainer, TrainingArguments
from headway.callbacks.schedule.cutting import cut_batch
from headway.data import MixedDataset, TextDataset, TokenDataset, prepare_tokens
from headway.data.collate import PadCollator
from headway.data.loader import WindowLoader
from headway.data.tokenizer import load_tokenizer
from headway.models import generate
from headway.testing import tiny_decoder
from headway.trainers.folder_lock import FolderLock
from headway.trainers.plan import mean_tokens


def tokenizer_folder(folder: Path, *, padding: bool) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{n}": n + 3 for n in range(50)} | {"<s>": 0, "</s>": 1, "<pad>": 2}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    if padding:
        core.enable_truncation(4)
        core.enable_padding(pad_id=2, pad_token="<pad>", length=8)
    folder.mkdir()
    core.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "model_max_length": 77}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def test_texts_are_neither_cut_nor_padded_as_a_tokenizers_file_asks_for(tmp_path):
    plain = load_tokenizer(tokenizer_folder(tmp_path / "plain", padding=False))
    asks = load_tokenizer(tokenizer_folder(tmp_path / "asks", padding=True))
    texts = ["w1 w2 w3 w4 w5 w6 w7", "w1"]
    assert asks.encode_batch(texts) == plain.encode_batch(texts) == [[4, 5, 6, 7, 8, 9, 10], [4]]
    assert asks.digest == plain.digest


def test_a_tokenizers_other_files_go_with_it(tmp_path):
    source = tokenizer_folder(tmp_path / "source", padding=False)
    load_tokenizer(str(source)).save_pretrained(tmp_path / "copy")
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "copy" / name).read_bytes() == (source / name).read_bytes()
    assert load_tokenizer(str(tmp_path / "copy")).digest == load_tokenizer(str(source)).digest


def test_labels_that_a_collator_makes_stop_at_documents_and_masks():
    ids = np.array([5, 6, 7, 8, 9, 0])
    packed = {"input_ids": ids, "document_ids": np.array([0, 0, 0, 1, 1, -1])}
    assert PadCollator()([packed])["labels"].tolist() == [[5, 6, 7, -100, 9, -100]]
    masked = {"input_ids": ids, "labels": ids, "loss_mask": np.array([0, 0, 1, 1, 0, 1])}
    assert PadCollator()([masked])["labels"].tolist() == [[-100, -100, 7, 8, -100, 0]]
    # Labels of another length belong to an encoder and a decoder, of which the mask says nothing.
    other = {"input_ids": ids, "labels": ids[:2], "loss_mask": np.zeros(6, dtype=int)}
    assert PadCollator()([other])["labels"].tolist() == [[5, 6]]


class Shuffled(IterableDataset):
    """Draws its order from torch's global generator; it knows its length."""

    def __init__(self, number: int = 32) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __iter__(self):
        for index in torch.randperm(self.number).tolist():
            yield {"input_ids": [index, index, index]}


def read(loader: WindowLoader, number: int) -> list[int]:
    found: list[int] = []
    for window in loader.windows():
        for batch in window.micro_batches:
            found += batch["input_ids"][:, 0].tolist()
        if len(found) >= number:
            break
    return found


def test_a_stream_that_shuffles_by_itself_goes_on_after_a_resume():
    first = WindowLoader(Shuffled(), batch_size=4, seed=5)
    seen = read(first, 16)
    state = first.state_dict()
    torch.manual_seed(99)
    again = WindowLoader(Shuffled(), batch_size=4, seed=5)
    again.load_state_dict(state)
    assert sorted(seen + read(again, 16)) == list(range(32))


@pytest.mark.parametrize("sets_epoch", [True, False])
def test_a_stream_of_hugging_face_goes_on_after_a_resume_in_a_later_epoch(sets_epoch):
    datasets = pytest.importorskip("datasets")

    def new_loader() -> WindowLoader:
        rows = datasets.Dataset.from_dict({"input_ids": [[n, n] for n in range(24)]})
        stream = rows.to_iterable_dataset()
        return WindowLoader(stream, batch_size=4, seed=5, set_epoch=sets_epoch, epoch_batches=3)

    def read_epochs(loader: WindowLoader, start: int, number: int) -> list[int]:
        found: list[int] = []
        for epoch in range(start, start + number):
            loader.start_epoch(epoch)
            found += read(loader, 10**6)
        return found

    whole = read_epochs(new_loader(), 0, 6)
    cut = new_loader()
    assert read_epochs(cut, 0, 1) == whole[:12]
    state = json.loads(json.dumps(cut.state_dict()))
    resumed = new_loader()
    resumed.load_state_dict(state)
    assert read_epochs(resumed, 1, 5) == whole[12:]


def test_a_stream_with_a_length_can_be_trained_on(tmp_path):
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, save_strategy="no", use_cpu=True
    )
    Trainer(args=args, model=tiny_decoder(), train_dataset=Shuffled()).train()


def test_a_mixture_in_a_mixture_shows_all_it_has():
    numbers: list[Any] = [{"input_ids": [n]} for n in range(40)]
    inner = MixedDataset([numbers], num_samples=5)
    outer = MixedDataset([inner], num_samples=5)
    seen = set()
    for epoch in range(8):
        outer.set_epoch(epoch)
        seen |= {outer[index]["input_ids"][0] for index in range(5)}
    assert len(seen) == 40


def test_files_that_are_no_text_are_told(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("words " * 50)
    (tmp_path / "b.txt").write_bytes(b"half\0text")
    with caplog.at_level(logging.WARNING):
        TextDataset(files=tmp_path, tokenizer="bytes", sequence_length=16)
    assert "b.txt" in caplog.text and "not read" in caplog.text


def test_a_token_file_of_another_tokenizer_is_told(tmp_path, caplog):
    (tmp_path / "a.txt").write_text("w1 w2 w3 " * 50)
    folder = tokenizer_folder(tmp_path / "words", padding=False)
    prepare_tokens([tmp_path / "a.txt"], tmp_path / "a.hwt", tokenizer=str(folder))
    settings = {"max_steps": 1, "save_strategy": "no", "use_cpu": True}
    args = TrainingArguments(output_dir=str(tmp_path / "o"), **settings)
    for tokenizer in ("bytes", str(folder)):
        Trainer(
            args=args,
            model=tiny_decoder(),
            train_dataset=TokenDataset([tmp_path / "a.hwt"], 16),
            processing_class=load_tokenizer(tokenizer),
        ).train()
    assert caplog.text.count("made with another tokenizer") == 1


def test_tokens_are_planned_without_padding():
    texts = ["x" * 39] * 20  # 40 tokens each, with the end
    packed = TextDataset(texts=texts, tokenizer="bytes", sequence_length=64, packing="greedy")
    assert mean_tokens(packed) == 40
    assert mean_tokens(TextDataset(texts=texts, tokenizer="bytes", sequence_length=40)) == 40


def test_a_cut_does_not_leave_padding_and_take_tokens():
    mask = torch.tensor([[0, 0, 0, 0, 1, 1]])
    batch = {"input_ids": torch.arange(6)[None], "attention_mask": mask}
    with pytest.raises(ConfigError, match="begins with padding"):
        cut_batch(batch, 4, split=False)
    right = {**batch, "attention_mask": mask.flip(1)}
    assert cut_batch(right, 4, split=False)["input_ids"].shape == (1, 4)


def test_prompts_padded_on_the_right_are_refused():
    ids = torch.ones(2, 4, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with pytest.raises(ConfigError, match="pad shorter prompts on the left"):
        generate(tiny_decoder(), ids, max_new_tokens=2, attention_mask=mask)


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    lock = FolderLock(tmp_path)
    lock.check()
    assert not list(tmp_path.iterdir()), "a look leaves nothing behind"
    lock.take()
    code = (
        "import sys; from headway.trainers.folder_lock import FolderLock; "
        "FolderLock(sys.argv[1]).check()"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    held = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert held.returncode and "is in use by another run (process" in held.stderr
    lock.release()
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 0
