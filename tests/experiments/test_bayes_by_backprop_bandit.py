import pytest
import torch

from dubito.data.mushroom import Mushrooms
from dubito.experiments.bbb.bandit import (
    AGENTS,
    EAT,
    PASS,
    BanditSettings,
    ThompsonSampling,
    make_agent,
    play,
    with_actions,
)
from dubito.experiments.bbb.bandit_part import run_bandit
from dubito.experiments.reproduction import PartJob

SMALL = BanditSettings(interactions=12, steps=2, batch=4, hidden=8)


def table(n=40):
    """Poisonous mushrooms have the first attribute, the others the second."""
    poisonous = torch.arange(n) % 2 == 0
    features = torch.stack([poisonous, ~poisonous], dim=1).float()
    return Mushrooms(features, poisonous, ("bad", "good"))


class Fixed:
    """Plays by a rule and remembers what it was taught."""

    def __init__(self, rule):
        self.rule, self.seen = rule, []

    def choose(self, context):
        return self.rule(context)

    def learn(self, inputs, rewards):
        self.seen.append((inputs.clone(), rewards.clone()))


def test_the_oracle_has_no_regret():
    agent = Fixed(lambda context: PASS if context[0] == 1 else EAT)
    played = play(agent, table(), SMALL)
    assert float(played.regret[-1]) == 0
    assert played.poisoned == 0
    assert played.eaten > 0


def test_eating_everything_costs_fifteen_a_poisonous_one_and_rewards_are_the_papers():
    settings = BanditSettings(interactions=400, steps=1, batch=1, hidden=1)
    agent = Fixed(lambda context: EAT)
    played = play(agent, table(), settings)
    assert float(played.regret[-1]) == 15 * played.poisoned
    assert played.eaten == 400
    inputs, rewards = agent.seen[-1]
    poisonous = inputs[:, 0] == 1
    assert set(rewards[~poisonous].tolist()) == {5.0}
    assert set(rewards[poisonous].tolist()) == {5.0, -35.0}
    assert abs(float((rewards[poisonous] == 5).float().mean()) - 0.5) < 4 * 0.5 / int(poisonous.sum()) ** 0.5


def test_passing_costs_five_an_edible_one():
    agent = Fixed(lambda context: PASS)
    played = play(agent, table(), SMALL)
    inputs, rewards = agent.seen[-1]
    assert float(played.regret[-1]) == 5 * int((inputs[:, 1] == 1).sum())
    assert not rewards.any()
    assert torch.equal(inputs[:, 2:], torch.tensor([[1.0, 0.0]]).expand(12, 2))


def test_the_buffer_holds_the_latest_only():
    agent = Fixed(lambda context: EAT)
    play(agent, table(), BanditSettings(interactions=9, buffer=4, steps=1))
    assert [len(rewards) for _, rewards in agent.seen] == [1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert torch.equal(agent.seen[-1][0][:3], agent.seen[-2][0][1:])


def test_thompson_sampling_acts_by_one_function():
    """For a posterior of two very different functions both actions are taken, each draw consistent."""
    agent = make_agent("Thompson sampling", 4, BanditSettings(scale=3.0, hidden=8), 0)
    assert isinstance(agent, ThompsonSampling)
    context = torch.tensor([1.0, 0.0])
    assert {agent.choose(context) for _ in range(60)} == {EAT, PASS}
    function = agent.bayes.sample(torch.Generator().manual_seed(0))
    x = with_actions(torch.eye(2), torch.tensor([EAT, EAT]))
    assert torch.equal(function(x), function(x))
    assert torch.allclose(function(x)[:1], function(x[:1]), atol=1e-6)


def test_epsilon_greedy_explores_that_often():
    agent = make_agent("5 % epsilon-greedy", 4, SMALL, 0)
    agent.epsilon = 0.5
    context = torch.tensor([1.0, 0.0])
    best = agent.best(agent.network, context)
    share = sum(agent.choose(context) != best for _ in range(800)) / 800
    assert abs(share - 0.25) < 4 * (0.25 * 0.75 / 800) ** 0.5


def test_agents_start_from_the_same_weights():
    first, second = (make_agent(name, 4, SMALL, 3) for name in ("greedy", "Thompson sampling"))
    assert torch.equal(first.network[0].weight, second.bayes.module[0].weight)


@pytest.mark.parametrize("name", ["Thompson sampling", "greedy"])
def test_agents_learn_what_is_edible(name):
    settings = BanditSettings(steps=20, batch=16, hidden=16, lr=1e-2, noise=0.2)
    agent = make_agent(name, 4, settings, 0)
    seen = with_actions(torch.eye(2).repeat(40, 1), torch.arange(80) // 2 % 2)
    bad, eaten = seen[:, 0] == 1, seen[:, 3] == 1
    rewards = torch.where(eaten, torch.where(bad, -15.0, 5.0), 0.0)
    for _ in range(15):
        agent.learn(seen, rewards)
    choices = [[agent.choose(context) for _ in range(20)] for context in torch.eye(2)]
    assert sum(choices[0]) <= 4  # bad
    assert sum(choices[1]) >= 16  # good


def test_a_play_follows_its_seed():
    plays = [play(make_agent("Thompson sampling", 4, SMALL, s), table(), SMALL, s).regret for s in (0, 0, 1)]
    assert torch.equal(plays[0], plays[1])
    assert not torch.equal(plays[0], plays[2])


def test_the_part_tells_all_agents():
    found = run_bandit(PartJob(seeds=(0, 1, 2)), SMALL, table())
    assert [row.label for row in found.tables[0].rows] == list(AGENTS)
    assert list(found.values["agents"]) == list(AGENTS)
    assert all(len(played) == 3 for played in found.values["agents"].values())
    assert "(the paper: 64)" in " ".join(found.paragraphs)
    final = {name: sum(p["final_regret"] for p in played) for name, played in found.values["agents"].items()}
    others = min(value for name, value in final.items() if name != "Thompson sampling")
    assert list(found.targets.values()) == [final["Thompson sampling"] < others]
    assert len(found.pictures) == 1


def test_few_seeds_rank_no_agents():
    assert run_bandit(PartJob(seeds=(0, 1)), SMALL, table()).targets == {}


def test_impossible_settings_are_refused():
    with pytest.raises(ValueError, match="interactions must be at least 1"):
        BanditSettings(interactions=0)
