"""Draws to predictions: many draws in one pass under `torch.func.vmap`, or one after the other.

Where an operator of the network has no batching rule (the fused LSTM), the draws run in a loop; the results are the
same for the same draws. Under `vmap` whatever precedes the first random weight is computed once for all draws.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dubito.left_behind import nothing_left_behind
from dubito.predictive import Predictive
from dubito.weights.family import Components, Noise, WeightPosterior, key_of

if TYPE_CHECKING:
    from dubito.bayesian import BayesianModule

MAX_DRAWN = 2**26  # entries of drawn weights alive at once by default: 256 MB in float32
DRAWN_AT_ONCE_ON_CPU = 2**22  # in one chunk of a single batch's prediction: 16 MB in float32
LABELS = ("labels", "label")


@dataclass(frozen=True)
class Draws:
    """Draws of a network's weights, kept as noise; made by `BayesianModule.draw`.

    Attributes:
        noise: each posterior's noise by its key, stacked over draws.
        count: number of draws S.
    """

    noise: dict[str, Noise]
    count: int

    @classmethod
    def make(
        cls,
        posteriors: Sequence[WeightPosterior],
        samples: int,
        generator: torch.Generator | None,
        first: int = 0,
        total: int | None = None,
    ) -> Draws:
        """Draw noise, draw by draw, for draws `first` to `first + samples` of `total` (None: `samples`).

        The first S of more draws are the same draws, however they are chunked (but for a family of numbered draws).
        """
        count = check_samples(samples)
        generator = check_generator(generator) or _own_generator(posteriors)
        keys = [key_of(p.slots[0].name) for p in posteriors]
        stacks = [_StackedNoise(p, count, generator, first, total or count) for p in posteriors]
        for index in range(count):
            for stack in stacks:
                stack.draw(index)
        return cls({key: stack.result() for key, stack in zip(keys, stacks, strict=True)}, count)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int | slice) -> Draws:
        """Some of the draws (an integer gives one, still with its leading dimension)."""
        if isinstance(index, int):
            if not -self.count <= index < self.count:
                raise IndexError(f"draw {index} of {self.count}")
            index = slice(index % self.count, index % self.count + 1)
        noise = {key: {n: t[index] for n, t in part.items()} for key, part in self.noise.items()}
        return Draws(noise, len(range(self.count)[index]))

    def components(self, bayes: BayesianModule, estimated: Collection[str] = ()) -> list[Components]:
        """What the draws are made of at the posterior's present parameters, in the posteriors' order.

        Args:
            bayes: the network.
            estimated: keys of the posteriors that draw outputs instead: theirs are empty.

        Raises:
            ValueError: if the draws were made for another network.
        """
        keys = list(bayes.posterior)
        if list(self.noise) not in (keys, [key for key in keys if key not in estimated]):
            raise ValueError(
                "these draws were made for another network (or other families); make them with this one's draw(S)"
            )
        return [
            {} if key in estimated else p.components(self.noise[key])
            for key, p in zip(keys, bayes.posteriors(), strict=True)
        ]


class _StackedNoise:
    """One posterior's noise, draw by draw: standard normal noise in its place, any other stacked at the end."""

    def __init__(
        self, posterior: WeightPosterior, count: int, generator: torch.Generator, first: int, total: int
    ) -> None:
        self.posterior = posterior
        self.generator = generator
        self.first, self.total = first, total
        like = posterior.noise_like()
        self.buffers = None if like is None else {n: t.new_empty((count, *t.shape)) for n, t in like.items()}
        self.views = [b.unbind() for b in self.buffers.values()] if self.buffers is not None else []
        self.made: list[Noise] = []

    def draw(self, index: int) -> None:
        if self.buffers is None:
            self.made.append(self.posterior.numbered_noise(self.first + index, self.total, self.generator))
        for view in self.views:
            view[index].normal_(generator=self.generator)

    def result(self) -> Noise:
        if self.buffers is not None:
            return self.buffers
        return {name: torch.stack([one.pop(name) for one in self.made]) for name in list(self.made[0])}


