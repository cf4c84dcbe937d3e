"""Wrappers: other shapes of observations and actions, and transcripts."""

from t1_env.wrappers.late import fold_late_rewards
from t1_env.wrappers.numeric import SCREEN_CLASSES, ArrayObservation, MenuAction, make_sb3_env, screen_classes
from t1_env.wrappers.record import RecordEpisode
from t1_env.wrappers.text import HistoryWindow, TextObservation

__all__ = [
    "SCREEN_CLASSES",
    "ArrayObservation",
    "HistoryWindow",
    "MenuAction",
    "RecordEpisode",
    "TextObservation",
    "fold_late_rewards",
    "make_sb3_env",
    "screen_classes",
]
