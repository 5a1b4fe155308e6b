"""Hidden states cross the wire bit by bit; a cast to fp16 saturates; bytes that don't match their shape are refused."""

from __future__ import annotations

import pytest
import torch

from core.errors import ProtocolError
from core.protocol.codec import Decoder, Packet, encode
from core.protocol.fields import Tensor
from core.protocol.messages import HiddenState
from core.protocol.tensors import from_wire, to_wire

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
DTYPES = list(NAMES)


def over_the_wire(tensor: Tensor) -> torch.Tensor:
    """Through real frames, as a link would carry it."""
    decoder = Decoder()
    packets = [decoder.feed(frame) for frame in encode(Packet(HiddenState(1, tensor)))]
    assert packets[-1] is not None
    assert isinstance(packets[-1].message, HiddenState)
    return from_wire(packets[-1].message.hidden)


def any_bits(dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    """Every kind of bit pattern: NaNs with payloads, infinities, subnormals, negative zeros."""
    generator = torch.Generator().manual_seed(rows)
    size = (rows, width * dtype.itemsize)
    return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize("shape", [(1, 1), (1, 64), (7, 33), (300, 1024), (0, 64)], ids=str)
def test_every_bit_arrives(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    hidden = any_bits(dtype, *shape)
    sent = to_wire(hidden, dtype)
    assert (sent.dtype, sent.rows, sent.width) == (NAMES[dtype], *shape)
    assert len(sent.data) == hidden.numel() * dtype.itemsize
    arrived = over_the_wire(sent)
    assert arrived.dtype is dtype
    assert arrived.shape == shape
    assert torch.equal(arrived.view(torch.uint8), hidden.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_rows_that_do_not_lie_side_by_side_arrive_as_well(dtype: torch.dtype) -> None:
    hidden = torch.arange(60.0).view(6, 10).to(dtype)
    assert torch.equal(over_the_wire(to_wire(hidden[::2, 1:7], dtype)), hidden[::2, 1:7])
    assert torch.equal(over_the_wire(to_wire(hidden.T, dtype)), hidden.T)


def test_bytes_are_little_endian() -> None:
    assert bytes(to_wire(torch.tensor([[1.0]]), torch.float32).data) == b"\x00\x00\x80\x3f"


@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16], ids=NAMES.get)
def test_fp16_saturates_where_its_range_ends(source: torch.dtype) -> None:
    hidden = torch.tensor([[70_000.0, -1e30, float("inf"), 1.0, 65_504.0, 1e-9]], dtype=source)
    arrived = over_the_wire(to_wire(hidden, torch.float16))
    assert arrived.tolist() == [[65_504.0, -65_504.0, 65_504.0, 1.0, 65_504.0, 0.0]]


def test_what_is_not_a_number_stays_so() -> None:
    assert over_the_wire(to_wire(torch.tensor([[float("nan")]]), torch.float16)).isnan().all()


def test_what_arrived_can_be_written_to_and_is_nobody_elses() -> None:
    sent = to_wire(torch.ones(2, 2), torch.float32)
    data = bytes(sent.data)
    arrived = from_wire(Tensor("fp32", 2, 2, data))
    arrived.zero_()
    assert data == bytes(sent.data)


@pytest.mark.parametrize(
    ("tensor", "complaint"),
    [
        (Tensor("int8", 1, 4, bytes(4)), "unknown tensor dtype 'int8'.*fp16, bf16, fp32"),
        (Tensor("", 0, 0, b""), "unknown tensor dtype"),
        (Tensor("fp32", 1, 4, bytes(15)), "15 bytes for 1 x 4 fp32"),
        (Tensor("fp16", 2, 4, bytes(17)), "17 bytes for 2 x 4 fp16"),
        (Tensor("bf16", 2**20, 2**20, bytes(2)), "does not match its shape"),
        (Tensor("fp32", 1, 1, b""), "0 bytes for 1 x 1 fp32"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_tensor_that_contradicts_itself_is_refused(tensor: Tensor, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        from_wire(tensor)
