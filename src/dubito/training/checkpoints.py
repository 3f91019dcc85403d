"""Atomic checkpoints in one safetensors file: tensors as tensors, everything else as JSON in its header.

Nothing is pickled, so a checkpoint of unknown origin can be opened without running its code. A checkpoint is
a tree of dicts, lists, tuples, numbers, strings, None and tensors; aliases (tied weights) are stored once.
The file is written beside its destination, flushed to the disk and moved into place with `os.replace`, so a
reader finds either the old checkpoint or the new one, never half of one.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FORMAT = "dubito-checkpoint-1"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read or matched to what is being trained."""


def save_checkpoint(path: str | os.PathLike[str], content: Mapping[str, Any]) -> Path:
    """Write a tree of tensors and plain values to `path`, all or nothing.

    Args:
        path: the destination; its folder is made if it does not exist.
        content: dicts, lists, tuples, numbers, strings, None and tensors, nested as you like.

    Returns:
        The path written.

    Raises:
        CheckpointError: something in `content` is none of those (the message says where), or the folder
            cannot be written.
    """
    from safetensors.torch import save

    path = Path(path)
    tensors: dict[str, Tensor] = {}
    tree = _encode(content, "", tensors, {})
    data = save(tensors, metadata={"format": FORMAT, "tree": json.dumps(tree)})
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = str(path.with_name(f".{path.name}.{os.getpid()}.tmp"))
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"checkpoint {str(path)!r} could not be written: {error}") from error
    finally:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
    return path


def load_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote; tensors come back on the CPU.

    Raises:
        FileNotFoundError: there is no such file.
        CheckpointError: the file is not a checkpoint of this library, or is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {str(path)!r}")
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise CheckpointError(f"{str(path)!r} is not a {FORMAT} file")
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise CheckpointError(f"checkpoint {str(path)!r} cannot be read: {error}") from error
    content: dict[str, Any] = _decode(json.loads(metadata["tree"]), tensors)
    return content


def check_writable(folder: str | os.PathLike[str]) -> Path:
    """Make `folder` if need be and prove that a file can be written there, before hours are spent.

    Raises:
        CheckpointError: it cannot.
    """
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise CheckpointError(f"checkpoint_dir {str(folder)!r} cannot be written: {error}") from error
    return folder


def _sync_folder(folder: Path) -> None:
    # The rename itself reaches the disk only with its folder; some systems do not open folders: no matter.
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def _encode(value: Any, where: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> Any:
    """JSON for `value`; a container is {"kind": …}, so a user's dict cannot be mistaken for our marks."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"kind": "tensor", "key": _store(value, where, tensors, seen)}
    if isinstance(value, Mapping):
        items = [
            [_encode(k, f"{where}/<key>", tensors, seen), _encode(v, f"{where}/{k}", tensors, seen)]
            for k, v in value.items()
        ]
        return {"kind": "dict", "items": items}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {
            "kind": kind,
            "items": [_encode(v, f"{where}/{i}", tensors, seen) for i, v in enumerate(value)],
        }
    if isinstance(value, torch.dtype | torch.device):
        return {"kind": "torch", "type": type(value).__name__, "name": str(value)}
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # numpy scalars
        return value.item()
    raise CheckpointError(
        f"{where.lstrip('/')!r} is a {type(value).__name__}, which a checkpoint cannot hold without pickle; its "
        "state_dict must give tensors, numbers, strings, lists, tuples and dicts"
    )


def _store(value: Tensor, where: str, tensors: dict[str, Tensor], seen: dict[Any, str]) -> str:
    value = value.detach()
    identity = (value.data_ptr(), tuple(value.shape), tuple(value.stride()), value.dtype, str(value.device))
    if value.numel() and identity in seen:
        return seen[identity]
    key = where.lstrip("/") or "value"
    if key in tensors:  # names may hold "/" themselves
        key = f"{key}#{len(tensors)}"
    tensors[key] = value.cpu().clone(memory_format=torch.contiguous_format)
    seen[identity] = key
    return key


def _decode(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    kind = tree["kind"]
    if kind == "tensor":
        return tensors[tree["key"]]
    if kind == "dict":
        return {_decode(k, tensors): _decode(v, tensors) for k, v in tree["items"]}
    if kind == "torch":
        return (
            getattr(torch, tree["name"].split(".")[1])
            if tree["type"] == "dtype"
            else torch.device(tree["name"])
        )
    items = [_decode(v, tensors) for v in tree["items"]]
    return items if kind == "list" else tuple(items)
