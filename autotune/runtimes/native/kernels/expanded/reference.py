"""Masked attention by torch's own kernel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from autotune.runtimes.native.kernels.latents import Scope


def expanded(query: Tensor, keys: Tensor, values: Tensor, scope: Scope, scale: float) -> Tensor:
    """``query`` [G, M, H, d], ``keys`` [G, L, H, d], ``values`` [G, L, H, v] → fp32 [G, M, H, v].

    Products are of the type of the keys and values, which may be narrower than the query's.
    """
    mask = scope.mask(keys.shape[1])[:, None]
    q, k, v = (t.transpose(1, 2) for t in (query.to(keys.dtype), keys, values))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2).float()
