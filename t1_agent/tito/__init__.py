"""Token in, token out: the learner trains on exactly the ids that the engine sampled.

Importing this loads neither torch nor transformers.
"""

from t1_agent.tito.codec import Piece, SegmentKind, TurnCodec
from t1_agent.tito.errors import CodecError, LedgerError, TitoError
from t1_agent.tito.ledger import Ledger, Segment, verify_digests
from t1_agent.tito.literal import LiteralEncoder
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
    "Segment",
    "SegmentKind",
    "TitoError",
    "TurnCodec",
    "parse_action",
    "train_tokenizer",
    "verify_digests",
]
