"""Word pieces: a tokeniser learned from the training sentences alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dubito.data.digits import MissingExtraError

PADDING, UNKNOWN, START = "[PAD]", "[UNK]", "[CLS]"
SPECIAL = (PADDING, UNKNOWN, START)  #: their numbers are 0, 1 and 2
CONTINUES = "##"


@dataclass(frozen=True)
class WordPieces:
    """A vocabulary of word pieces and how to cut sentences into them, longest piece first.

    Attributes:
        vocabulary: the pieces by number; the first three are `SPECIAL`.
        length: T, numbers in an encoded sentence; longer ones are cut off.
    """

    vocabulary: tuple[str, ...]
    length: int
    _engine: Any = field(repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.vocabulary)

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Numbers of the pieces, int64 ``(N, T)``: the start, the sentence, and padding (0) to the end."""
        if not texts:
            return torch.zeros(0, self.length, dtype=torch.long)
        return torch.tensor([one.ids for one in self._engine.encode_batch(list(texts))])

    def pieces(self, text: str) -> list[str]:
        """The pieces of one sentence, the start first, without padding."""
        return [piece for piece in self._engine.encode(text).tokens if piece != PADDING]


def train_word_pieces(texts: Sequence[str], size: int = 4000, length: int = 32) -> WordPieces:
    """Learn a vocabulary; the same texts give the same numbers, whatever the number of threads.

    Text is lower-cased and stripped of accents, and cut at spaces and punctuation before pieces are learned, as
    BERT's is.

    Args:
        texts: training sentences; no other should be given.
        size: most pieces, the special ones and every character (at a word's start and within) included; fewer where
            the texts have no more, more where the characters alone are.
        length: T of the encoded sentences, the start included.

    Raises:
        MissingExtraError: if the package ``tokenizers`` is not installed (extra ``text``).
        ValueError: without texts, or for a size or length too small.
    """
    if not texts:
        raise ValueError("texts is empty: there is nothing to learn pieces from")
    if size <= len(SPECIAL):
        raise ValueError(f"size={size} must be above {len(SPECIAL)}, the number of special pieces")
    if length < 2:
        raise ValueError(f"length={length} must be at least 2: the start and one piece")
    tokenizers = _package()
    learner = _engine(tokenizers, {UNKNOWN: 0})
    # Ties between pairs are broken by the numbers of their parts, and those of continuing characters are given in the
    # order of a hash table unless they are known beforehand.
    characters = sorted(
        {one for text in texts for one in learner.normalizer.normalize_str(text) if not one.isspace()}
    )
    trainer = tokenizers.trainers.WordPieceTrainer(
        vocab_size=size,
        special_tokens=[*SPECIAL, *(CONTINUES + one for one in characters)],
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    learned = sorted(set(learner.get_vocab()) - set(SPECIAL))
    vocabulary = (*SPECIAL, *learned)
    return _with_length(tokenizers, vocabulary, length)


def _package() -> Any:
    try:
        import tokenizers
        import tokenizers.models
        import tokenizers.normalizers
        import tokenizers.pre_tokenizers
        import tokenizers.processors
        import tokenizers.trainers
    except ImportError as error:
        raise MissingExtraError(
            "word pieces are learned by the package tokenizers, which is not installed. It is in the extra 'text': "
            "pip install 'dubito[text]'"
        ) from error
    return tokenizers


def _engine(tokenizers: Any, numbers: dict[str, int]) -> Any:
    engine = tokenizers.Tokenizer(
        tokenizers.models.WordPiece(numbers, unk_token=UNKNOWN, continuing_subword_prefix=CONTINUES)
    )
    engine.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    return engine


def _with_length(tokenizers: Any, vocabulary: tuple[str, ...], length: int) -> WordPieces:
    engine = _engine(tokenizers, {piece: number for number, piece in enumerate(vocabulary)})
    start = SPECIAL.index(START)
    engine.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, start)]
    )
    engine.enable_truncation(length)
    engine.enable_padding(pad_id=SPECIAL.index(PADDING), pad_token=PADDING, length=length)
    return WordPieces(vocabulary, length, engine)
