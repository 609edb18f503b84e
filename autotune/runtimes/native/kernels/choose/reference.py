"""Scores pools in fp32 and sorts them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def choose(
    queries: Tensor, weights: Tensor, keys: Tensor, positions: Tensor, kpool: int, top: int
) -> tuple[Tensor, Tensor]:
    """The best ``top`` pools of each query, [Q, k], and which of them are real.

    ``queries`` [Q, heads, size], ``weights`` [Q, heads], ``keys`` [G, P, size] of one sequence or one a query,
    ``positions`` [Q]. A pool of ``kpool`` tokens is visible once its last token is. Ties go to the earlier pool (stable
    sort), so that the choice does not depend on what else is in the batch.
    """
    keys = keys[0] if len(keys) == 1 else keys  # one product for all queries, not one a query
    scores = F.relu(queries @ keys.float().mT * queries.shape[-1] ** -0.5)
    scores = (weights[:, None] @ scores)[:, 0]
    ends = torch.arange(keys.shape[-2]) * kpool + kpool - 1
    scores = scores.masked_fill(ends > positions[:, None], -torch.inf)
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    count = min(top, scores.shape[-1])
    return order[:, :count], best[:, :count] > -torch.inf
