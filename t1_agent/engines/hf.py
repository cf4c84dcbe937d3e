"""Sample from a transformers model, many sessions in lock step, with routes recorded and earlier turns never read twice."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from t1_agent.engines.base import EngineError, EngineStats
from t1_agent.engines.kv_pool import GROUPED_ATTENTION, KVPool
from t1_agent.engines.sampling import draw, scaled_log_probs
from t1_agent.engines.weights import weights_checksum
from t1_agent.models.precision import cast_parameters
from t1_agent.routing.record import RouteRecorder
from t1_agent.types import Completion, IntArray, RouteArray, SamplingParams

# Finished requests keep running (and are ignored) until this share of the batch is left; then the live ones move together.
_COMPACT_BELOW = 0.8


@dataclass(slots=True, eq=False)
class _Row:
    """One row of the KV pool: what it holds, and for whom (None: for one call only)."""

    session: str | None
    # Tokens whose keys and values are known to be right.
    ids: IntArray = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    # Slots that have ever been written; at least ``len(ids)``.
    length: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    """One prompt on its way through a call of ``generate``."""

    index: int
    prompt: IntArray
    row: _Row
    reused: int
    limit: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routes: list[RouteArray] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def new(self) -> int:
        """Prompt tokens still to be read."""
        return len(self.prompt) - self.reused

    @property
    def read_position(self) -> int:
        """Position of the last sampled token, the next to be read."""
        return len(self.prompt) + len(self.tokens) - 1


class HFEngine:
    """An `Engine` over a private copy of a transformers causal LM.

    Requests of a call run in lock step, one token at a time. A session's keys and values stay between calls, so a prompt that extends
    what the session has read costs only its new tokens; a prompt that departs from it is cut back to the common prefix first. Results do
    not depend on the cache beyond rounding. For the same weights, calls and seeds the result is bit-equal on the same machine, dtype
    and thread count. Not thread-safe.

    Args:
        model: A transformers causal LM with full attention in every layer. It is copied: later training does not reach the engine.
        stop_token_ids: Ids that end a turn; the sampled one is part of the completion.
        pad_token_id: Id fed where a row of a batch has nothing to read; it is never visible to any real token.
        dtype: Dtype of the parameters; None keeps the model's.
        record_routes: Record the experts of every token read. A model without MoE layers records nothing.
        prefix_cache: Keep what sessions have read between calls.
        prefill_tokens: Most tokens of one forward pass over prompts, which bounds memory.
        seed: Seed of the sampling stream used when ``SamplingParams.seed`` is None.
        weight_version: Version of the weights the model comes with.

    Raises:
        EngineError: When the model has sliding-window or linear attention.
        UnsupportedRouter: When routes are to be recorded and a router has no adapter.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        stop_token_ids: Sequence[int],
        pad_token_id: int,
        dtype: torch.dtype | None = None,
        record_routes: bool = True,
        prefix_cache: bool = True,
        prefill_tokens: int = 8192,
        seed: int = 0,
        weight_version: int = 0,
    ) -> None:
        clone: Any = copy.deepcopy(model)
        clone.requires_grad_(False).eval()
        for parameter in clone.parameters():
            parameter.grad = None
        self._model: Any = clone
        if dtype is not None:
            cast_parameters(self._model, dtype)
        _require_full_attention(self._model.config)
        self._model.set_attn_implementation(GROUPED_ATTENTION)
        self._vocab_size = int(self._model.config.vocab_size)
        self._max_positions = int(self._model.config.max_position_embeddings)
        self._stop = frozenset(int(token) for token in stop_token_ids)
        self._pad = pad_token_id
        self._recorder = RouteRecorder(self._model) if record_routes else None
        if self._recorder is not None and not self._recorder.sites:
            self._recorder = None
        self._prefix_cache = prefix_cache
        self._prefill_tokens = prefill_tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._version = weight_version
        self._rows: list[_Row] = []
        self._pool = KVPool(int(self._model.config.num_hidden_layers))
        self.stats = EngineStats()

    @property
    def weight_version(self) -> int:
        """Version of the weights in use."""
        return self._version

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the parameters."""
        return next(iter(self._model.parameters())).dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """Device of the parameters."""
        return next(iter(self._model.parameters())).device  # type: ignore[no-any-return]

    def generate(
        self, prompts: Sequence[IntArray], params: SamplingParams, *, session_ids: Sequence[str] | None = None
    ) -> list[Completion]:
        """Sample one turn for each prompt; see `Engine.generate`.

        A turn also ends (``"length"``) where the model's positions end. With reuse, ``Completion.routes_start`` is the first position that
        was computed in this call, and rows reach the last but one token of prompt + completion.
        """
        requests = self._admit(prompts, params, session_ids)
        if not requests:
            return []
        try:
            with torch.inference_mode(), self._recorder or nullcontext():
                lanes = self._arrange(requests)
                uniforms = self._uniforms(params, len(requests))
                started = time.perf_counter()
                logits = self._prefill(lanes)
                prefilled = time.perf_counter()
                self._decode(lanes, logits, params.temperature, uniforms)
                self.stats.prefill_seconds += prefilled - started
                self.stats.decode_seconds += time.perf_counter() - prefilled
            for request in requests:
                # The last sampled token has not been read.
                request.row.ids = np.concatenate([request.prompt, np.asarray(request.tokens[:-1], dtype=np.int32)])
        finally:
            self._forget_unnamed()
        return [self._completion(request) for request in requests]

    def end_session(self, session_id: str) -> None:
        """Forget what a session has read; unknown ids are fine."""
        for index, row in enumerate(self._rows):
            if row.session == session_id:
                self._remove_row(index)
                return

    def load_weights(self, state_dict: Mapping[str, Any], version: int) -> str:
        """Copy weights in, drop every session's cache and return the checksum of what is now held; see `Engine.load_weights`.

        Compare with ``weights_checksum(model.state_dict(), dtype=engine.dtype)``.
        """
        own = self._model.state_dict()
        missing, unknown = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys())
        if missing or unknown:
            raise EngineError(
                f"load_weights: names differ: missing {missing[:5]}, unknown {unknown[:5]}; pass the model's whole state_dict()"
            )
        for name, tensor in own.items():
            if tensor.shape != state_dict[name].shape:
                raise EngineError(f"load_weights: {name} has shape {tuple(state_dict[name].shape)}, expected {tuple(tensor.shape)}")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(state_dict[name])
        self._rows.clear()
        self._version = version
        return weights_checksum(own)

    def close(self) -> None:
        """Release model and caches."""
        self._rows.clear()
        self._pool = KVPool(0)
        self._model = None

    # -- one call of generate, in order ------------------------------------------------------------------------------------------

    def _admit(self, prompts: Sequence[IntArray], params: SamplingParams, session_ids: Sequence[str] | None) -> list[_Request]:
        if self._model is None:
            raise EngineError("HFEngine.generate: the engine is closed")
        if params.temperature < 0 or params.max_tokens < 1:
            raise EngineError(f"HFEngine.generate: got {params}, expected temperature >= 0 and max_tokens >= 1")
        if session_ids is not None and (len(session_ids) != len(prompts) or len(set(session_ids)) != len(prompts)):
            raise EngineError(
                f"HFEngine.generate: got {len(session_ids)} session ids for {len(prompts)} prompts, expected one distinct id each"
            )
        for index, prompt in enumerate(prompts):
            self._check_prompt(index, prompt)
        rows = {row.session: row for row in self._rows}
        requests = []
        for index, prompt in enumerate(prompts):
            name = session_ids[index] if session_ids is not None and self._prefix_cache else None
            row = rows.get(name) if name is not None else None
            if row is None:
                row = _Row(name)
                self._rows.append(row)
            ids = np.asarray(prompt, dtype=np.int32)
            # One token at least must be read again: its logits are the start of the turn.
            reused = min(_common_prefix(row.ids, ids), len(ids) - 1)
            row.ids = row.ids[:reused]
            requests.append(_Request(index, ids, row, reused, min(params.max_tokens, self._max_positions - len(ids))))
            self.stats.reused_tokens += reused
            self.stats.prefilled_tokens += len(ids) - reused
        return requests

    def _check_prompt(self, index: int, prompt: IntArray) -> None:
        if not 0 < len(prompt) < self._max_positions:
            raise EngineError(f"HFEngine.generate: prompt {index} has {len(prompt)} tokens, expected 1 to {self._max_positions - 1}")
        low, high = int(np.min(prompt)), int(np.max(prompt))
        if low < 0 or high >= self._vocab_size:
            raise EngineError(
                f"HFEngine.generate: prompt {index} holds token id {low if low < 0 else high}, expected 0 to {self._vocab_size - 1}"
            )

    def _arrange(self, requests: list[_Request]) -> list[_Request]:
        """Bring the rows of this call to the front, most new tokens first, so that a batch is a view of the pool and wastes little."""
        longest = max(len(request.prompt) + request.limit for request in requests)
        self._pool.reserve(len(self._rows), min(longest, self._max_positions))
        lanes = sorted(requests, key=lambda request: -request.new)
        for target, lane in enumerate(lanes):
            current = next(index for index in range(target, len(self._rows)) if self._rows[index] is lane.row)
            self._swap_rows(target, current)
        return lanes

    def _prefill(self, lanes: list[_Request]) -> torch.Tensor:
        """Read all new prompt tokens; return the logits [B, V] after each prompt."""
        logits = []
        start = 0
        while start < len(lanes):
            width = lanes[start].new
            stop = min(len(lanes), start + max(1, self._prefill_tokens // width))
            logits.append(self._prefill_window(lanes[start:stop], start, width))
            start = stop
        return torch.cat(logits)

    def _prefill_window(self, lanes: list[_Request], start: int, width: int) -> torch.Tensor:
        # Right-aligned, so that the logits wanted are those of the last column for every row.
        tokens = np.full((len(lanes), width), self._pad, dtype=np.int64)
        positions = np.zeros((len(lanes), width), dtype=np.int64)
        real = np.zeros((len(lanes), width), dtype=np.bool_)
        for lane_tokens, lane_positions, lane_real, lane in zip(tokens, positions, real, lanes, strict=True):
            lane_tokens[width - lane.new :] = lane.prompt[lane.reused :]
            lane_positions[width - lane.new :] = np.arange(lane.reused, len(lane.prompt))
            lane_real[width - lane.new :] = True
        logits = self._forward(start, tokens, positions, None if real.all() else real)
        for lane in lanes:
            lane.row.length = max(lane.row.length, len(lane.prompt))
        if self._recorder is not None:
            rows = self._recorder.take().reshape(len(lanes), width, *self._recorder.shape)
            for index, lane in enumerate(lanes):
                lane.routes.append(rows[index, width - lane.new :])
        return logits

    def _decode(self, lanes: list[_Request], logits: torch.Tensor, temperature: float, uniforms: torch.Tensor | None) -> None:
        """Sample until every lane has finished. ``lanes[i]`` sits in pool row i throughout."""
        step = 0
        while True:
            numbers = None if uniforms is None else uniforms[step, [lane.index for lane in lanes]].to(logits.device)
            drawn, logprobs = draw(scaled_log_probs(logits, temperature), numbers)
            for lane, token, logprob in zip(lanes, drawn.tolist(), logprobs.tolist(), strict=True):
                if lane.finish_reason is None:
                    self._accept(lane, token, logprob)
            lanes = self._compact(lanes)
            if not lanes:
                return
            # A finished lane that is still here reads its last token over and over, in the slot after its last; nobody sees it.
            tokens = np.array([[lane.tokens[-1]] for lane in lanes], dtype=np.int64)
            positions = np.array([[min(lane.read_position, self._max_positions - 1)] for lane in lanes], dtype=np.int64)
            logits = self._forward(0, tokens, positions, None)
            rows = self._recorder.take() if self._recorder is not None else None
            for index, lane in enumerate(lanes):
                lane.row.length = max(lane.row.length, int(positions[index, 0]) + 1)
                if rows is not None and lane.finish_reason is None:
                    lane.routes.append(rows[index : index + 1])
            step += 1

    def _accept(self, lane: _Request, token: int, logprob: float) -> None:
        lane.tokens.append(token)
        lane.logprobs.append(logprob)
        self.stats.sampled_tokens += 1
        if token in self._stop:
            lane.finish_reason = "stop"
        elif len(lane.tokens) >= lane.limit:
            lane.finish_reason = "length"

    def _compact(self, lanes: list[_Request]) -> list[_Request]:
        """Move live lanes to the front once enough have finished, and drop the others from the batch."""
        alive = sum(lane.finish_reason is None for lane in lanes)
        if alive and alive > _COMPACT_BELOW * len(lanes):
            return lanes
        lanes = list(lanes)
        last = len(lanes) - 1
        for index in range(alive):
            if lanes[index].finish_reason is None:
                continue
            while lanes[last].finish_reason is not None:
                last -= 1
            lanes[index], lanes[last] = lanes[last], lanes[index]
            self._swap_rows(index, last)
        return lanes[:alive]

    def _forward(self, start: int, tokens: Any, positions: Any, real: Any) -> torch.Tensor:
        """Run [B, T] tokens through rows ``start ...`` of the pool; return the logits [B, V] of the last column."""
        device = self.device
        position_ids = torch.from_numpy(positions).to(device)
        visible = self._pool.begin(start, start + len(tokens), position_ids, None if real is None else torch.from_numpy(real).to(device))
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=device).masked_fill_(~visible, float("-inf"))
        outputs = self._model(
            input_ids=torch.from_numpy(tokens).to(device),
            attention_mask=mask[:, None],
            position_ids=position_ids,
            past_key_values=self._pool,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = outputs.logits[:, -1]
        return logits

    def _uniforms(self, params: SamplingParams, requests: int) -> torch.Tensor | None:
        """Draw all random numbers of a call at once, so that when lanes finish has no influence on the others' numbers."""
        if params.temperature == 0:
            return None
        generator = self._generator if params.seed is None else torch.Generator().manual_seed(params.seed)
        return torch.rand(params.max_tokens, requests, dtype=torch.float64, generator=generator)

    def _completion(self, request: _Request) -> Completion:
        assert request.finish_reason is not None
        return Completion(
            token_ids=np.asarray(request.tokens, dtype=np.int32),
            logprobs=np.asarray(request.logprobs, dtype=np.float32),
            finish_reason=request.finish_reason,
            weight_version=self._version,
            routes=cast(RouteArray, np.concatenate(request.routes)) if self._recorder is not None else None,
            routes_start=request.reused,
        )

    # -- rows of the pool --------------------------------------------------------------------------------------------------------

    def _swap_rows(self, first: int, second: int) -> None:
        if first != second:
            self._pool.swap(first, second, max(self._rows[first].length, self._rows[second].length))
            self._rows[first], self._rows[second] = self._rows[second], self._rows[first]

    def _remove_row(self, index: int) -> None:
        self._swap_rows(index, len(self._rows) - 1)
        self._rows.pop()

    def _forget_unnamed(self) -> None:
        for index in range(len(self._rows) - 1, -1, -1):
            if self._rows[index].session is None:
                self._remove_row(index)


def _common_prefix(held: IntArray, prompt: IntArray) -> int:
    """Number of leading ids two arrays share."""
    shared = min(len(held), len(prompt))
    differing = np.flatnonzero(held[:shared] != prompt[:shared])
    return int(differing[0]) if len(differing) else shared


def _require_full_attention(config: Any) -> None:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds or getattr(config, "sliding_window", None) is not None:
        raise EngineError(
            f"HFEngine: {type(config).__name__} has attention other than full causal attention "
            f"({', '.join(sorted(kinds)) or 'sliding_window'}), which its cache does not hold; use another engine"
        )
