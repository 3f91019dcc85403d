"""Training: `fit`, its configuration and result, and checkpoints that a run can be taken up from exactly."""

from dubito.training.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from dubito.training.config import FitConfig
from dubito.training.fit import fit
from dubito.training.numerics import NonFiniteError
from dubito.training.result import EpochRecord, FitResult

__all__ = [
    "CheckpointError",
    "EpochRecord",
    "FitConfig",
    "FitResult",
    "NonFiniteError",
    "fit",
    "load_checkpoint",
    "save_checkpoint",
]
