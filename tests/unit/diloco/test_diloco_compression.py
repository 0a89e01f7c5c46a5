"""Rounding for the wire: to nearest even, and nothing is lost for good."""

from __future__ import annotations

import struct

import pytest
import torch

from headway.diloco.compression import decode, encode
from headway.diloco.wire import INT8_BLOCK
from headway.errors import ConfigError


def round_trip(tensor: torch.Tensor, comm: str) -> torch.Tensor:
    return decode(encode({"w": tensor}, comm).payloads["w"])


def test_float32_travels_bit_for_bit() -> None:
    tensor = torch.tensor([0.0, -0.0, 1e-45, 3.4e38, -1 / 3]).reshape(5, 1)
    found = round_trip(tensor, "float32")
    assert torch.equal(found.view(torch.int32), tensor.view(torch.int32))


def test_bf16_rounds_to_nearest_even() -> None:
    def nearest_even(value: float) -> float:
        (bits,) = struct.unpack("<I", struct.pack("<f", value))
        kept, rest = bits >> 16, bits & 0xFFFF
        kept += rest > 0x8000 or (rest == 0x8000 and kept & 1)
        return struct.unpack("<f", struct.pack("<I", kept << 16))[0]

    halves = [struct.unpack("<f", struct.pack("<I", b))[0] for b in (0x3F808000, 0x3F818000)]
    values = torch.cat([torch.randn(1000), torch.tensor(halves)])
    wanted = [nearest_even(v) for v in values.tolist()]
    assert round_trip(values, "bf16").tolist() == wanted
    assert encode({"w": values}, "bf16").payloads["w"].data.nbytes == 2 * len(values)


def test_int8_has_a_scale_for_each_block() -> None:
    tensor = torch.zeros(INT8_BLOCK + 3)
    tensor[0], tensor[1], tensor[2] = 127.0, 2.5, 3.5
    tensor[-3:] = torch.tensor([-1.27, 0.635, 0.0])
    found = round_trip(tensor, "int8")
    assert found[:3].tolist() == [127.0, 2.0, 4.0]  # ties go to the even one
    assert found[-3:].tolist() == pytest.approx([-1.27, 0.64, 0.0])
    payload = encode({"w": tensor}, "int8").payloads["w"]
    assert payload.data.nbytes == tensor.numel() + 2 * 4
    assert bytes(payload.data[:4]) == struct.pack("<f", 1.0)


def test_what_int8_loses_is_sent_later() -> None:
    generator = torch.Generator().manual_seed(3)
    truth, sent = torch.zeros(50, 7), torch.zeros(50, 7)
    residual: dict[str, torch.Tensor] = {}
    one_time = torch.zeros(50, 7)
    for _ in range(40):
        gradient = torch.randn(50, 7, generator=generator) * torch.tensor([1, 0, 0, 1e-3, 1, 1, 9])
        encoded = encode({"w": gradient}, "int8", residual)
        again = encode({"w": gradient}, "int8", residual)
        assert bytes(again.payloads["w"].data) == bytes(encoded.payloads["w"].data)
        residual = encoded.residual
        truth += gradient
        sent += decode(encoded.payloads["w"])
        one_time += round_trip(gradient, "int8")
    assert torch.allclose(sent + residual["w"], truth, atol=1e-4)
    assert (sent - truth).abs().max() < 0.2 < (one_time - truth).abs().max()


def test_zeros_scalars_and_nothing_survive_int8() -> None:
    for tensor in (torch.zeros(10), torch.zeros(0, 3), torch.tensor(0.0), torch.full((9,), 1e-45)):
        found = round_trip(tensor, "int8")
        assert found.shape == tensor.shape and torch.equal(found, torch.zeros_like(tensor))
    assert round_trip(torch.tensor(-5.0), "int8").item() == pytest.approx(-5.0)


def test_what_is_not_finite_stays_visible() -> None:
    for comm in ("float32", "bf16", "int8"):
        for bad in (float("nan"), float("inf")):
            assert not torch.isfinite(round_trip(torch.tensor([1.0, bad]), comm)).all()


def test_an_unknown_communication_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="bf16"):
        encode({}, "bfloat16")
