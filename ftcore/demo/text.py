"""Text that every Python has: the language reference in `pydoc_data.topics`, as characters."""

from __future__ import annotations

from pydoc_data.topics import topics

import torch
from torch import Tensor

from ftcore.demo.model import CONTEXT


class Corpus:
    """Sample `i` is the CONTEXT characters from position `i × CONTEXT`, and the ones after them."""

    def __init__(self) -> None:
        text = "\n".join(topics[name] for name in sorted(topics))
        letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
        self.vocabulary = len(letters)
        self._tokens = torch.tensor([letters[letter] for letter in text], dtype=torch.long)

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // CONTEXT

    def batch(self, samples: list[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both (len(samples), CONTEXT) int64."""
        starts = [sample * CONTEXT for sample in samples]
        inputs = torch.stack([self._tokens[s : s + CONTEXT] for s in starts])
        targets = torch.stack([self._tokens[s + 1 : s + CONTEXT + 1] for s in starts])
        return inputs, targets
