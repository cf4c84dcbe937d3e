"""The cases of the session contract, group by group."""

from typing import Final

from t1_env.testing.cases import commands, endings, input, jobs, limits, options, output, resources, screens
from t1_env.testing.terminal import SessionCase

SESSION_CASES: Final[tuple[SessionCase, ...]] = tuple(
    case for module in (commands, output, jobs, input, limits, endings, options, screens, resources) for case in module.TABLE.cases
)
"""Every promise of a session, as a function that checks it."""
