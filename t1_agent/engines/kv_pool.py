"""Keys and values of many sessions in one buffer, and the attention that reads them.

Row r of the buffer belongs to one session and slot s of a row to position s of its tokens, so there are no padding holes: the mask is
``slot <= position``, whatever lengths the rows have, and cutting a row back is only a matter of forgetting. Appending writes in place,
where a concatenating cache would copy everything it holds for every token.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

GROUPED_ATTENTION = "t1_grouped_sdpa"


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Scaled dot-product attention that never repeats keys and values for every query head.

    The stock path does so whenever there is a mask, which took 81 ms a layer for one new token in each of 128 rows of 700 tokens (float32,
    one CPU thread). Grouped-query attention takes 10 ms for that, and 3 ms when the query heads that share a key/value head are folded
    into the query length; with many new tokens a row the fold would copy the mask, and the unfolded form is the faster one.

    Args:
        module: The attention module; unused.
        query: [B, heads, T, D].
        key: [B, kv_heads, S, D].
        value: [B, kv_heads, S, Dv].
        attention_mask: Additive, [B, 1, T, S].
        dropout: Must be 0: this is for sampling.
        scaling: Factor of the scores.
        kwargs: What else transformers passes; unused.

    Returns:
        [B, T, heads, Dv], and None for the attention weights.
    """
    if attention_mask is None or dropout:
        raise ValueError("grouped_attention is for cached sampling: it needs an additive mask and no dropout")
    batch, heads, length, size = query.shape
    if length == 1:
        folded = query.reshape(batch, key.shape[1], heads // key.shape[1], size)
        mask = attention_mask.expand(-1, -1, folded.shape[2], -1)
        return F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling).reshape(batch, 1, heads, -1), None
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED_ATTENTION, grouped_attention)


class KVPool(Cache):
    """A transformers cache over ``rows`` sessions that reads and writes a window of rows per forward pass.

    Args:
        layers: Attention layers of the model.
    """

    def __init__(self, layers: int) -> None:
        super().__init__(layers=[])
        self._keys: list[torch.Tensor | None] = [None] * layers
        self._values: list[torch.Tensor | None] = [None] * layers
        self.rows = 0
        self.slots = 0
        self._start = 0
        self._stop = 0
        self._length = 0
        self._write_slots = torch.empty(0, 0, dtype=torch.long)
        self._write_rows = torch.empty(0, 1, dtype=torch.long)

    def reserve(self, rows: int, slots: int) -> None:
        """Make room for at least ``rows`` sessions of ``slots`` tokens; what is held stays.

        Room grows by half as much again, so that an episode which lengthens turn by turn is copied a logarithmic number of times.
        """
        if rows <= self.rows and slots <= self.slots:
            return
        if slots > self.slots:
            self.slots = slots + slots // 2
        self.rows = max(rows, self.rows)
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    buffers[layer] = self._grown(old)

    def _grown(self, old: torch.Tensor) -> torch.Tensor:
        new = self._allocate(old)
        # Slot counts include the scratch slot, which is not carried over.
        new[: old.shape[0], :, : old.shape[2] - 1] = old[:, :, :-1]
        return new

    def _allocate(self, like: torch.Tensor) -> torch.Tensor:
        # Zeroed, not empty: masked slots are multiplied by zero, and zero times an uninitialised NaN is NaN.
        # One slot more than the room: padding is written there, where no mask ever looks.
        return torch.zeros(self.rows, like.shape[1], self.slots + 1, like.shape[3], dtype=like.dtype, device=like.device)

    def begin(self, start: int, stop: int, positions: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Choose the window of the next forward pass.

        Args:
            start: First row.
            stop: Row after the last.
            positions: int64 [stop - start, T], position of each new token.
            real: bool of the same shape, False on padding; None when there is none.

        Returns:
            bool [stop - start, T, S]: which slots each new token may look at.
        """
        self._start, self._stop = start, stop
        self._length = int(positions.max()) + 1
        if self._length > self.slots or stop > self.rows:
            raise ValueError(f"KVPool: rows up to {stop} and {self._length} slots were not reserved ({self.rows} and {self.slots} are)")
        self._write_slots = positions if real is None else positions.masked_fill(~real, self.slots)
        self._write_rows = torch.arange(stop - start, device=positions.device)[:, None]
        return torch.arange(self._length, device=positions.device) <= positions[..., None]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new keys and values [B, heads, T, D] of a layer; return all those of the window."""
        return self._write(self._keys, layer_idx, key_states), self._write(self._values, layer_idx, value_states)

    def _write(self, buffers: list[torch.Tensor | None], layer: int, new: torch.Tensor) -> torch.Tensor:
        buffer = buffers[layer]
        if buffer is None:
            buffer = buffers[layer] = self._allocate(new)
        window = buffer[self._start : self._stop]
        window.transpose(1, 2)[self._write_rows, self._write_slots] = new.transpose(1, 2)
        return window[:, :, : self._length]

    @torch.inference_mode()
    def swap(self, first: int, second: int, length: int) -> None:
        """Exchange the first ``length`` slots of two rows."""
        for buffers in (self._keys, self._values):
            for buffer in buffers:
                if buffer is not None:
                    kept = buffer[first, :, :length].clone()
                    buffer[first, :, :length] = buffer[second, :, :length]
                    buffer[second, :, :length] = kept

    def size_bytes(self) -> int:
        """Memory held."""
        return sum(buffer.nbytes for buffers in (self._keys, self._values) for buffer in buffers if buffer is not None)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Slots in the current window."""
        return self._length
