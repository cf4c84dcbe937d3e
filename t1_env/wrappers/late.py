"""Rewards that came a step late (``verify_async=True``), given back to the step that earned them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from t1_env.errors import ConfigError
from t1_env.verification import LATE_TERM


def fold_late_rewards(rewards: Sequence[float], infos: Sequence[Mapping[str, Any]]) -> list[float]:
    """Credit each late reward of an episode to the step that earned it.

    The result is what the same episode pays with ``verify_async=False``. A step whose action was not carried out, because it turned out
    that the episode had ended before it, has no reward of its own and is left out. The last step of an episode that its caller gives up
    is not waited for: ask ``TerminalEnv.collect_late_reward`` and append its info.

    Args:
        rewards: Reward of each step, in order.
        infos: Info of each step; may begin with that of the reset, and may end with that of ``collect_late_reward``.

    Returns:
        Reward of each action that was carried out.

    Raises:
        ConfigError: The two do not belong together.
    """
    steps = list(infos)
    if steps and not steps[0]["action_executed"] and not steps[0]["late_reward"]["turn"]:
        steps = steps[1:]  # of the reset: nothing was carried out, and nothing can be late
    given = list(rewards)
    if len(steps) == len(given) + 1 and not steps[-1]["action_executed"]:
        given.append(steps[-1]["reward_terms"].get(LATE_TERM, 0.0))
    if len(steps) != len(given):
        raise ConfigError(
            f"{len(rewards)} rewards and {len(infos)} infos: expected one info for each reward, and perhaps that of the reset"
        )
    folded: list[float] = []
    for reward, info in zip(given, steps, strict=True):
        late, terms = info["late_reward"], info["reward_terms"]
        if late["turn"]:
            if late["turn"] != len(folded):
                raise ConfigError(
                    f"a late reward of step {late['turn']} after {len(folded)} steps: expected the infos of one whole episode"
                )
            folded[-1] += late["reward"]
        if info["action_executed"]:
            own = math.fsum(amount for name, amount in terms.items() if name != LATE_TERM)
            folded.append(own if late["turn"] else float(reward))
    return folded
