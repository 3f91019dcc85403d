"""The part sentiment of the reproduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from dubito.experiments.ibvi.processes import cores
from dubito.experiments.reproduction import Outcome, PartJob
from dubito.experiments.singular.contestants import CONTESTANTS
from dubito.experiments.singular.icu_part import FOLDER, PROCESSES
from dubito.experiments.singular.paper_figures import SST2 as PAPER_SST2
from dubito.experiments.singular.rows import measure
from dubito.experiments.singular.sentiment_exam import FULL, SST2, SentimentSettings, study
from dubito.experiments.singular.verdict import Column, Values, costs, mean_of, of_variant, ood_picture, table
from dubito.report import Row, Table

TITLES: Mapping[str, str] = {
    "ag_news": "AG News",
    "tweets": "tweets",
    "nyt_editorials": "editorials",
    "amazon_reviews": "product reviews",
}
FAR = ("ag_news", "tweets", "nyt_editorials")  #: what the target is about; product reviews are a nearer shift


def variant_of(rows: Sequence[Values]) -> str:
    """The data of the rows."""
    return str(rows[0]["key"]["network"])


def sources(rows: Sequence[Values]) -> list[str]:
    """The out-of-distribution sources that were asked, in the tables' order."""
    return [source for source in TITLES if f"{source}_auroc" in rows[0]["metrics"]]


def quality_columns(rows: Sequence[Values]) -> tuple[Column, ...]:
    """Of the first table."""
    return (
        Column("accuracy", "accuracy"),
        Column("nll", "NLL"),
        Column("ece", "ECE"),
        Column("aupr_succ", "AUPR-Succ"),
        Column("aupr_succ_chance", "its chance"),
        *(
            Column(f"{source}_auroc", f"OOD AUROC, {TITLES[source]}", chance=".500")
            for source in sources(rows)
        ),
    )


def unknown_columns(rows: Sequence[Values], source: str) -> tuple[Column, ...]:
    """Of a source's table; average precisions have the share of positives as chance."""
    out, inside = (rows[0]["metrics"][f"{source}_{name}_chance"] for name in ("aupr_out", "aupr_in"))
    return (
        Column(f"{source}_auroc", "OOD AUROC", chance=".500"),
        Column(f"{source}_aupr_out", "AUPR-OOD", chance=f"{out:.3f}"),
        Column(f"{source}_aupr_in", "AUPR-In", chance=f"{inside:.3f}"),
        Column(f"{source}_mi_ratio", "MI ratio", 2, chance="1"),
        Column(f"{source}_auroc_entropy", "OOD AUROC by entropy", chance=".500"),
    )


RATERS = (
    Column("aleatoric_sd", "sd: aleatoric"),
    Column("total_sd", "sd: total"),
    Column("epistemic_sd", "sd: MI"),
    Column("aleatoric_sign", "signs: aleatoric"),
    Column("total_sign", "signs: total"),
    Column("epistemic_sign", "signs: MI"),
)
WITH_AMBIGUOUS = (
    Column("aleatoric_sd_all", "sd: aleatoric, all"),
    Column("aleatoric_sign_all", "signs: aleatoric, all"),
)
#: Of the paper's own figures, which have a table of their own.
PAPER_COLUMNS: Mapping[str, str] = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "ood_auroc": "OOD AUROC, AG News (chance .500)",
    "aupr_in": "AUPR-In (chance .103)",
    "mi_ratio": "MI ratio",
    "aupr_succ": "AUPR-Succ",
    "stored": "parameters",
    "minutes": "training, min",
}


def tables(rows: Sequence[Values]) -> tuple[Table, ...]:
    """Quality and cost beside the paper's; each out-of-distribution source; agreement with the raters."""
    variant = variant_of(rows)
    quality = table(
        rows,
        variant,
        quality_columns(rows),
        f"{variant}; out of distribution and errors by mutual information",
    )
    made = [quality, costs(rows, variant, "Cost", {}), paper_table()]
    for source in sources(rows):
        caption = f"Out of distribution: {TITLES[source]}; by mutual information except the last"
        made.append(table(rows, variant, unknown_columns(rows, source), caption))
    if "aleatoric_sd" in rows[0]["metrics"]:
        known = "aleatoric_sd_all" in rows[0]["metrics"]
        caption = (
            "Spearman rank correlation of uncertainty with how much the raters of a test sentence differ: standard "
            "deviation of the ratings, entropy of their signs"
        )
        caption += '; "all" adds the test part\'s sentences without a label' if known else ""
        columns = (*RATERS, *WITH_AMBIGUOUS) if known else RATERS
        made.append(table(rows, variant, columns, caption))
    return tuple(made)


