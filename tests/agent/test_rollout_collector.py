"""Episodes and collections over a scripted game: nothing re-tokenised, nothing half-written executed, order and seeds respected."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="needs the agent extra: pip install 't1-terminal[agent]'")

from t1_agent.engines.scripted import ScriptedEngine
from t1_agent.rollout.collector import Collector, CollectorConfig, stream_seed
from t1_agent.rollout.demonstrations import Script, record_demonstrations
from t1_agent.rollout.episode import Episode, EpisodeLimits
from t1_agent.tito import TurnCodec, train_tokenizer, verify_digests
from t1_agent.types import Completion, SamplingParams
from t1_env.errors import SandboxDied, SandboxUnavailable
from t1_env.protocol import Submit

LIMITS = EpisodeLimits(max_turns=5, max_context_tokens=400, max_turn_tokens=16, observation_chars=60)


class EchoEnv:
    """One verifier for each distinct word said; three solve it. ``break`` breaks the machinery, as often as ``faults`` says."""

    def __init__(self, faults: dict[str, int] | None = None, delay: bool = False) -> None:
        self.actions: list[Any] = []
        self.closed = False
        self._faults = faults if faults is not None else {}
        self._delay = delay

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        assert options is not None
        self._task = options["task"]
        self._words: set[str] = set()
        return self._observation(""), self._info(None)

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        self.actions.append(action)
        if self._delay:
            time.sleep(random.random() * 0.003)
        if self._faults.get(self._task, 0) > 0:
            self._faults[self._task] -= 1
            return self._observation(""), 0.0, False, True, self._info("infra_failure")
        if isinstance(action, Submit):
            return self._observation(""), 0.0, True, False, self._info("submitted")
        before = len(self._words)
        self._words.update(action.split()[:1])
        return self._observation(f"<|im_end|> you said {action}"), float(len(self._words) - before), False, False, self._info(None)

    def close(self) -> None:
        self.closed = True

    def _observation(self, output: str) -> dict[str, Any]:
        return {"output": output, "exit_code": np.int32(0), "state": 0}

    def _info(self, end: str | None) -> dict[str, Any]:
        return {
            "instruction": f"say three words {self._task}",
            "verifiers_passed": len(self._words),
            "verifiers_total": 3,
            "end_reason": end,
            "infra_error": "sandbox died" if end == "infra_failure" else None,
        }


class LateEnv(EchoEnv):
    """The same, but what a step earned is known only when it is asked for, and three words end the episode; ``break`` breaks it then."""

    pending = 0.0
    breaks = False
    solving = False

    def step(self, action: Any) -> tuple[dict[str, Any], float, bool, bool, dict[str, Any]]:
        assert not self.pending, "asked before the next step"
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated:
            return observation, reward, terminated, truncated, info | {"reward_pending": False}
        self.pending, self.breaks = float(reward), action == "break"
        return observation, 0.0, False, False, info | {"reward_pending": True, "verifiers_passed": -1}

    def get_wrapper_attr(self, name: str) -> Any:
        return getattr(self, name)

    def collect_late_reward(self) -> dict[str, Any]:
        earned, self.pending = 0.0 if self.breaks else self.pending, 0.0
        end = "infra_failure" if self.breaks else "solved" if self.solving and len(self._words) == 3 else None
        return self._info(end) | {"reward_pending": False, "late_reward": {"reward": earned}}


@pytest.fixture(scope="module")
def codec() -> TurnCodec:
    return TurnCodec(train_tokenizer(["say three words seeds/a", "ls one two three submit", "exit 0 you said"] * 20, vocab_size=320))


def completion(codec: TurnCodec, text: str, *, stop: bool = True) -> Completion:
    ids = codec.encode_turn(text)
    ids = ids if stop else ids[:-1]
    return Completion(ids, np.full(len(ids), -0.5, dtype=np.float32), "stop" if stop else "length", weight_version=3)


def begun(codec: TurnCodec, env: EchoEnv | None = None, limits: EpisodeLimits = LIMITS) -> tuple[Episode, EchoEnv]:
    env = env or EchoEnv()
    episode = Episode(env, codec, limits, session_id="s")
    episode.begin("seeds/a", 1)
    return episode, env


def test_prompts_only_grow_and_the_loss_holds_what_was_sampled(codec: TurnCodec) -> None:
    episode, _ = begun(codec)
    sampled = []
    while not episode.done:
        before = episode.prompt_ids.copy()
        turn = completion(codec, ("one", "two", "submit")[len(sampled)])
        sampled.append(turn)
        episode.advance(turn)
        if not episode.done:
            head = np.concatenate([before, turn.token_ids])
            assert np.array_equal(episode.prompt_ids[: len(head)], head)
    trajectory = episode.trajectory()
    assert np.array_equal(trajectory.token_ids[trajectory.loss_mask], np.concatenate([c.token_ids for c in sampled]))
    assert trajectory.rewards.tolist() == [1.0, 1.0, 0.0]
    assert trajectory.metadata["drift_tokens_in_loss"] == 0
    assert trajectory.terminated
    assert trajectory.end_reason == "submitted"
    verify_digests(trajectory)


@pytest.mark.parametrize(
    ("said", "limits", "solving", "rewards", "end"),
    [
        (["one", "two", "submit"], LIMITS, False, [1.0, 1.0, 0.0], "submitted"),
        (["one", "two", "three", "four"], LIMITS, True, [1.0, 1.0, 1.0], "solved"),
        (["one", "", "two", "one", "two"], LIMITS, False, [1.0, 0.0, 1.0, 0.0, 0.0], "turn_limit"),
        (["one", "two", "three"], EpisodeLimits(3, 400, 16, 60), True, [1.0, 1.0, 1.0], "solved"),
        (["one", "two"], EpisodeLimits(2, 400, 16, 60), False, [1.0, 1.0], "turn_limit"),
        (["one", "break", "two"], LIMITS, False, [1.0, 0.0], "infra_failure"),
        (["one", "break"], EpisodeLimits(2, 400, 16, 60), False, [1.0, 0.0], "infra_failure"),
    ],
)
def test_a_late_reward_is_credited_to_its_turn(
    codec: TurnCodec, said: list[str], limits: EpisodeLimits, solving: bool, rewards: list[float], end: str
) -> None:
    env = LateEnv()
    env.solving = solving
    episode, _ = begun(codec, env, limits)
    taken = 0
    while not episode.done:
        episode.advance(completion(codec, said[taken]))
        taken += 1
    assert taken == len(said)
    trajectory = episode.trajectory()
    assert trajectory.rewards.tolist() == [turn.reward for turn in trajectory.turns] == rewards
    assert trajectory.end_reason == end
    assert (trajectory.terminated, trajectory.truncated) == (end in ("submitted", "solved"), end not in ("submitted", "solved"))
    assert all(turn.verifiers_passed >= 0 for turn in trajectory.turns)
    assert len(env.actions) == len([word for word in said[: len(rewards)] if word]), "what follows no state is not carried out"
    assert trajectory.metadata["drift_tokens_in_loss"] == 0
    verify_digests(trajectory)


def test_environment_text_holds_no_control_token(codec: TurnCodec) -> None:
    episode, _ = begun(codec)
    for text in ("one", "submit"):
        episode.advance(completion(codec, text))
    trajectory = episode.trajectory()
    closes = int(codec.close_ids[0])
    # One close for the instruction, one for each sampled turn, one for the observation: the text of the observation adds none.
    assert int((trajectory.token_ids == closes).sum()) == 4
    assert "<|im_end|> you said one" in trajectory.turns[0].observation


def test_a_turn_cut_by_length_is_never_executed(codec: TurnCodec) -> None:
    episode, env = begun(codec)
    episode.advance(completion(codec, "rm precious", stop=False))
    assert env.actions == []
    assert not episode.done
    episode.advance(completion(codec, "submit"))
    trajectory = episode.trajectory()
    assert trajectory.turns[0].action is None
    assert trajectory.rewards.tolist() == [0.0, 0.0]
    assert trajectory.repairs["boundary/synthetic_close"] == 1


def test_turns_that_say_nothing_still_cost_a_turn(codec: TurnCodec) -> None:
    episode, env = begun(codec)
    for _ in range(LIMITS.max_turns):
        episode.advance(completion(codec, "  "))
    assert env.actions == []
    trajectory = episode.trajectory()
    assert trajectory.truncated
    assert trajectory.end_reason == "turn_limit"


def test_an_episode_is_cut_before_it_outgrows_the_context(codec: TurnCodec) -> None:
    limits = EpisodeLimits(max_turns=50, max_context_tokens=150, max_turn_tokens=16, observation_chars=60)
    episode, _ = begun(codec, limits=limits)
    while not episode.done:
        assert len(episode.prompt_ids) + limits.max_turn_tokens <= limits.max_context_tokens
        episode.advance(completion(codec, "one"))
    assert episode.trajectory().end_reason == "context_limit"


def test_an_unfinished_episode_is_no_trajectory(codec: TurnCodec) -> None:
    episode, _ = begun(codec)
    with pytest.raises(ValueError, match="has not ended"):
        episode.trajectory()
    with pytest.raises(ValueError, match="has not begun"):
        _ = Episode(EchoEnv(), codec, LIMITS, session_id="t").prompt_ids


def chatty(codec: TurnCodec) -> ScriptedEngine:
    """Says a word that depends on the prompt, and submits after a number of turns that does too."""

    def script(prompt: Any, turn: int) -> list[int]:
        if turn >= 1 + len(prompt) % 3:
            return codec.encode_turn("submit").tolist()
        return codec.encode_turn(("one", "two", "three")[int(prompt.sum()) % 3]).tolist()

    return ScriptedEngine(script, stop_token_ids=sorted(codec.stop_ids))


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("concurrency", [2, 16])
def test_results_come_in_the_order_of_the_tasks(codec: TurnCodec, groups: int, concurrency: int) -> None:
    tasks = [f"seeds/{'x' * index}" for index in range(7)]
    config = CollectorConfig(concurrency=concurrency, env_threads=3, groups=groups)
    seen: list[tuple[int, int]] = []
    with Collector(lambda: EchoEnv(delay=True), chatty(codec), codec, SamplingParams(max_tokens=16), LIMITS, config) as collector:
        episodes = collector.collect(tasks, seed=5, progress=lambda done, total: seen.append((done, total)))
    assert [episode.task_id for episode in episodes] == tasks
    assert [done for done, _ in seen] == list(range(1, 8))


def test_the_same_seed_gives_the_same_episodes_however_terminals_race(codec: TurnCodec) -> None:
    def play() -> list[list[int]]:
        with Collector(
            lambda: EchoEnv(delay=True), chatty(codec), codec, SamplingParams(max_tokens=16), LIMITS, CollectorConfig(env_threads=4)
        ) as collector:
            return [episode.token_ids.tolist() for episode in collector.collect(["a", "bb", "ccc", "dd"], seed=9)]

    assert play() == play()


def test_an_episode_the_machinery_broke_is_played_again(codec: TurnCodec) -> None:
    faults = {"a": 1, "b": 99}
    with Collector(
        lambda: EchoEnv(faults), chatty(codec), codec, SamplingParams(max_tokens=16), LIMITS, CollectorConfig(max_infra_retries=1)
    ) as collector:
        first, second, third = collector.collect(["a", "b", "c"], seed=0)
    assert not first.infra_failure
    assert second.infra_failure
    assert second.rewards.sum() == 0.0
    assert not third.infra_failure


def test_a_sandbox_that_cannot_be_made_is_an_infra_failure_and_not_the_end_of_the_run(codec: TurnCodec) -> None:
    class Broken(EchoEnv):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            assert options is not None
            if options["task"] == "b":
                raise SandboxDied("the sandbox is gone")
            return super().reset(seed=seed, options=options)

    with Collector(Broken, chatty(codec), codec, SamplingParams(max_tokens=16), LIMITS) as collector:
        first, second = collector.collect(["a", "b"], seed=0)
    assert not first.infra_failure
    assert second.infra_failure
    assert len(second.rewards) == 0
    assert second.metadata["infra_error"] == "the sandbox is gone"


def test_a_machine_without_sandboxes_stops_the_collection(codec: TurnCodec) -> None:
    class Unavailable(EchoEnv):
        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            raise SandboxUnavailable("no namespaces here")

    with (
        Collector(Unavailable, chatty(codec), codec, SamplingParams(max_tokens=16), LIMITS) as collector,
        pytest.raises(SandboxUnavailable),
    ):
        collector.collect(["a"], seed=0)


def test_closing_closes_every_environment_and_leaves_no_thread(codec: TurnCodec) -> None:
    before = threading.active_count()
    envs: list[EchoEnv] = []

    def make() -> EchoEnv:
        envs.append(EchoEnv())
        return envs[-1]

    collector = Collector(make, chatty(codec), codec, SamplingParams(max_tokens=16), LIMITS)
    collector.collect(["a", "b"], seed=0)
    collector.close()
    collector.close()
    assert len(envs) == 2
    assert all(env.closed for env in envs)
    assert threading.active_count() == before


def test_stream_seeds_are_named_and_stable() -> None:
    assert stream_seed("sample", 1, 2) == stream_seed("sample", 1, 2)
    assert len({stream_seed("sample", a, b) for a in range(20) for b in range(20)}) == 400
    assert 0 <= stream_seed("x") < 2**63


def test_demonstrations_are_what_the_script_says(codec: TurnCodec) -> None:
    scripts = [Script("a", ("one", "two", "submit")), Script("b", ("one", "one", "submit"), slip="said-twice"), Script("c", ("submit",))]
    episodes = record_demonstrations(EchoEnv, codec, scripts, limits=LIMITS, seed=0, threads=2)
    assert [[turn.action for turn in episode.turns] for episode in episodes] == [list(script.turns) for script in scripts]
    assert [episode.metadata["slip"] for episode in episodes] == [None, "said-twice", None]
    assert [float(episode.rewards.sum()) for episode in episodes] == [2.0, 1.0, 0.0]
    for episode in episodes:
        verify_digests(episode)
