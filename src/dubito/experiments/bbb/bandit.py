"""The contextual bandit of Blundell et al. (2015, section 5.3): which mushrooms to eat.

Eating an edible mushroom gives 5; eating a poisonous one gives 5 or -35 with equal chance, -15 on average; passing
gives 0. A network predicts the reward of (mushroom, action); it learns from the latest interactions only. Thompson
sampling acts by one draw of the weights (`bayes.sample()`), greedily under that one function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from dubito.conversion import bayesianize
from dubito.data.mushroom import Mushrooms
from dubito.likelihoods import Gaussian
from dubito.objectives import negative_elbo
from dubito.optim.parameter_groups import parameter_groups
from dubito.weights import MeanField

EAT, PASS = 1, 0
GOOD, BAD, POISONED = 5.0, -35.0, -15.0  # rewards; the last is what a poisonous mushroom gives on average
REWARD_UNIT = 10.0  # what the networks predict is the reward in units of this


@dataclass(frozen=True)
class BanditSettings:
    """How the bandit is played.

    Attributes:
        interactions: mushrooms offered.
        steps: optimizer steps after each of them.
        batch: interactions in a step, drawn from the buffer with replacement.
        buffer: how many of the latest interactions are kept.
        hidden: ReLU units of each of the two layers.
        lr: learning rate of Adam.
        scale: initial posterior deviation as a fraction of the fan-in scale.
        noise: standard deviation of a reward under the Gaussian likelihood, in `REWARD_UNIT`s.
    """

    interactions: int = 500
    steps: int = 32
    batch: int = 64
    buffer: int = 4096
    hidden: int = 100
    lr: float = 2e-3
    scale: float = 0.1
    noise: float = 0.5

    def __post_init__(self) -> None:
        for name in ("interactions", "steps", "batch", "buffer", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")


@dataclass(frozen=True)
class Play:
    """How an agent did.

    Attributes:
        regret: after each interaction, what the oracle's choices would have given more on average, added up;
            shape ``(interactions,)``.
        eaten, poisoned: how many mushrooms were eaten, and how many of those were poisonous.
    """

    regret: Tensor
    eaten: int
    poisoned: int


class Agent(Protocol):
    """What plays: it chooses for a context and learns from what was seen."""

    def choose(self, context: Tensor) -> int:
        """EAT or PASS for one context, shape ``(F,)``."""

    def learn(self, inputs: Tensor, rewards: Tensor) -> None:
        """Train on the buffer: inputs ``(N, F + 2)`` with the action taken, rewards ``(N,)``."""


def with_actions(contexts: Tensor, actions: Tensor) -> Tensor:
    """Contexts ``(N, F)`` with their one-hot actions, ``(N, F + 2)``."""
    return torch.cat([contexts, nn.functional.one_hot(actions, 2).to(contexts)], dim=-1)


class _Learner:
    """What both kinds of agent share: minibatches from the buffer, and Adam that goes on between interactions."""

    def __init__(self, settings: BanditSettings, generator: torch.Generator) -> None:
        self.settings, self.generator = settings, generator
        self.optimizer: torch.optim.Optimizer

    def learn(self, inputs: Tensor, rewards: Tensor) -> None:
        """`settings.steps` steps on minibatches of the buffer."""
        s = self.settings
        for rows in torch.randint(len(inputs), (s.steps, s.batch), generator=self.generator):
            loss = self.loss(inputs[rows], rewards[rows] / REWARD_UNIT)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Of a minibatch."""
        raise NotImplementedError

    def best(self, network: nn.Module, context: Tensor) -> int:
        """The action of the highest predicted reward."""
        both = with_actions(context.expand(2, -1), torch.tensor([PASS, EAT]))
        with torch.no_grad():
            return int(network(both).squeeze(-1).argmax())