def paper_table() -> Table:
    """The paper's figures for its own data."""
    rows = tuple(
        Row(CONTESTANTS[method].title, tuple(theirs.get(name, "–") for name in PAPER_COLUMNS))
        for method, theirs in PAPER_SST2.items()
    )
    caption = (
        "The paper's own figures, OTHER DATA: SST-2 (67,349 phrases), AG News as out of distribution, width 256, 64 "
        "pieces, one H100"
    )
    return Table(tuple(PAPER_COLUMNS.values()), rows, caption)


def targets(rows: Sequence[Values]) -> dict[str, bool]:
    """Whether low rank tells far sources at least as well as full-rank mean field; nothing without both."""
    found = of_variant(rows, variant_of(rows))
    if not {"low-rank", "mean-field"} <= set(found):
        return {}
    asked = [source for source in sources(rows) if source in FAR]
    ours, full = (
        sum(mean_of(found[method], f"{source}_auroc") for source in asked) / len(asked)
        for method in ("low-rank", "mean-field")
    )
    where = " and ".join(TITLES[source] for source in asked)
    words = f"sentiment: OOD AUROC of low rank ({ours:.3f}) ≥ full-rank mean field's ({full:.3f}), mean of {where}"
    return {words: ours >= full}


def run_sentiment(
    job: PartJob, settings: SentimentSettings | None = None, folder: Path | None = FOLDER
) -> Outcome:
    """The part `sentiment`: all methods.

    Raises:
        FileNotFoundError: if the sentences are not there.
        MissingExtraError: without the package ``tokenizers``.
    """
    settings = settings or (FULL if job.full else SentimentSettings())
    place = folder / ("full" if job.full else "default") if folder is not None else None
    if place is not None:
        job.say(f"    finished rows are kept in {place} and taken up again")
    processes = max(1, min(PROCESSES, cores() // torch.get_num_threads()))
    rows = measure((study(settings),), job.seeds, place, job.say, processes)
    return outcome(rows, settings, job.seeds)


def outcome(rows: Sequence[Values], settings: SentimentSettings, seeds: Sequence[int]) -> Outcome:
    """Tables, picture and words of finished rows."""
    variant = variant_of(rows)
    shown = {TITLES[source]: (variant, f"{source}_auroc") for source in sources(rows)}
    return Outcome(
        f"Sentiment of {variant}",
        _paragraphs(rows, settings, seeds),
        tables(rows),
        (ood_picture(rows, shown, "Other domains told by mutual information"),),
        {"rows": list(rows), "seeds": list(seeds)},
        targets(rows),
    )


def _paragraphs(rows: Sequence[Values], s: SentimentSettings, seeds: Sequence[int]) -> tuple[str, ...]:
    data = (
        "SST-2 as GLUE distributes it, 5 % of train.tsv for validation, dev.tsv to be judged on."
        if variant_of(rows) == SST2
        else "Sentences of film reviews with 15 to 29 ratings each stand in for SST-2. One is positive or "
        "negative by its mean rating, which must be beyond ±0.5; training, validation and test (80 : 10 : 10) are told "
        "apart by a hash of the text, the same for every seed."
    )
    unknown = f"at most {s.unknown:,} sentences of each" if s.unknown else "all sentences of each"
    seconds = sum(float(row["train_seconds"]) + float(row["exam_seconds"]) for row in rows)
    return (
        f"{data} Other domains ({unknown}) are asked only at the end.",
        f"A pre-norm Transformer encoder from scratch: 4 layers, width {s.width}, feed-forward {s.inner}, 4 heads, no "
        f"dropout, {s.length} pieces a sentence of at most {s.vocabulary:,} learned from the training sentences. Rank "
        f"{s.rank} in every matrix but the head, the embedding's included; what is no such matrix is mean field. Adam "
        f"with a highest rate of {s.lr:g} (but as below) along a cosine, batches of {s.batch}, at most {s.epochs} "
        f"epochs, the weights of the best validation NLL, {s.samples} draws, seeds {list(seeds)}. Time counts what a "
        f"method starts from; training and judging all rows took {seconds / 60:.0f} minutes of one core.",
        "Mean field and the low-rank factors start from scales of the fan-in, under priors of those scales. "
        + recipes_in_words(s),
    )


def recipes_in_words(s: SentimentSettings) -> str:
    """What was chosen, and how."""
    chosen = "; ".join(
        f"{CONTESTANTS[name].title} {one.beta:g}, {one.lr or s.lr:g}, {one.scale:g}"
        for name, one in s.recipes.items()
    )
    if not chosen:
        return "Every method has the default weight of the KL, learning rate and initial spread."
    return (
        "Weight of the KL (1 is the ELBO), learning rate and initial spread (of the weights' or factors' own scale), "
        f"in this order, were chosen by one search for mean field and factors alike, by validation NLL: {chosen}."
    )
