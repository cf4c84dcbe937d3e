"""Scripted agents and checks, for tests of your own tasks, sandboxes, wrappers and integrations."""

from t1_env.testing.rollouts import Rollout, assert_deterministic, noop_actions, oracle_actions, rollout
from t1_env.testing.session import SESSION_CASES, CaseResult, SessionCase, SessionReport, check_session

__all__ = [
    "SESSION_CASES",
    "CaseResult",
    "Rollout",
    "SessionCase",
    "SessionReport",
    "assert_deterministic",
    "check_session",
    "noop_actions",
    "oracle_actions",
    "rollout",
]
