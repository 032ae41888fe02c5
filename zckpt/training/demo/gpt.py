"""A small GPT that learns this library's source, byte by byte. A step's batch depends on its number alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

BATCH = 12
"""Sequences in a batch, of all ranks together: what 4, 3 and 2 ranks can share."""

BYTES = 128
"""The source is ASCII."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the model is.

    Parameters
    ----------
    width, layers, heads : int
    length : int
        Bytes of a sequence.
    """

    width: int = 64
    layers: int = 2
    heads: int = 4
    length: int = 64


SMALL = Size(width=16, layers=1, heads=2, length=16)


class GPT(nn.Module):
    """Embeddings, causal layers, and a head that is tied to the embedding of bytes."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, size.width)
        self.place = nn.Embedding(size.length, size.width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                size.width, size.heads, 4 * size.width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, BYTES, bias=False)
        nn.init.normal_(self.byte.weight, std=0.1)
        nn.init.normal_(self.place.weight, std=0.1)
        self.head.weight = self.byte.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each byte from those before it.

        Parameters
        ----------
        ids : Tensor of int64, sequences x (length + 1)
        """
        given, expected = ids[:, :-1], ids[:, 1:]
        length = given.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.byte(given) + self.place.weight[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), expected.flatten())


def source_text() -> torch.Tensor:
    """Return the bytes of this library's source."""
    root = Path(__file__).resolve().parents[2]
    text = b"".join(path.read_bytes() for path in sorted(root.glob("*.py")))
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long() % BYTES


def batch(text: torch.Tensor, size: Size, seed: int, step: int) -> torch.Tensor:
    """Return the sequences of a step, for all ranks together: `BATCH` x (length + 1)."""
    numbers = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - size.length, (BATCH,), generator=numbers)
    return torch.stack([text[start : start + size.length + 1] for start in starts.tolist()])
