"""The noise of IVON's draws: a function of seed, process, draw and device, so that only numbers need to be saved."""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 2**64 - 1


def mixed_seed(*numbers: int) -> int:
    """One 63-bit seed from several whole numbers (the finaliser of splitmix64, chained)."""
    state = 0
    for number in numbers:
        state = (state + (number & _MASK) + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def processes() -> tuple[int, int]:
    """This process's rank and how many there are in `torch.distributed`; (0, 1) where it is not initialised."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


class NoiseSource:
    """Standard normal noise of one draw: a generator a device, seeded anew for every draw.

    A resumed run, also one of several processes that all read the first one's state, goes on with the noise it would
    have had, and processes never share theirs.
    """

    def __init__(self, seed: int, rank: int, draw: int) -> None:
        self._numbers = (seed, rank, draw)
        self._generators: dict[torch.device, torch.Generator] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """eps ~ N(0, I) of a tensor's shape, dtype and device."""
        device = tensor.device
        generator = self._generators.get(device)
        if generator is None:
            generator = self._generators[device] = torch.Generator(device=device)
            generator.manual_seed(mixed_seed(*self._numbers, device.index or 0))
        return torch.empty_like(tensor, memory_format=torch.preserve_format).normal_(generator=generator)
