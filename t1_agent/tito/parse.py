"""Read an action from sampled ids. Read-only: whatever the policy wrote stays in the ledger as it is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np

from t1_agent.tito.codec import TurnCodec
from t1_agent.types import Completion
from t1_env.protocol import Submit

SUBMIT_WORD: Final = "submit"


class ParseStatus(StrEnum):
    """What a turn turned out to be."""

    COMMAND = "command"
    SUBMIT = "submit"
    MALFORMED = "malformed"
    TRUNCATED = "truncated"


@dataclass(frozen=True, slots=True)
class ParsedAction:
    """The action in a sampled turn, or why there is none.

    Args:
        status: What the turn is.
        text: Decoded turn without its stop token, blanks at both ends included.
        action: What to give to ``env.step``: the command line, ``Submit()``, or None when nothing may be executed.
        problem: Text of the environment turn that tells the policy what was wrong; empty when ``action`` is set.
    """

    status: ParseStatus
    text: str
    action: str | Submit | None
    problem: str = ""


def parse_action(completion: Completion, codec: TurnCodec) -> ParsedAction:
    """Read the action of one turn: the whole text without blanks at both ends is the command, and ``submit`` alone ends the episode.

    A command may span lines. A turn that was cut by length is never executed, nor is one that is empty or holds a control token, a NUL or
    bytes that are not UTF-8 (running what they decode to would run something the policy did not write).

    Args:
        completion: The turn as the engine gave it.
        codec: The codec of the policy's chat template.
    """
    ids = completion.token_ids
    stopped = len(ids) > 0 and int(ids[-1]) in codec.stop_ids
    body = ids[:-1] if stopped else ids
    text = codec.tokenizer.decode(body)
    if completion.finish_reason == "length" and not stopped:
        return ParsedAction(
            ParseStatus.TRUNCATED, text, None, f"not run: the turn was cut after {len(ids)} tokens; write a shorter command"
        )
    command = text.strip()
    problem = ""
    if np.isin(body, list(codec.tokenizer.control_ids)).any():
        problem = "not run: the turn holds a control token; write one command"
    elif not command:
        problem = f"not run: the turn is empty; write one command, or {SUBMIT_WORD} to end"
    elif "\ufffd" in command:
        problem = "not run: the turn is not valid UTF-8; write one command"
    elif "\x00" in command:
        problem = "not run: the turn holds a NUL; write one command"
    if problem:
        return ParsedAction(ParseStatus.MALFORMED, text, None, problem)
    if command == SUBMIT_WORD:
        return ParsedAction(ParseStatus.SUBMIT, text, Submit())
    return ParsedAction(ParseStatus.COMMAND, text, command)
