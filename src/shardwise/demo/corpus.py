"""The text that the demo's model reads: Shakespeare's "As You Like It", which belongs to everyone.

Characters become numbers and numbers characters; batches are windows of the play. Knows nothing of meshes.
"""

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
    """Windows of a text, and the same windows moved on by one character."""

    texts: Tensor
    following: Tensor


class Corpus:
    """A text, its characters in order, and the text as their numbers.

    Args:
        text: what is read.

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
        """The numbers of the characters of a text."""
        return [self.numbers[character] for character in text]

    def decode(self, numbers: Sequence[int]) -> str:
        """The text of some numbers."""
        return "".join(self.characters[number] for number in numbers)

    def batches(self, steps: int, size: int, length: int) -> Iterator[Batch]:
        """A batch for each step, the same ones each time.

        Args:
            steps: how many.
            size: how many windows in each.
            length: how many characters in a window.
        """
        generator = torch.Generator().manual_seed(0)
        for _ in range(steps):
            starts = torch.randint(len(self.encoded) - length, (size, 1), generator=generator)
            windows = self.encoded[starts + torch.arange(length + 1)]
            yield Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())


def read_corpus() -> Corpus:
    """The play that comes with the package.

    Example:
        >>> "All the world's a stage" in read_corpus().text
        True
    """
    return Corpus(resources.files("shardwise.demo").joinpath(FILE).read_text(encoding="ascii"))