class ThompsonSampling(_Learner):
    """Acts by one function drawn from the posterior, so it explores as long as it is uncertain."""

    def __init__(self, network: nn.Module, settings: BanditSettings, generator: torch.Generator) -> None:
        super().__init__(settings, generator)
        family = MeanField(scale=settings.scale)
        self.bayes = bayesianize(network, family, likelihood=Gaussian(noise=settings.noise)).train()
        self.optimizer = torch.optim.Adam(parameter_groups(self.bayes, settings.lr), fused=True)

    def choose(self, context: Tensor) -> int:
        """Greedy under one draw of the weights."""
        return self.best(self.bayes.sample(self.generator), context)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Negative ELBO, nats an interaction.

        As in the paper the KL is divided by the size of the full buffer from the beginning (64 batches of 64), so
        the posterior is colder than Bayes' rule says until the buffer is full.
        """
        outputs = self.bayes(x).squeeze(-1)
        return negative_elbo(self.bayes.nll(outputs, y), self.bayes.kl(), self.settings.buffer).loss


class EpsilonGreedy(_Learner):
    """Acts by the network's prediction, but with probability epsilon at random; 0 is greedy."""

    def __init__(
        self, network: nn.Module, settings: BanditSettings, generator: torch.Generator, epsilon: float
    ) -> None:
        super().__init__(settings, generator)
        self.network, self.epsilon = network, epsilon
        self.optimizer = torch.optim.Adam(network.parameters(), lr=settings.lr, fused=True)

    def choose(self, context: Tensor) -> int:
        """The best by prediction, or a random action."""
        if float(torch.rand((), generator=self.generator)) < self.epsilon:
            return int(torch.randint(2, (), generator=self.generator))
        return self.best(self.network, context)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean squared error."""
        return nn.functional.mse_loss(self.network(x).squeeze(-1), y)


def make_agent(name: str, inputs: int, settings: BanditSettings, seed: int) -> Agent:
    """A fresh agent of `AGENTS`; the same initial weights for all of a seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        h = settings.hidden
        network = nn.Sequential(nn.Linear(inputs, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, 1))
    epsilon = AGENTS[name]
    if epsilon is None:
        return ThompsonSampling(network, settings, generator)
    return EpsilonGreedy(network, settings, generator, epsilon)


#: By name, the epsilon; None is Thompson sampling.
AGENTS = {"Thompson sampling": None, "greedy": 0.0, "1 % epsilon-greedy": 0.01, "5 % epsilon-greedy": 0.05}


def play(
    agent: Agent,
    table: Mushrooms,
    settings: BanditSettings,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> Play:
    """Offer mushrooms to an agent, which chooses, is rewarded and learns.

    Args:
        agent: as `make_agent` makes it.
        table: the mushrooms, offered at random with replacement.
        settings: how many, and how much is learnt from each.
        seed: of the mushrooms offered and of the lottery of the poisonous; the same for every agent.
        on_step: called after each interaction with their number so far.
    """
    chance = torch.Generator().manual_seed(seed)
    offered = torch.randint(len(table), (settings.interactions,), generator=chance)
    lucky = torch.rand(settings.interactions, generator=chance) < 0.5
    inputs = torch.empty(0, table.features.shape[1] + 2)
    rewards = torch.empty(0)
    regret, eaten, poisoned = torch.zeros(settings.interactions), 0, 0
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for i, row in enumerate(offered.tolist()):
            context, poisonous = table.features[row], bool(table.poisonous[row])
            action = agent.choose(context)
            reward = _reward(action, poisonous, bool(lucky[i]))
            regret[i] = _expected(EAT if not poisonous else PASS, poisonous) - _expected(action, poisonous)
            eaten += action == EAT
            poisoned += action == EAT and poisonous
            seen = with_actions(context[None], torch.tensor([action]))
            inputs = torch.cat([inputs, seen])[-settings.buffer :]
            rewards = torch.cat([rewards, torch.tensor([reward])])[-settings.buffer :]
            agent.learn(inputs, rewards)
            if on_step is not None:
                on_step(i + 1)
    return Play(regret.cumsum(0), eaten, poisoned)


def _reward(action: int, poisonous: bool, lucky: bool) -> float:
    if action == PASS:
        return 0.0
    return GOOD if not poisonous or lucky else BAD


def _expected(action: int, poisonous: bool) -> float:
    if action == PASS:
        return 0.0
    return POISONED if poisonous else GOOD
