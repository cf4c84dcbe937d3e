"""What a chat template puts around each message, as ids: derived by probing the template, checked against it, refused with the reason.

The template is rendered over conversations of unique marker words. What stands between two markers is a wrapper. Afterwards the template is
never rendered again: prompts and observations are put together from wrapper ids and literally encoded content.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

import numpy as np

from t1_agent.tito.errors import CodecError
from t1_agent.tito.literal import LiteralEncoder
from t1_agent.tito.tokenizer import ChatTokenizer, Message
from t1_agent.types import IntArray


class SegmentKind(StrEnum):
    """What a run of tokens is. Only ``SAMPLED`` is trained."""

    PROMPT = "prompt"
    """The opening of the episode: system text and instruction with their wrappers."""
    SAMPLED = "sampled"
    """Ids the engine sampled, its stop token included."""
    SYNTHETIC_CLOSE = "synthetic_close"
    """The close of a turn that the policy did not sample itself."""
    SEPARATOR = "separator"
    """What the template puts between the close of a turn and the next role."""
    ENV_CONTENT = "env_content"
    """Text from the environment, literally encoded."""
    ENV_WRAPPER = "env_wrapper"
    """Role wrapper around environment text."""
    GEN_PROMPT = "gen_prompt"
    """The opener of the assistant's turn."""


class Piece(NamedTuple):
    """Ids to append and what they are: ``ids`` int32 [n]."""

    kind: SegmentKind
    ids: IntArray


_SYSTEM: Final = "Sysmarker"
_USERS: Final = ("Firstmarker", "Secondmarker", "Thirdmarker")
_REPLIES: Final = ("Onereply", "Tworeply")


@dataclass(frozen=True, slots=True)
class _Wrappers:
    """Wrapper texts found in the template; ``system_*`` are None when it takes no system message."""

    user_open_first: str
    user_open: str
    user_close: str
    assistant_open: str
    assistant_close: str
    system_open: str | None
    system_close: str | None


class TurnCodec:
    """Turns text into the pieces of a conversation, for a template whose render of n messages begins the render of n + 1.

    Args:
        tokenizer: Tokenizer with its chat template.

    Attributes:
        close_ids: int32, what closes the assistant's turn (sampled by the policy, or added as ``SYNTHETIC_CLOSE``).
        separator_ids: int32, what follows the close before the next role; empty for some families.
        gen_prompt_ids: int32, the assistant opener.
        stop_ids: Ids at which an engine must stop: the close and the end-of-sequence token.
        literal: The encoder used for all content.

    Raises:
        CodecError: When the template is not append-only, its turns have no single close token, or the pieces do not give back the
            template's own ids. The message says which probe failed.
    """

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.tokenizer = tokenizer
        self.literal = LiteralEncoder(tokenizer)
        wrappers = _probe(tokenizer)
        close_text = _close_token(tokenizer, wrappers.assistant_close)
        self.close_ids = tokenizer.encode(close_text)
        self.separator_ids = tokenizer.encode(wrappers.assistant_close.removeprefix(close_text))
        self.gen_prompt_ids = tokenizer.encode(wrappers.assistant_open)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys((int(self.close_ids[0]), tokenizer.eos_id)))
        self._user_open_first = tokenizer.encode(wrappers.user_open_first)
        self._user_open = tokenizer.encode(wrappers.user_open)
        self._user_close = tokenizer.encode(wrappers.user_close)
        self._system: tuple[IntArray, IntArray] | None = None
        if wrappers.system_open is not None and wrappers.system_close is not None:
            self._system = tokenizer.encode(wrappers.system_open), tokenizer.encode(wrappers.system_close)
        self._check_against_template()

    def encode_prompt(self, instruction: str, *, system: str | None = None) -> tuple[Piece, ...]:
        """The opening of an episode, up to where the policy starts to write.

        Args:
            instruction: Text of the first user message, literally encoded.
            system: Text of the system message, literally encoded, or None for none.

        Raises:
            CodecError: When ``system`` is given and the template takes no system message.
        """
        parts: list[IntArray] = []
        user_open = self._user_open_first
        if system is not None:
            if self._system is None:
                raise CodecError("encode_prompt: got a system message, but the chat template takes none; put it into the instruction")
            system_open, user_open = self._system
            parts += [system_open, self.literal.encode(system)]
        parts += [user_open, self.literal.encode(instruction), self._user_close]
        return Piece(SegmentKind.PROMPT, np.concatenate(parts)), Piece(SegmentKind.GEN_PROMPT, self.gen_prompt_ids)

    def encode_observation(self, text: str) -> tuple[Piece, ...]:
        """What follows a closed assistant turn: separator, wrapped environment text, assistant opener. Empty pieces are left out."""
        pieces = (
            Piece(SegmentKind.SEPARATOR, self.separator_ids),
            Piece(SegmentKind.ENV_WRAPPER, self._user_open),
            Piece(SegmentKind.ENV_CONTENT, self.literal.encode(text)),
            Piece(SegmentKind.ENV_WRAPPER, self._user_close),
            Piece(SegmentKind.GEN_PROMPT, self.gen_prompt_ids),
        )
        return tuple(piece for piece in pieces if len(piece.ids))

    def encode_turn(self, text: str) -> IntArray:
        """Ids with which a scripted policy writes ``text`` and closes its turn: int32 [n]."""
        return np.concatenate([self.literal.encode(text), self.close_ids])

    def is_closed(self, token_ids: IntArray) -> bool:
        """Whether sampled ids end with the close of the turn."""
        return len(token_ids) > 0 and int(token_ids[-1]) == int(self.close_ids[0])

    def _check_against_template(self) -> None:
        """Compare the pieces, put together, with the template's own render of the same conversations."""
        for system in (None, _SYSTEM) if self._system is not None else (None,):
            messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
            messages.append({"role": "user", "content": _USERS[0]})
            ids = [piece.ids for piece in self.encode_prompt(_USERS[0], system=system)]
            self._compare(messages, ids)
            for reply, user in zip(_REPLIES, _USERS[1:], strict=True):
                messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": user}]
                ids += [self.encode_turn(reply), *(piece.ids for piece in self.encode_observation(user))]
                self._compare(messages, ids)

    def _compare(self, messages: list[Message], parts: list[IntArray]) -> None:
        expected = self.tokenizer.encode(self.tokenizer.render(messages, add_generation_prompt=True))
        got = np.concatenate(parts)
        if np.array_equal(got, expected):
            return
        shortest = min(len(got), len(expected))
        differing = np.flatnonzero(got[:shortest] != expected[:shortest])
        first = int(differing[0]) if len(differing) else shortest
        raise CodecError(
            f"codec: pieces of {len(messages)} messages differ from the template's render at token {first}: "
            f"got {self.tokenizer.decode(got[first : first + 8])!r}, expected {self.tokenizer.decode(expected[first : first + 8])!r}"
        )


