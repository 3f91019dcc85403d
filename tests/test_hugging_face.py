"""Hugging Face models from small configurations: outputs, likelihoods, checkpointing, ties, trainers' questions."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dubito

transformers = pytest.importorskip("transformers")

FAMILIES: dict[str, dubito.Family] = {
    "mean_field": dubito.MeanField(scale=0.3),
    "local": dubito.MeanField(scale=0.3, estimator="local"),
    "flipout": dubito.MeanField(scale=0.3, estimator="flipout"),
    "factors": dubito.LowRankFactors(rank=2, init="svd"),
}


def bert(dropout: float = 0.0, **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=12, num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        **options,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def gpt2() -> Any:
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=20, n_positions=12, n_embd=16, n_layer=2, n_head=2, use_cache=False
        )
    )


def tokens(batch: int = 4, seed: int = 1) -> Tensor:
    return torch.randint(1, 20, (batch, 6), generator=torch.Generator().manual_seed(seed))


def bayesianize(model: Any, family: Any, **options: Any) -> dubito.BayesianModule:
    torch.manual_seed(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        return dubito.bayesianize(model, family, **options)


def gradients(model: Any, family: str, reentrant: bool | None) -> dict[str, Tensor]:
    """Of two pending micro-batches under a fixed seed."""
    bayes = bayesianize(model, FAMILIES[family])
    if reentrant is not None:
        bayes.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        assert bayes.is_gradient_checkpointing
    bayes.train()
    torch.manual_seed(3)
    losses = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dubito.DubitoWarning)
        for seed in (1, 2):
            losses.append(bayes(input_ids=tokens(seed=seed)).logits.sin().sum())
        (losses[0] + losses[1]).backward()
    return {n: p.grad for n, p in bayes.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_of_bert_recomputes_with_the_same_draw(family: str, reentrant: bool) -> None:
    """Dropout on, two micro-batches pending: gradients as without checkpointing."""
    expected = gradients(bert(dropout=0.2), family, None)
    got = gradients(bert(dropout=0.2), family, reentrant)
    assert expected.keys() == got.keys()
    scale = max(float(g.abs().max()) for g in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6 * scale, msg=name)


@pytest.mark.parametrize("family", ["mean_field", "factors"])
def test_activation_checkpointing_of_gpt2(family: str) -> None:
    expected, got = gradients(gpt2(), family, None), gradients(gpt2(), family, False)
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_checkpointing_really_recomputes() -> None:
    model = bert()
    calls = []
    model.bert.encoder.layer[0].intermediate.register_forward_pre_hook(lambda *_: calls.append(1))
    bayes = bayesianize(model, dubito.MeanField())
    bayes.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    bayes.train()
    logits = bayes(input_ids=tokens()).logits
    assert len(calls) == 1
    logits.sum().backward()
    assert len(calls) == 2


def test_the_models_own_output_and_loss_come_back() -> None:
    bayes = bayesianize(bert(), dubito.MeanField())
    output = bayes(input_ids=tokens(), labels=torch.tensor([0, 1, 2, 0]))
    assert output.loss.requires_grad
    assert output.logits.shape == (4, 3)
    torch.testing.assert_close(
        output.loss, nn.functional.cross_entropy(output.logits, torch.tensor([0, 1, 2, 0]))
    )
    assert bayes.outputs({"input_ids": tokens()}, samples=2).shape == (2, 4, 3)
    assert bayes.outputs(tokens(), samples=2).shape == (2, 4, 3)
    as_tuple = bayes(input_ids=tokens(), return_dict=False)
    assert isinstance(as_tuple, tuple)
    hidden = bayesianize(bert(), dubito.MeanField(), output=lambda o: o.hidden_states[-1])
    assert hidden.outputs({"input_ids": tokens(), "output_hidden_states": True}, samples=2).shape == (
        2,
        4,
        6,
        16,
    )


def test_the_signature_and_what_trainers_ask_for_are_the_models_own() -> None:
    model = bert()
    bayes = bayesianize(model, dubito.MeanField())
    assert inspect.signature(bayes.forward) == inspect.signature(model.forward)
    assert "labels" in inspect.signature(bayes.forward).parameters
    assert bayes.config is model.config
    assert bayes.main_input_name == "input_ids"
    with pytest.raises(AttributeError):
        _ = bayes.not_there


@pytest.mark.parametrize(("problem", "kind"), [
    ("single_label_classification", dubito.Categorical),
    ("multi_label_classification", dubito.Bernoulli),
    ("regression", dubito.Gaussian),
])  # fmt: skip
def test_a_config_that_states_its_problem_gives_the_likelihood(problem: str, kind: type) -> None:
    assert type(bayesianize(bert(problem_type=problem), dubito.MeanField()).likelihood) is kind
    own = dubito.Categorical()
    assert bayesianize(bert(problem_type=problem), dubito.MeanField(), likelihood=own).likelihood is own
    with pytest.raises(ValueError, match="no likelihood"):
        bayesianize(bert(), dubito.MeanField()).predict(tokens())


def test_loaders_of_dictionaries_with_labels_and_masks() -> None:
    bayes = bayesianize(bert(problem_type="single_label_classification"), dubito.MeanField(scale=0.5))
    mask = torch.ones(4, 6).long()
    mask[:, 4:] = 0
    batches = [
        {"input_ids": tokens(seed=s), "attention_mask": mask, "labels": torch.tensor([0, 1, 2, 0])}
        for s in (1, 2)
    ]
    streamed = bayes.predict(batches, samples=3, generator=torch.Generator().manual_seed(0))
    whole = {
        "input_ids": torch.cat([tokens(seed=1), tokens(seed=2)]),
        "attention_mask": torch.cat([mask, mask]),
    }
    expected = bayes.predict(whole, samples=3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(streamed.probs, expected.probs)
    batch = transformers.BatchEncoding(whole)
    again = bayes.predict(batch, samples=3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(again.probs, expected.probs)


def test_tied_embeddings_of_gpt2_share_a_draw_and_a_kl() -> None:
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    for family in (dubito.MeanField(scale=0.5), dubito.LowRankFactors(rank=2, init="svd")):
        bayes = bayesianize(gpt2(), family)
        frozen = bayes.sample()
        assert frozen.lm_head.weight is frozen.transformer.wte.weight
        names = list(bayes.kl_by_parameter())
        assert names.count("transformer.wte.weight") == 1
        assert "lm_head.weight" not in names
    with pytest.raises(
        ValueError, match=r"\"local\" cannot serve 'transformer\.wte\.weight'.*lm_head\.weight"
    ):
        dubito.bayesianize(gpt2(), dubito.MeanField(estimator="local"))


def test_mixed_families_by_pattern_as_in_fine_tuning() -> None:
    bayes = bayesianize(
        bert(),
        {
            "*.query.weight": dubito.LowRankFactors(rank=2, init="svd"),
            "classifier": dubito.MeanField(),
            "*.LayerNorm.*": dubito.Point(),
        },
    )
    loss = bayes(input_ids=tokens()).logits.sin().sum() + bayes.kl() / 100
    loss.backward()
    random = {s.name for p in bayes.posteriors() for s in p.slots}
    assert len(random) == 4
    assert all(p.grad is not None for n, p in bayes.named_parameters() if n.startswith("posterior"))
    assert bayes.module.bert.embeddings.word_embeddings.weight.grad is not None
    plain = bayes.merge()
    assert type(plain) is transformers.BertForSequenceClassification
    torch.testing.assert_close(
        plain.eval()(tokens()).logits, bayes.eval()(tokens()).logits, rtol=1e-4, atol=1e-5
    )


def test_masked_language_model_with_all_its_ties() -> None:
    torch.manual_seed(0)
    config = bert().config
    model = transformers.BertForMaskedLM(config)
    tied = model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    bayes = bayesianize(model, dubito.MeanField(scale=0.3))
    bayes(input_ids=tokens()).logits.sin().sum().backward()
    assert all(p.grad is not None for p in bayes.parameters())
    frozen = bayes.sample()
    same = frozen.cls.predictions.decoder.weight is frozen.bert.embeddings.word_embeddings.weight
    assert same == tied
    assert tied
    assert frozen.cls.predictions.bias is frozen.cls.predictions.decoder.bias
