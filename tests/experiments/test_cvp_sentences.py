"""The sentences of the comparison: who learns from what, on made files; and BERT's propagation."""

import random
from pathlib import Path

import pytest
import torch

pytest.importorskip("tokenizers")

from dubito.data.sentiment import movie_split
from dubito.experiments.cvp import material
from dubito.experiments.cvp.material import Sizes, load_material

GOOD, BAD = ("fine", "lovely", "great", "warm"), ("dull", "awful", "weak", "cold")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = random.Random(0)
    (tmp_path / "sentiment").mkdir()
    for source, count in (("movie_reviews", 400), ("tweets", 30), ("nyt_editorials", 30)):
        lines = []
        for i in range(count):
            good = i % 2
            word = rng.choice(GOOD if good else BAD)
            lines.append(f"{i}\t{2 if good else -2}\t{'2 2' if good else '-2 -2'}\tfilm {i} is {word}\n")
        (tmp_path / "sentiment" / f"{source}.tsv").write_text("id\tmean\tratings\ttext\n" + "".join(lines))
    monkeypatch.setenv("DUBITO_DATA", str(tmp_path))
    monkeypatch.setattr(material, "FURTHER_TEST", 20)
    return tmp_path


def test_parts_share_no_sentence_and_the_test_part_is_the_same_for_all_seeds(folder: Path) -> None:
    sizes = Sizes(None, 50, 1000, 20)
    first, second = (load_material("bert", sizes, seed) for seed in (0, 1))
    split = movie_split()
    assert len(first.test[1]) == len(split.test) + 20
    assert torch.equal(first.test[1], second.test[1])
    assert not torch.equal(first.train[1], second.train[1])
    assert len(first.train[1]) == len(split.train) + len(split.validation) - 20 - 50
    assert len(first.unknown) == 20
    # every sentence has its own number, so equal rows would be shared sentences; digits may be unknown pieces,
    # which is why only rows without one are compared
    unknown = 1
    rows = [
        {tuple(row) for row in part[0].tolist() if unknown not in row}
        for part in (first.train, first.validation, first.test)
    ]
    assert all(not rows[i] & rows[j] for i in range(3) for j in range(i))


def test_few_test_sentences_are_of_the_data_s_own_test_part(folder: Path) -> None:
    few = load_material("bert", Sizes(100, 50, 15, 20), 0)
    assert len(few.test[1]) == 15
    assert torch.equal(few.test[1], movie_split().test.labels[:15])
    assert len(few.train[1]) == 100


def test_a_part_there_is_not() -> None:
    with pytest.raises(ValueError, match="resnet, vit, bert and pairs"):
        load_material("gpt", Sizes(), 0)


@pytest.mark.slow
def test_bert_is_propagated_as_it_is(folder: Path) -> None:
    pytest.importorskip("transformers")
    from dubito.experiments.cvp.contestants import CONTESTANTS, Bench, Budget
    from dubito.experiments.cvp.networks import SmallBert
    from dubito.experiments.cvp.training import Recipe, train

    found = load_material("bert", Sizes(100, 50, 15, 20), 0)
    torch.manual_seed(0)
    bayes = train(SmallBert(found.vocabulary, found.length, 8, 1), found.train, Recipe(warm=1, epochs=1), 0)
    answer = CONTESTANTS["cvp"].answer(Bench(bayes, found, 0, Budget(draws=4, matching=4)))
    assert answer.moments is not None
    assert bool((answer.moments.variance > 0).all())
