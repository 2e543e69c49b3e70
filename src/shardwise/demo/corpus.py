"""The demo's training data: Shakespeare's "As You Like It" (public domain), as character indices in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Batch", "Corpus", "read_corpus"]

TITLE = "As You Like It"
FILE = "as_you_like_it.txt"


class Batch(NamedTuple):
    """Windows of a text, and the same windows shifted by one character."""

    texts: Tensor
    following: Tensor


class Corpus:
    """A text, its sorted characters, and the text as character indices.

    Args:
        text: the text.

    Example:
        >>> corpus = Corpus("to be or not to be")
        >>> corpus.characters, corpus.decode(corpus.encode("bone"))
        (' benort', 'bone')
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.characters = "".join(sorted(set(text)))
        self.numbers = {character: number for number, character in enumerate(self.characters)}
        self.encoded = torch.tensor(self.encode(text))

    def encode(self, text: str) -> list[int]:
        """The character indices of a text."""
        return [self.numbers[character] for character in text]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of character indices."""
        return "".join(self.characters[number] for number in numbers)

    def batches(self, steps: int, size: int, length: int) -> Iterator[Batch]:
        """A batch for each step; deterministic.

        Args:
            steps: the number of batches.
            size: windows in a batch.
            length: characters in a window.
        """
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            starts = torch.randint(len(self.encoded) - length, (size, 1), generator=generator)
            windows = self.encoded[starts + torch.arange(length + 1)]
            yield Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def read_corpus() -> Corpus:
    """The play that is included in the package.

    Example:
        >>> "All the world's a stage" in read_corpus().text
        True
    """
    return Corpus(resources.files("shardwise.demo").joinpath(FILE).read_text(encoding="ascii"))