def _probe(tokenizer: ChatTokenizer) -> _Wrappers:
    """Find the wrapper texts by rendering conversations that grow by one message."""
    messages: list[Message] = [{"role": "user", "content": _USERS[0]}]
    first = tokenizer.render(messages)
    user_open_first, user_close = _around(first, _USERS[0])
    opened = tokenizer.render(messages, add_generation_prompt=True)
    assistant_open = _appended(first, opened, "the generation prompt")
    if not assistant_open:
        raise CodecError("codec: the chat template adds no generation prompt; expected an assistant opener")
    rendered, user_open, assistant_close = opened, "", ""
    for reply, user in zip(_REPLIES, _USERS[1:], strict=True):
        messages.append({"role": "assistant", "content": reply})
        closed = tokenizer.render(messages)
        before, close = _around(_appended(rendered, closed, f"assistant message {len(messages)}"), reply)
        if before:
            raise CodecError(f"codec: the template puts {before!r} between its generation prompt and the reply; not append-only")
        messages.append({"role": "user", "content": user})
        opened = tokenizer.render(messages, add_generation_prompt=True)
        this_open, after = _around(_appended(closed, opened, f"user message {len(messages)}"), user)
        if after != user_close + assistant_open:
            raise CodecError(f"codec: a later user turn closes with {after!r}, the first with {user_close + assistant_open!r}")
        if assistant_close and (close, this_open) != (assistant_close, user_open):
            raise CodecError(f"codec: wrappers change with the turn: {(assistant_close, user_open)!r}, then {(close, this_open)!r}")
        rendered, user_open, assistant_close = opened, this_open, close
    system_open, system_close = _probe_system(tokenizer, user_close)
    return _Wrappers(user_open_first, user_open, user_close, assistant_open, assistant_close, system_open, system_close)


def _probe_system(tokenizer: ChatTokenizer, user_close: str) -> tuple[str | None, str | None]:
    """Text before the system content, and between it and the first user content; (None, None) when the template takes no system."""
    messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USERS[0]}]
    try:
        rendered = tokenizer.render(messages)
    except CodecError:
        return None, None  # the template raises on a system message; encode_prompt then refuses one too
    if rendered.count(_SYSTEM) != 1:
        return None, None
    system_open, rest = _around(rendered, _SYSTEM)
    between, close = _around(rest, _USERS[0])
    return (system_open, between) if close == user_close else (None, None)


def _around(text: str, marker: str) -> tuple[str, str]:
    """Text before and after the only occurrence of ``marker``."""
    if text.count(marker) != 1:
        raise CodecError(f"codec: the template shows the content {marker!r} {text.count(marker)} times in {text[-200:]!r}, expected once")
    before, _, after = text.partition(marker)
    return before, after


def _appended(before: str, after: str, what: str) -> str:
    """What ``after`` adds to ``before``."""
    if not after.startswith(before):
        same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
        raise CodecError(
            f"codec: the template is not append-only: {what} changes the text before it at character {same}, "
            f"from {before[same : same + 40]!r} to {after[same : same + 40]!r}"
        )
    return after[len(before) :]


def _close_token(tokenizer: ChatTokenizer, assistant_close: str) -> str:
    """The added token that the close of an assistant turn starts with."""
    candidates = [token for token in tokenizer.added_tokens if assistant_close.startswith(token)]
    if not candidates:
        raise CodecError(
            f"codec: an assistant turn closes with {assistant_close!r}; expected it to start with an added token (a stop token)"
        )
    return max(candidates, key=len)
