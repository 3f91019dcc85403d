import gzip
import struct

import pytest
import torch

from dubito.data import read_idx
from dubito.data.idx import find_idx


def idx_bytes(tensor: torch.Tensor, kind: int = 8) -> bytes:
    header = bytes([0, 0, kind, tensor.dim()]) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return header + bytes(tensor.flatten().int().tolist())


@pytest.mark.parametrize("shape", [(7,), (3, 4, 5), (0, 2)])
@pytest.mark.parametrize("packed", [False, True])
def test_reads_back_what_was_written(tmp_path, shape, packed):
    values = torch.randint(256, shape, generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    data = idx_bytes(values)
    path = tmp_path / "some.bin"
    path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
    got = read_idx(path)
    assert got.dtype == torch.uint8
    assert torch.equal(got, values)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an IDX"),
        (b"PK\x03\x04....", "not an IDX"),
        (idx_bytes(torch.zeros(2), kind=0x0D), "0x0d"),
        (idx_bytes(torch.zeros(2, 3))[:6], "inside the header"),
        (idx_bytes(torch.zeros(2, 3))[:-1], "states 6 elements"),
        (idx_bytes(torch.zeros(2, 3)) + b"\0", "holds 7"),
        (gzip.compress(idx_bytes(torch.zeros(2, 3)), mtime=0)[:-9], "broken gzip"),
        (gzip.compress(idx_bytes(torch.zeros(2, 3)), mtime=0)[:10] + b"\xff" * 40, "broken gzip"),
    ],
)
def test_damaged_files_are_named(tmp_path, data, message):
    path = tmp_path / "bad.bin"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path)
    assert "bad.bin" in str(caught.value)


def test_find_idx_takes_either_form(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b.gz").write_bytes(b"")
    assert find_idx(tmp_path, "a").name == "a"
    assert find_idx(tmp_path, "b").name == "b.gz"
    with pytest.raises(FileNotFoundError, match=r"c\.gz nor c"):
        find_idx(tmp_path, "c")
