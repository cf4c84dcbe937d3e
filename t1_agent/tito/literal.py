"""Encode text from outside so that it stays text: no control token can come out, whatever the text holds.

A tokenizer matches the strings of its added tokens before anything else, so the output of ``cat`` on a file that holds ``<|im_end|>`` would
end the turn. The encoder here is the same vocabulary with every added token taken out of the matcher and out of the vocabulary: the ids
cannot be produced because they are not there.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from t1_agent.tito.errors import CodecError
from t1_agent.types import IntArray

if TYPE_CHECKING:
    from t1_agent.tito.tokenizer import ChatTokenizer

_UNICODE_NORMALIZERS: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_PROBES: Final = (
    "aBC",
    " leading and trailing ",
    "\r\n\t\x00\x1b[0m",
    "e\u0301 \u00e9 \U0001f600 \u200d\u200b",
    "0123456789 ____ --flag=/a/b",
)


class LiteralEncoder:
    """Byte-complete encoder over a tokenizer's vocabulary without its added tokens.

    Guarantees, checked when it is built: no id of an added token is in its vocabulary; ``decode(encode(x)) == x`` for every string of
    Unicode scalar values (lone surrogates, which no tokenizer can hold, become U+FFFD). On text that holds no added token's string and is
    already normalised it gives the ids of the normal encoder.

    Args:
        tokenizer: The tokenizer to take apart.

    Raises:
        CodecError: When the vocabulary is not a byte-complete BPE, or does not return the probes unchanged.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        from tokenizers import Tokenizer

        self._backend = Tokenizer.from_str(json.dumps(_without_added_tokens(json.loads(tokenizer.backend.to_str()))))
        emitted = set(self._backend.get_vocab(with_added_tokens=True).values())
        if overlap := emitted & tokenizer.control_ids:
            raise CodecError(f"literal encoder: control ids {sorted(overlap)[:10]} are still in the vocabulary under another name")
        for probe in (*_PROBES, *tokenizer.added_tokens):
            if (returned := self.decode(self.encode(probe))) != probe:
                raise CodecError(f"literal encoder: {probe!r} comes back as {returned!r}; this vocabulary cannot hold any text unchanged")

    def encode(self, text: str) -> IntArray:
        """Encode untrusted text.

        Returns:
            int32 [n], none of them a control id.
        """
        ids = self._backend.encode(_scalar_values(text), add_special_tokens=False).ids
        return np.asarray(ids, dtype=np.int32)

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Text of ids that ``encode`` gave."""
        return self._backend.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False)


def _without_added_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer's JSON without its added tokens, its post-processor and any Unicode normaliser."""
    model = spec["model"]
    if model.get("type") != "BPE":
        raise CodecError(f"literal encoder: vocabulary of type {model.get('type')!r}, expected 'BPE'")
    control = {token["content"] for token in spec["added_tokens"]}
    # They also leave the vocabulary: a model that looks whole words up before merging would find them there.
    vocab = {token: index for token, index in model["vocab"].items() if token not in control}
    _require_all_bytes(vocab, byte_fallback=bool(model.get("byte_fallback")))
    merges = [
        merge for merge in (tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]) if _keeps(merge, control)
    ]
    unk_token = model.get("unk_token")
    model = {**model, "vocab": vocab, "merges": [list(merge) for merge in merges], "unk_token": unk_token if unk_token in vocab else None}
    return {
        **spec,
        "model": model,
        "added_tokens": [],
        "post_processor": None,
        "truncation": None,
        "padding": None,
        "normalizer": _without_unicode_normalizer(spec.get("normalizer")),
    }


def _keeps(merge: tuple[str, ...], control: set[str]) -> bool:
    return not control.intersection((*merge, "".join(merge)))


def _require_all_bytes(vocab: dict[str, int], *, byte_fallback: bool) -> None:
    from tokenizers import pre_tokenizers

    wanted = [f"<0x{byte:02X}>" for byte in range(256)] if byte_fallback else pre_tokenizers.ByteLevel.alphabet()
    if missing := sorted(token for token in wanted if token not in vocab):
        raise CodecError(
            f"literal encoder: the vocabulary lacks {len(missing)} of 256 single bytes (first {missing[:5]}); expected all of them"
        )


def _without_unicode_normalizer(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    # Normalising would change what a program printed (a file name in NFD would come back in NFC and name no file).
    if normalizer is None or normalizer["type"] in _UNICODE_NORMALIZERS:
        return None
    if normalizer["type"] == "Sequence":
        kept = [step for step in map(_without_unicode_normalizer, normalizer["normalizers"]) if step is not None]
        return {**normalizer, "normalizers": kept} if kept else None
    return normalizer


def _scalar_values(text: str) -> str:
    """The text with lone surrogates replaced: Python strings can hold them (``surrogateescape``), UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
