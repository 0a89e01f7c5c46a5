"""Block masks of flex attention: those that torch makes from all pairs, and none too few."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from headway.models import Decoder, DecoderConfig, attention
from headway.models.block_mask import make_block_mask, mask_function
from headway.strategies.compilation import CompileOptions, compile_module

CPU = torch.device("cpu")
FLEX = {"vocab_size": 96, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}


def documents(*lengths: int, padding: int = 0) -> Tensor:
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.cat((ids, torch.full((padding,), -1)))[None].int()


def blocks(mask: Any, name: str, number: int) -> list[list[list[int]]]:
    """The numbers of listed blocks, by sample and row."""
    counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
    return [
        [sorted(row[:count].tolist()) for count, row in zip(*of)]
        for of in zip(counts[:, 0], indices[:, 0])
    ][:number]


def visible(seq_len: int, window: int | None, ids: Tensor | None, real: Tensor | None) -> Tensor:
    """[B, blocks, blocks, 128, 128]: which pairs are seen, asked one by one."""
    samples = next((len(t) for t in (ids, real) if t is not None), 1)
    sees = mask_function(window, ids, real)
    b = torch.arange(samples)[:, None, None]
    q, kv = torch.arange(seq_len)[:, None], torch.arange(seq_len)[None, :]
    dense = sees(b, torch.tensor(0), q, kv).expand(samples, -1, -1)
    missing = -seq_len % 128
    padded = torch.nn.functional.pad(dense, (0, missing, 0, missing))
    return padded.unflatten(1, (-1, 128)).unflatten(3, (-1, 128)).transpose(2, 3)


@pytest.mark.parametrize("window", [None, 5, 128, 129, 300])
@pytest.mark.parametrize(
    "ids",
    [
        None,
        documents(1024),
        documents(300, 1, 127, 84, 512),
        documents(128, 256, 640),
        documents(400, 200, padding=424),
        documents(333, 333, 334),
        torch.cat((documents(700, 330), documents(10, 20, 30, 40, 900, padding=30))),
    ],
)
def test_packed_documents_have_the_blocks_that_torch_finds(ids: Tensor | None, window: int | None):
    seq_len = 1024 if ids is None else ids.shape[1]
    mine = make_block_mask(seq_len, CPU, window, ids, None)
    samples = 1 if ids is None else len(ids)
    torchs = create_block_mask(
        mask_function(window, ids, None), samples, None, seq_len, seq_len, device="cpu"
    )
    assert mine.seq_lengths == torchs.seq_lengths and mine.BLOCK_SIZE == torchs.BLOCK_SIZE
    for name in ("kv", "full_kv", "q", "full_q"):
        assert torch.equal(
            getattr(mine, f"{name}_num_blocks"), getattr(torchs, f"{name}_num_blocks")
        )
        assert torch.equal(getattr(mine, f"{name}_indices"), getattr(torchs, f"{name}_indices"))


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("kind", ["scattered", "far apart", "left padding", "both"])
def test_no_visible_pair_is_left_out_and_whole_blocks_are_whole(kind: str, window: int | None):
    seq_len, generator = 700, torch.Generator().manual_seed(0)
    ids = real = None
    if kind == "scattered":
        ids = torch.randint(-2, 3, (2, seq_len), generator=generator)
    elif kind == "far apart":  # the extremes of the type, and the same id on both sides of another
        ids = torch.tensor([2**63 - 1, -(2**63), 0, 2**63 - 1, -1]).repeat_interleave(140)[None]
    if kind in ("left padding", "both"):
        real = torch.arange(seq_len) >= torch.tensor([[0], [290], [699]])
    if kind == "both":
        ids = documents(100, 200, 400).expand(3, -1)
    mask = make_block_mask(seq_len, CPU, window, ids, None if real is None else real.long())
    pairs = visible(seq_len, window, ids, real)
    partial, whole = (blocks(mask, name, len(pairs)) for name in ("kv", "full_kv"))
    for sample, q, kv in torch.cartesian_prod(*map(torch.arange, pairs.shape[:3])).tolist():
        of_block = pairs[sample, q, kv]
        assert (kv in whole[sample][q]) == bool(of_block.all())
        if of_block.any():
            assert kv in partial[sample][q] + whole[sample][q]


@torch.no_grad()
def test_documents_over_several_blocks_equal_documents_alone() -> None:
    torch.manual_seed(0)
    model = Decoder(**FLEX, max_seq_len=512, attention="flex")
    lengths = [150, 1, 231, 100]
    ids = torch.randint(0, 96, (1, sum(lengths)))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(ids, document_ids=documents(*lengths), position_ids=positions).logits
    alone = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_compiled_blocks_are_not_compiled_again_for_other_documents() -> None:
    torch.manual_seed(0)
    model = Decoder(**FLEX, max_seq_len=256, attention="flex")
    ids = torch.randint(0, 96, (1, 256))
    packs = [documents(100, 156), documents(1, 2, 3, 250), documents(256)]
    expected = [model(ids, document_ids=pack).logits for pack in packs]
    compile_module(model, CompileOptions(backend="aot_eager", dynamic=False))
    model(ids, document_ids=packs[0])
    with torch._dynamo.config.patch(error_on_recompile=True):
        for pack, logits in zip(packs, expected):
            found = model(ids, document_ids=pack).logits
            torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


def test_a_mask_made_in_inference_mode_serves_training_too() -> None:
    with torch.inference_mode():
        make_block_mask(384, CPU, 77, None, None)
    kept = make_block_mask(384, CPU, 77, None, None)
    assert not kept.kv_num_blocks.is_inference() and not kept.kv_indices.is_inference()


class Dense(Exception):
    """A dense mask was to be made, for which there is no GPU here."""


def made_densely(*given: Any) -> Tensor:
    raise Dense


def test_by_itself_a_compiled_decoder_takes_block_masks_for_documents_and_windows(monkeypatch):
    """On a GPU that has kernels for them, and where a dense mask would be made else."""
    made: list[Any] = []
    monkeypatch.setattr(attention, "make_block_mask", lambda *given: made.append(given) or made)
    monkeypatch.setattr(attention, "_dense_mask", made_densely)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    config = DecoderConfig(**FLEX, head_dim=64)
    ids, padded = torch.zeros(1, 8, dtype=torch.int), torch.tensor([[0] + [1] * 7])

    def takes_blocks(config: DecoderConfig = config, **changes: Any) -> bool:
        given = {
            "seq_len": 8, "past_len": 0, "device": torch.device("cuda", 0),
            "dtype": torch.bfloat16, "document_ids": ids, "attention_mask": None, "cached": False,
            "prefers_flex": True,
        }  # fmt: skip
        try:
            return attention.plan_attention(config, **{**given, **changes}).block_mask is not None
        except Dense:
            return False

    window = replace(config, sliding_window=4)
    assert takes_blocks() and takes_blocks(attention_mask=padded)
    assert takes_blocks(window, document_ids=None)
    assert not takes_blocks(document_ids=None)
    assert not takes_blocks(document_ids=None, attention_mask=padded)
    assert not takes_blocks(replace(window, sliding_window=8), document_ids=None)
    assert not takes_blocks(window, document_ids=None, cached=True)
    assert not takes_blocks(prefers_flex=False)
    assert not takes_blocks(dtype=torch.float32)
    assert not takes_blocks(replace(config, head_dim=80))
    assert not takes_blocks(replace(config, attention="sdpa"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not takes_blocks()
