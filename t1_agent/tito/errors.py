"""What the token-in-token-out core refuses, and why."""

from __future__ import annotations

from t1_env.errors import T1Error


class TitoError(T1Error, ValueError):
    """Base of the errors of ``t1_agent.tito``."""


class LedgerError(TitoError):
    """An append that would break the ledger, or a trajectory whose ids are no longer those of its ledger."""


class CodecError(TitoError):
    """A tokenizer or a chat template that cannot be used token by token; the message gives the reason."""
