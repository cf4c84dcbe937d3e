"""Data parallelism inside a process: threads that share one set of weights, each with gradients of its own.

A tiny model's matrices are too small for a second thread *inside* an operation (on cores shared with anything else it makes training
several times slower), but whole micro-batches side by side scale, because torch lets go of the interpreter lock while it computes. Work is
dealt out by a rule that looks at sizes alone and gradients are summed in a fixed order, so results do not depend on which thread is faster.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch
from torch import nn

Module = TypeVar("Module", bound=nn.Module)
Item = TypeVar("Item")
Result = TypeVar("Result")


class Replicas(Generic[Module]):
    """A module and its twins.

    Args:
        module: The module; optimisers work on its parameters, in place.
        count: Threads, hence twins; 1 adds nothing.
    """

    def __init__(self, module: Module, count: int) -> None:
        self.module = module
        self._twins = [module] + [_twin(module) for _ in range(count - 1)]
        self._pool = ThreadPoolExecutor(count - 1, "t1-replica", _one_thread_an_operation) if count > 1 else None

    @property
    def count(self) -> int:
        """Threads."""
        return len(self._twins)

    def run(
        self, work: Callable[[Module, Item], Result], items: Sequence[Item], cost: Callable[[Item], int], *, gradients: bool = False
    ) -> list[Result]:
        """Apply ``work`` to every item, on whichever twin it is dealt to.

        Args:
            work: Called with a twin and an item; with ``gradients`` it may call ``backward``.
            items: What to work on.
            cost: Size of an item; the dealing rule evens out sums of it.
            gradients: Whether autograd records (its switch is a thread's own). Gradients end in the module's parameters.

        Returns:
            Results in the order of ``items``.
        """
        hands = deal([cost(item) for item in items], len(self._twins))

        def play(twin: Module, hand: Sequence[int]) -> list[Result]:
            with torch.set_grad_enabled(gradients):
                return [work(twin, items[index]) for index in hand]

        futures = (
            []
            if self._pool is None
            else [self._pool.submit(play, twin, hand) for twin, hand in zip(self._twins[1:], hands[1:], strict=True)]
        )
        try:
            played = [play(self.module, hands[0])]
        finally:
            # Threads still at work share the weights: they must have ended before an error lets the caller go on.
            done = [future.exception() for future in futures]
        for error in done:
            if error is not None:
                raise error
        played += [future.result() for future in futures]
        if gradients:
            self._sum_gradients()
        placed = {index: result for hand, results in zip(hands, played, strict=True) for index, result in zip(hand, results, strict=True)}
        return [placed[index] for index in range(len(items))]

    def _sum_gradients(self) -> None:
        for twin in self._twins[1:]:
            for ours, theirs in zip(self.module.parameters(), twin.parameters(), strict=True):
                if theirs.grad is not None:
                    ours.grad = theirs.grad if ours.grad is None else ours.grad.add_(theirs.grad)
                    theirs.grad = None


def deal(costs: Sequence[int], hands: int) -> list[list[int]]:
    """Deal items so that sums of costs are even: dearest first, each to the cheapest hand so far (ties to the first).

    Args:
        costs: Cost of each item.
        hands: Number of hands, some of which may stay empty.

    Returns:
        Indices of each hand, in the order they were dealt.
    """
    dealt: list[list[int]] = [[] for _ in range(hands)]
    sums = [0] * hands
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        lowest = sums.index(min(sums))
        dealt[lowest].append(index)
        sums[lowest] += costs[index]
    return dealt


def _twin(module: Module) -> Module:
    twin = copy.deepcopy(module)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        theirs.data = ours.data
        theirs.grad = None
    return twin


def _one_thread_an_operation() -> None:
    torch.set_num_threads(1)
