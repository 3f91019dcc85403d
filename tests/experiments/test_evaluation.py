import pytest
import torch

from dubito.data import letters, split_images
from dubito.experiments.evaluation import CORRUPTIONS_JUDGED, Exam, Stopwatch, judge, timed
from dubito.experiments.methods import Trained
from dubito.predictive import Predictive

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def exam() -> Exam:
    return Exam.of(split_images("tiny", letters(160, 12, seed=9), (80, 20, 60)), seed=1)


def test_corruptions_share_the_test_part_among_them(exam):
    assert tuple(exam.corrupted) == CORRUPTIONS_JUDGED
    assert sum(len(part) for part in exam.corrupted.values()) == 60
    labels = torch.cat([part.labels for part in exam.corrupted.values()])
    assert torch.equal(labels.sort().values, exam.split.test.labels.sort().values)
    assert exam.unknown.size == exam.split.test.size
    assert len(exam.unknown) == 60


def test_exam_depends_on_the_seed_alone(exam):
    again = Exam.of(exam.split, seed=1)
    assert all(torch.equal(again.corrupted[k].images, exam.corrupted[k].images) for k in exam.corrupted)
    assert torch.equal(again.unknown.images, exam.unknown.images)


def oracle(exam: Exam) -> Trained:
    """Knows test and corrupted images by heart, 99 % sure of each; shrugs at everything else."""
    known = {}
    for part in (exam.split.test, *exam.corrupted.values()):
        for image, label in zip(exam.split.standardise(part.images), part.labels, strict=True):
            known[image.numpy().tobytes()] = int(label)

    def predict(x):
        rows = []
        for image in x:
            row = torch.full((10,), 0.1)
            if (label := known.get(image.numpy().tobytes())) is not None:
                row = torch.full((10,), 0.01 / 9)
                row[label] = 0.99
            rows.append(row)
        return Predictive.from_draws("categorical", torch.stack(rows)[None], keep_draws=False)

    return Trained(predict, parameters=0, device=CPU)


def test_a_perfect_classifier_gets_perfect_marks(exam):
    judged = judge(oracle(exam), exam)
    m = judged.metrics
    assert m["accuracy"] == 1
    assert m["nll"] == pytest.approx(-torch.tensor(0.99).log().item(), abs=1e-6)
    assert m["ece"] == pytest.approx(0.01, abs=1e-6)
    assert m["aurc"] == 0
    assert m["ood_auroc"] == 1
    assert m["ood_fpr95"] == 0
    assert m["corrupted_accuracy"] == 1
    assert m["corrupted_nll"] == pytest.approx(m["nll"], abs=1e-6)
    assert set(judged.corrupted_accuracy.values()) == {1.0}
    assert judged.unknown_entropy.mean().item() == pytest.approx(torch.tensor(10.0).log().item(), abs=1e-5)


def test_timed_gives_the_result_and_the_median_of_repetitions():
    calls = []
    result, seconds = timed(lambda: calls.append(1) or len(calls), CPU)
    assert len(calls) == 5
    assert result == 5
    assert 0 <= seconds < 0.1


def test_stopwatch_counts_work_and_not_sleep():
    import time

    watch = Stopwatch()
    time.sleep(0.2)
    assert watch.seconds(CPU) < 0.15
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
    assert watch.seconds(CPU) >= 0.05