def estimated_keys(bayes: BayesianModule, estimator: str | None) -> set[str]:
    """Keys of the posteriors that draw outputs under this estimator (None: each family's own), not weights."""
    if estimator == "weights":
        return set()
    posteriors = zip(bayes.posterior, bayes.posteriors(), strict=True)
    with torch.no_grad(), torch.random.fork_rng([]):  # flipout draws, to be asked: as if it had not
        return {key for key, p in posteriors if p.estimated_weights(estimator) is not None}


def fresh_components(
    bayes: BayesianModule,
    count: int,
    generator: torch.Generator | None,
    estimated: Collection[str] = (),
    first: int = 0,
    total: int | None = None,
) -> list[Components]:
    """What `count` fresh draws are made of (see `Draws.make`); none for the posteriors in `estimated`."""
    drawn = [p for key, p in zip(bayes.posterior, bayes.posteriors(), strict=True) if key not in estimated]
    return Draws.make(drawn, count, generator, first, total).components(bayes, estimated)


@contextlib.contextmanager
def outputs_drawn_from(
    generator: torch.Generator | None, estimated: Collection[str], device: torch.device
) -> Iterator[None]:
    """Lets what draws outputs ("local", "flipout") draw by a given generator too.

    Inside `vmap` and activation checkpointing that noise comes from the global generator, which is seeded from the
    given one meanwhile and left as it was.
    """
    if generator is None or not estimated:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
        yield


def check_samples(samples: Any) -> int:
    """A positive whole number of draws.

    Raises:
        ValueError: otherwise.
    """
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples={samples!r} must be a whole number of at least 1 (draws of the weights)")
    return samples


def check_draws(draws: object) -> None:
    """Raise `TypeError` unless `draws` is `Draws` or None."""
    if draws is not None and not isinstance(draws, Draws):
        raise TypeError(
            f"draws must come from bayes.draw(S), got {type(draws).__name__}; their number alone is samples="
        )


def check_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """The generator itself; `TypeError` where it is something else, such as a seed."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got {type(generator).__name__}: a seed goes in by "
            "torch.Generator().manual_seed(seed), or by torch.manual_seed(seed) before the call"
        )
    return generator


def as_arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The network's arguments: a tuple gives positional, a mapping keyword ones, anything else is the one input."""
    if isinstance(x, tuple) and not hasattr(x, "_fields"):
        return x, {}
    if isinstance(x, Mapping):
        return (), dict(x)
    return (x,), {}


def run_draws(
    bayes: BayesianModule,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    components: Sequence[Components],
    count: int,
    chunk_size: int | None = None,
    estimator: str | None = "weights",
) -> Tensor:
    """Outputs under `count` draws, `(S, batch, …)`.

    Args:
        bayes: the network.
        args, kwargs: its arguments.
        components: of each posterior, stacked over draws.
        count: number of draws.
        chunk_size: draws run at once (None: as many as keep the drawn weights within a bound).
        estimator: "weights", or "local", "flipout", or None for each family's own.
    """
    _check_chunk_size(chunk_size)
    posteriors = list(bayes.posteriors())

    def one(_: Tensor, drawn: list[Components]) -> Tensor:
        values: dict[str, Tensor] = {}
        for posterior, parts in zip(posteriors, drawn, strict=True):
            estimated = None if estimator == "weights" else posterior.estimated_weights(estimator)
            values.update(estimated if estimated is not None else posterior.realize(parts))
        return bayes.select(bayes.run(values, args, kwargs))

    if not posteriors:
        output = bayes.select(bayes.run({}, args, kwargs))
        return output.expand(count, *output.shape)
    stacked = list(components)
    index = torch.arange(count, device=_device(posteriors))
    one_by_one = bayes._needs_loop or _normalises_by_batch(bayes.module)
    if not one_by_one and not (chunk_size is None and _convolves_first(bayes, index.device)):
        chunk_size = chunk_size or _chunk(stacked, count)
        try:
            with nothing_left_behind(bayes.module):
                return _vmapped(one, index, stacked, chunk_size)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            # An operator without a batching rule, or a network that keeps what it computes, and the loop will do;
            # or the input is wrong, and the loop raises torch's own message.
            outputs = _loop(one, index, stacked)
            bayes._needs_loop = True
            return outputs
    return _loop(one, index, stacked)


def _vmapped(one: Any, index: Tensor, stacked: list[Components], chunk_size: int) -> Tensor:
    size = chunk_size if chunk_size < len(index) else None  # of a single chunk torch makes one more copy
    with _unfused:
        result: Tensor = torch.vmap(one, randomness="different", chunk_size=size)(index, stacked)
    return result


