"""Reader of IDX files, the format in which MNIST and its relatives are kept."""

from __future__ import annotations

import gzip
import math
import os
import struct
import zlib
from pathlib import Path

import numpy
import torch
from torch import Tensor

_UNSIGNED_BYTE = 0x08


def read_idx(path: str | os.PathLike[str]) -> Tensor:
    """Read an IDX file of unsigned bytes, plain or gzip-compressed (told apart by its first bytes).

    Format: two zero bytes, the element type, the number of dimensions, each dimension as a big-endian
    32-bit integer, then the elements in row-major order (http://yann.lecun.com/exdb/mnist/).

    Returns:
        uint8 tensor of the shape the file states.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is not IDX, holds another element type, or is cut short.
    """
    data = Path(path).read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path}: broken gzip file ({error}); fetch it again") from error
    if len(data) < 4 or data[:2] != b"\0\0":
        raise ValueError(f"{path}: not an IDX file (it must begin with two zero bytes)")
    kind, dimensions = data[2], data[3]
    if kind != _UNSIGNED_BYTE:
        raise ValueError(f"{path}: element type {kind:#04x} is not supported, only unsigned bytes (0x08)")
    start = 4 + 4 * dimensions
    if len(data) < start:
        raise ValueError(f"{path}: cut short inside the header")
    shape = struct.unpack(f">{dimensions}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise ValueError(
            f"{path}: header states {math.prod(shape)} elements of shape {shape}, "
            f"the file holds {len(data) - start}"
        )
    return torch.from_numpy(numpy.frombuffer(data, dtype=numpy.uint8, offset=start).copy()).reshape(shape)


def find_idx(folder: Path, stem: str) -> Path:
    """The file ``stem`` or ``stem.gz`` in ``folder``.

    Raises:
        FileNotFoundError: naming both.
    """
    for name in (f"{stem}.gz", stem):
        if (folder / name).is_file():
            return folder / name
    raise FileNotFoundError(f"neither {stem}.gz nor {stem} in {folder}")
