"""Bias correction: the mean rounding error of a packed weight, added back to its outputs. Measures no means itself."""

from __future__ import annotations

from torch import Tensor

from autotune.runtimes.native.quant.linear import Linear, Wide


class Biased:
    """A packed weight Ŵ whose outputs get (W − Ŵ)·E[x], so that their mean over the calibration text is that of W.

    See Nagel et al., "Data-Free Quantization through Weight Equalization and Bias Correction", 2019.
    """

    def __init__(self, inner: Linear, bias: Tensor) -> None:
        self.inner, self.bias, self.kernel = inner, bias, inner.kernel
        self.nbytes = inner.nbytes + bias.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.bias

    def dense(self) -> Tensor:
        return self.inner.dense()


def compensated(stored: Linear, weight: Tensor, mean: Tensor, columns: slice | None = None) -> Linear:
    """``stored`` with the correction for ``weight`` [out, in] and the mean input [in]; unpacked weights need none.

    Where only the inputs ``columns`` are stored the correction is their part of the sum over ranks.
    """
    if isinstance(stored, Wide):
        return stored
    if columns is not None:
        weight, mean = weight[:, columns], mean[columns]
    return Biased(stored, (weight - stored.dense()) @ mean)
