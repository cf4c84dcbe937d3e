"""What the training loop needs from outside: narrow protocols, so that it can be driven by a scripted game as well as by terminals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from t1_agent.types import Trajectory


class Collector(Protocol):
    """Plays episodes with the weights pushed last."""

    def collect(self, policy_version: int, n_episodes: int, seed: int, tasks: Sequence[str]) -> list[Trajectory]:
        """Play ``n_episodes`` on instances of ``tasks`` chosen by ``seed``; a pure function of weights and arguments."""


class Evaluator(Protocol):
    """Evaluates the weights pushed last on held-out tasks."""

    def evaluate(self, tag: str) -> dict[str, Any]:
        """Evaluate and keep the result under ``tag``; numbers in the returned dict go to the metrics."""


class WeightSink(Protocol):
    """Takes weights to where episodes are sampled."""

    def push(self, actor: Any, version: int) -> str:
        """Replace the sampler's weights, verify them, return their checksum; raises when they are not those of ``actor``."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the loop does not do itself.

    Args:
        demonstrate: Records the demonstrations, with a seed; the tokenizer is trained on the way and kept in the run directory. Called
            unless there is a checkpoint, so after a kill it may find its own traces.
        build_actor: Makes the actor with a seed; the tokenizer, hence the vocabulary, is there by then.
        connect: Collector, evaluator and weight sink for an actor of that shape.
        keep: Stores episodes under a name, or None.
        say: Takes progress lines.
    """

    demonstrate: Callable[[int], list[Trajectory]]
    build_actor: Callable[[int], Any]
    connect: Callable[[Any], tuple[Collector, Evaluator, WeightSink]]
    keep: Callable[[str, Sequence[Trajectory]], None] | None = None
    say: Callable[[str], None] = print
