"""Cast a model's parameters without rounding the buffers that must stay float32."""

from __future__ import annotations

import torch
from torch import nn


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast floating-point parameters in place and leave buffers alone.

    ``module.to(bfloat16)`` also rounds the inverse frequencies of rotary embeddings, which moves every position by a little and shows up as
    a train-versus-rollout difference that no inference engine has.

    Args:
        module: Any module; shared parameters stay shared.
        dtype: A floating-point dtype.
    """
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
