"""Rows of logits that stress the logprob op: what each one tempts an implementation to get wrong.

Owns the inputs alone. Knows neither an implementation nor the expected result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Rows = Callable[[int, int, torch.Generator], torch.Tensor]


def _normal(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=generator, device=generator.device)


def llm_like(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """A bulk near 0 and a thin tail of plausible tokens up to about 25."""
    tail = torch.rand(rows, vocab, generator=generator, device=generator.device)
    return _normal(rows, vocab, generator) * 2.0 + 16.0 * tail.pow(400)


def flat(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Almost uniform: every term of the sum counts."""
    return _normal(rows, vocab, generator) * 0.01


def peaked(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """One logit far above all others."""
    x = _normal(rows, vocab, generator)
    at = torch.randint(vocab, (rows, 1), generator=generator, device=generator.device)
    return x.scatter_(1, at, 60.0)


def tied(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Few distinct values, so that the top is full of ties."""
    return (_normal(rows, vocab, generator) * 2.0).round()


def masked(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """A grammar's mask: all but about ten tokens are -inf, in some rows all of them."""
    x = _normal(rows, vocab, generator)
    drawn = torch.rand(rows, vocab, generator=generator, device=generator.device)
    x[drawn > 10.0 / vocab] = -torch.inf
    x[::5] = -torch.inf
    return x


def ascending(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """The largest logits share one group."""
    return _normal(rows, vocab, generator).sort(dim=1).values


def descending(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """As ascending, from the other end."""
    return ascending(rows, vocab, generator).flip(1).contiguous()


def constant(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Every logit equal: ids alone decide."""
    return torch.full((rows, vocab), -1.5, device=generator.device)


def huge_offset(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """A common offset that dwarfs the differences, of either sign."""
    sign = torch.where(torch.arange(rows, device=generator.device) % 2 == 0, 1e4, -1e4)
    return _normal(rows, vocab, generator) * 8.0 + sign[:, None]


def signed_zeros(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """Nothing above zero, zeros of both signs: they are equal."""
    x = -_normal(rows, vocab, generator).abs()
    x[:, ::3] = -0.0
    x[:, 1::7] = 0.0
    return x


def not_a_number(rows: int, vocab: int, generator: torch.Generator) -> torch.Tensor:
    """NaN of both signs, +inf and -inf among ordinary logits."""
    x = _normal(rows, vocab, generator)
    last = vocab - 1
    x[0::4, min(7, last)] = torch.nan
    x[1::4, min(11, last)] = -torch.nan
    x[2::4, min(3, last)] = torch.inf
    x[:, last // 2] = -torch.inf
    return x


ALL: dict[str, Rows] = {
    rows.__name__: rows
    for rows in (
        llm_like,
        flat,
        peaked,
        tied,
        masked,
        ascending,
        descending,
        constant,
        huge_offset,
        signed_zeros,
        not_a_number,
    )
}
