"""Token in, token out: the learner trains on exactly the ids that the engine sampled.

Importing this loads neither torch nor transformers.
"""

from t1_agent.tito.codec import Piece, SegmentKind, TurnCodec
from t1_agent.tito.drift import Retokenised, baseline_drift_tokens, drift_tokens_in_loss, retokenise, retokenised_trajectory
from t1_agent.tito.errors import CodecError, LedgerError, TitoError
from t1_agent.tito.ledger import Ledger, Segment, verify_digests
from t1_agent.tito.literal import LiteralEncoder
from t1_agent.tito.observation import cut_middle, render_observation
from t1_agent.tito.parse import ParsedAction, ParseStatus, parse_action
from t1_agent.tito.tokenizer import ChatTokenizer, train_tokenizer

__all__ = [
    "ChatTokenizer",
    "CodecError",
    "Ledger",
    "LedgerError",
    "LiteralEncoder",
    "ParseStatus",
    "ParsedAction",
    "Piece",
    "Retokenised",
    "Segment",
    "SegmentKind",
    "TitoError",
    "TurnCodec",
    "baseline_drift_tokens",
    "cut_middle",
    "drift_tokens_in_loss",
    "parse_action",
    "render_observation",
    "retokenise",
    "retokenised_trajectory",
    "train_tokenizer",
    "verify_digests",
]