class _Unfused:
    """Keeps attention off its fused paths under `vmap`.

    In eval mode `nn.TransformerEncoderLayer` and `nn.MultiheadAttention` take theirs where no weight requires gradient,
    which batched weights never seem to: gradient would be lost, and the fused operators have no batching rule. Nor has
    the CPU's flash attention, for which torch runs one draw after the other, with a warning. The switches are global
    ones, so uses are counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses = 0
        self._before = (True, True)

    def __enter__(self) -> None:
        with self._lock:
            if self._uses == 0:
                self._before = (
                    torch.backends.mha.get_fastpath_enabled(),
                    torch.backends.cuda.flash_sdp_enabled(),  # the switch of the CPU's kernel too
                )
                torch.backends.mha.set_fastpath_enabled(False)
                torch.backends.cuda.enable_flash_sdp(self._before[1] and torch.cuda.is_available())
            self._uses += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._uses -= 1
            if self._uses == 0:
                torch.backends.mha.set_fastpath_enabled(self._before[0])
                torch.backends.cuda.enable_flash_sdp(self._before[1])


_unfused = _Unfused()


def _loop(one: Any, index: Tensor, stacked: list[Components]) -> Tensor:
    outputs = []
    for s in range(len(index)):
        outputs.append(one(index[s], [{n: t[s] for n, t in part.items()} for part in stacked]))
    return torch.stack(outputs)


def _chunk(stacked: list[Components], count: int) -> int:
    size = sum(t.numel() for part in stacked for t in part.values()) // count
    return max(1, min(count, MAX_DRAWN // max(size, 1)))


def _normalises_by_batch(module: nn.Module) -> bool:
    """Batch statistics are updated in place, which `vmap` cannot do."""
    return any(
        isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training and m.track_running_stats
        for m in module.modules()
    )


def _convolves_first(bayes: BayesianModule, device: torch.device) -> bool:
    """Whether the CPU is faster with one draw after the other.

    Batched kernels become grouped convolutions, which take it about twice the time of separate ones; and where the
    first layer is random, there is nothing before it to compute once.
    """
    if device.type != "cpu":
        return False
    first = next((m for m in bayes.module.modules() if m._parameters), None)
    random = {id(owner) for slot in bayes._slots.values() for owner, _ in slot.places}
    return isinstance(first, nn.modules.conv._ConvNd) and id(first) in random


def _device(posteriors: Sequence[WeightPosterior]) -> torch.device:
    for posterior in posteriors:
        for parameter in posterior.parameters():
            return parameter.device
    return posteriors[0].slots[0].parameter.device


def _own_generator(posteriors: Sequence[WeightPosterior]) -> torch.Generator:
    """A generator seeded by the global one, so that `torch.manual_seed` is honoured."""
    device = _device(posteriors) if posteriors else torch.device("cpu")
    generator = torch.Generator(device)
    generator.manual_seed(int(torch.randint(2**62, ()).item()))
    return generator


# ---- predict -----------------------------------------------------------------------------------------------


def predict(
    bayes: BayesianModule,
    x: Any,
    *,
    samples: int,
    draws: Draws | None,
    chunk_size: int | None,
    generator: torch.Generator | None,
    estimator: str,
    keep_draws: bool | None,
) -> Predictive:
    """See `BayesianModule.predict`."""
    likelihood = bayes.require_likelihood()
    _check_estimator(bayes, estimator)
    check_draws(draws)
    count = len(draws) if draws is not None else check_samples(samples)
    _check_chunk_size(chunk_size)
    stream = not isinstance(x, Tensor | tuple | Mapping)
    keep = keep_draws if keep_draws is not None else not stream
    parts: list[Predictive] = []
    # Locked throughout: a second thread would find the flags in evaluation, and put them back so.
    estimated = estimated_keys(bayes, estimator)
    with (
        bayes._lock,
        torch.no_grad(),
        evaluating(bayes.module),
        outputs_drawn_from(generator, estimated, device_of(bayes)),
    ):
        source = _Source(bayes, count, draws, generator, chunk_size, estimated, stream)
        for batch in _batches(x, device_of(bayes)) if stream else (x,):
            args, kwargs = as_arguments(batch)
            outputs = [
                run_draws(bayes, args, kwargs, components, size, chunk_size, estimator)
                for components, size in source.chunks()
            ]
            joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
            part = likelihood.predictive(joined, keep_draws=keep)
            parts.append(part if estimator == "weights" else dataclasses.replace(part, consistent=False))
    if not parts:
        raise ValueError("x is an empty loader: it gave no batch to predict")
    predictive = parts[0] if len(parts) == 1 else Predictive.concatenate(parts)
    if bayes.target_scale is not None and bayes.target_shift is not None:
        predictive = predictive.affine(bayes.target_shift, bayes.target_scale)
    return predictive


class _Source:
    """The draws' components, chunk by chunk, the same for every batch.

    Those for a stream are kept in memory, or (with a chunk size) made again for each batch from the generator's state.
    One batch alone has its draws made in chunks of some megabytes on a CPU, which finds such blocks in its heap.
    """

    def __init__(
        self,
        bayes: BayesianModule,
        count: int,
        draws: Draws | None,
        generator: torch.Generator | None,
        chunk_size: int | None,
        estimated: Collection[str],
        stream: bool,
    ) -> None:
        self.bayes = bayes
        self.draws = draws
        self.estimated = estimated
        posteriors = list(bayes.posteriors())
        if not stream and chunk_size is None and device_of(bayes).type == "cpu":
            drawn = (
                p for key, p in zip(bayes.posterior, posteriors, strict=True) if key not in self.estimated
            )
            step = max(1, DRAWN_AT_ONCE_ON_CPU // max(1, sum(_entries(p) for p in drawn)))
        else:
            step = count if chunk_size is None or draws is not None else chunk_size
        self.count = count
        self.starts = range(0, count, step)
        self.sizes = [min(step, count - start) for start in self.starts]
        self.generator = check_generator(generator) or _own_generator(posteriors)
        self.state = self.generator.get_state()
        self.kept: list[Components] | None = None

    def chunks(self) -> Iterator[tuple[list[Components], int]]:
        if self.kept is not None:
            yield self.kept, self.sizes[0]
            return
        self.generator.set_state(self.state)
        for start, size in zip(self.starts, self.sizes, strict=True):
            if self.draws is not None:
                components = self.draws[start : start + size].components(self.bayes, self.estimated)
            else:
                components = fresh_components(
                    self.bayes, size, self.generator, self.estimated, start, self.count
                )
            if len(self.sizes) == 1:
                self.kept = components
            yield components, size


def _entries(posterior: WeightPosterior) -> int:
    """Of one draw, or somewhat more: factors are counted by the parameters of their distribution."""
    if posterior.takes_over:
        return sum(p.numel() for p in posterior.parameters())
    return sum(slot.shape.numel() for slot in posterior.slots)


def _batches(x: Any, device: torch.device) -> Iterator[Any]:
    if not isinstance(x, Iterable) or hasattr(x, "__array__"):
        hint = ": pass torch.as_tensor(x)" if hasattr(x, "__array__") else ""
        raise TypeError(
            "x must be a tensor, a tuple or mapping of arguments, or an iterable of batches, not "
            f"{type(x).__name__}{hint}"
        )
    for batch in x:
        if isinstance(batch, Mapping):
            inputs: Any = {k: v for k, v in batch.items() if k not in LABELS}
        else:
            inputs = batch[0] if isinstance(batch, list | tuple) else batch
        yield torch.utils._pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, inputs)


def _check_chunk_size(chunk_size: int | None) -> None:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size} must be at least 1 (draws run at once), or None for all")


def _check_estimator(bayes: BayesianModule, estimator: str) -> None:
    offered = {"weights"} | {name for p in bayes.posteriors() for name in p.estimators}
    if estimator not in offered:
        raise ValueError(
            f"estimator={estimator!r} is not offered by these families; there are: {', '.join(sorted(offered))}"
        )


def device_of(bayes: BayesianModule) -> torch.device:
    """Where the network is."""
    parameter = next(bayes.parameters(), None)
    return parameter.device if parameter is not None else torch.device("cpu")


@contextlib.contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation behaviour of every submodule; every `training` flag is put back as it was."""
    flags = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, flag in flags:
            m.training = flag
