"""The critic: a trunk of its own and a float32 value head that starts at zero.

The trunk is separate from the actor's on purpose: a cold critic that shared the trunk destroyed the policy in a pilot within 20 iterations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ValueHead(nn.Linear):
    """``hidden -> 1`` without bias, zero at the start, float32 whatever the trunk is cast to.

    Args:
        hidden_size: Width of the trunk.
    """

    def __init__(self, hidden_size: int) -> None:
        super().__init__(hidden_size, 1, bias=False, dtype=torch.float32)

    def reset_parameters(self) -> None:
        """Set the weight to zero, so that every value is 0 before training."""
        nn.init.zeros_(self.weight)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ValueHead:
        # ``module.to(bfloat16)`` comes through here: follow the device, keep float32. Returns are sums of up to ten verifiers and bfloat16
        # would round them to steps of 0.03.
        device = fn(torch.empty(0, dtype=torch.float32, device=self.weight.device)).device
        super()._apply(lambda tensor: tensor.to(device), recurse)  # type: ignore[no-untyped-call]
        return self

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[..., hidden]`` of any float dtype to float32 ``[...]``."""
        return super().forward(hidden.float()).squeeze(-1)


class Critic(nn.Module):
    """State values from a transformers trunk.

    Args:
        trunk: A transformers base model (``AutoModel`` class, no language-model head).
    """

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.head = ValueHead(int(trunk.config.hidden_size))  # type: ignore[union-attr, arg-type]

    @classmethod
    def from_config(cls, config: Any, seed: int) -> Critic:
        """Build a critic with fresh weights that are a pure function of ``config`` and ``seed``; the global random state is kept."""
        from transformers import AutoModel

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return cls(AutoModel.from_config(config))  # type: ignore[no-untyped-call]

    @classmethod
    def from_actor(cls, actor: Any) -> Critic:
        """Build a critic whose trunk is a copy of the actor's (a transformers causal LM); later changes of one leave the other alone."""
        return cls(copy.deepcopy(actor.base_model))

    def values(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Value of every prefix.

        Args:
            input_ids: int64 [B, T].
            attention_mask: int64 or bool [B, T], 1 on real tokens. None is right, and faster, for right-padded batches: no real token
                ever looks at padding to its right.
            position_ids: int64 [B, T]. None counts from 0.

        Returns:
            float32 [B, T]; entry t is the value after reading token t. Entries on padding mean nothing.
        """
        outputs = self.trunk(input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False)
        values: torch.Tensor = self.head(outputs.last_hidden_state)
        return values

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Same as `values`; this is what wrappers such as DeepSpeed call."""
        return self.values(input_ids, attention_mask, position_ids)
