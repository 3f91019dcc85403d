"""What a checkpoint holds besides the weights, and taking a run up from one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dubito.training.checkpoints import load_checkpoint
from dubito.training.position import Position, differences
from dubito.training.setup import BEST, use_scale

if TYPE_CHECKING:
    from dubito.training.run import TrainingRun

_COMPARED = ("objective", "samples", "lr", "weight_decay", "clip_norm", "accumulation", "precision", "seed")


def everything_else(run: TrainingRun) -> dict[str, Any]:
    """All that a run needs to go on exactly, besides the weights, as a tree for `save_checkpoint`."""
    scheduler, scaler = run.scheduler, run.accelerator.scaler
    return {
        "optimizer": run.setup.optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "position": run.position.as_tree(),
        "target": {"shift": run.criterion.shift, "scale": run.criterion.scale},
        "settings": _settings(run),
    }


def restore(run: TrainingRun, path: Path) -> None:
    """Put a run where the checkpoint was taken.

    Raises:
        CheckpointError: the checkpoint is damaged, or of another model.
    """
    content = load_checkpoint(path)
    run.load_weights(content["weights"])
    differences(content["settings"], _settings(run))
    use_scale(run.setup, content["target"]["shift"], content["target"]["scale"])
    if content["settings"]["optimizer"] == type(run.setup.optimizer).__name__:
        run.setup.optimizer.load_state_dict(content["optimizer"])  # another kind cannot read it: begins anew
    if run.scheduler is not None and content["scheduler"] is not None:
        run.scheduler.load_state_dict(content["scheduler"])
    if run.accelerator.scaler is not None and content["scaler"] is not None:
        run.accelerator.scaler.load_state_dict(content["scaler"])
    position = run.position = Position.from_tree(content["position"], run.accelerator.device)
    if position.best_epoch is not None:
        best = path.parent / BEST
        run.best = load_checkpoint(best)["weights"] if best.is_file() else content["weights"]
        if run.setup.folder is not None and run.accelerator.is_main_process:
            run.write_best()  # the run may go on in another folder
    position.stopped_early = run.out_of_patience()  # a larger patience goes on
    if position.batch == 0:
        run.set_random(position.random)


def _settings(run: TrainingRun) -> dict[str, Any]:
    """What ought to be the same in the run that goes on."""
    beta = run.config.beta
    return {name: getattr(run.config, name) for name in _COMPARED} | {
        "beta": repr(beta) if callable(beta) else float(beta),
        "n_data": run.criterion.n_data,
        "optimizer": type(run.setup.optimizer).__name__,
        "scheduler": None if run.scheduler is None else type(run.scheduler).__name__,
    }
