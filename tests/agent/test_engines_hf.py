"""The transformers engine: log-probs, routes, determinism, the prefix cache, weight pushes."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from t1_agent.engines.base import Engine, EngineError  # noqa: E402
from t1_agent.engines.hf import HFEngine  # noqa: E402
from t1_agent.engines.weights import weights_checksum  # noqa: E402
from t1_agent.models.tiny_moe import build_actor, tiny_moe_config  # noqa: E402
from t1_agent.routing.record import RouteRecorder  # noqa: E402
from t1_agent.types import SamplingParams  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, STOP, PAD = 40, 3, 0


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def actor():
    config = tiny_moe_config(VOCAB, hidden=32, layers=3, heads=4, kv_heads=2, experts=6, top_k=2, moe_intermediate=16, max_positions=96)
    # A wide initialisation makes the distribution peaked enough for stops to be drawn and for mistakes to show.
    config.initializer_range = 0.3
    return build_actor(config, seed=0).eval()


def make_engine(actor, **options):
    return HFEngine(actor, stop_token_ids=[STOP], pad_token_id=PAD, **options)


def prompts_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(4, VOCAB, length).astype(np.int32) for length in lengths]


def recompute(actor, ids, temperature=1.0):
    """Log-probs of ids[1:] and routes of all of ids, in one plain forward pass."""
    with torch.no_grad(), RouteRecorder(actor) as recorder:
        logits = actor(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0, :-1]
    logps = torch.log_softmax(logits.float() / temperature, -1).gather(-1, torch.tensor(ids[1:, None].astype(np.int64)))[:, 0]
    return logps.numpy(), recorder.take()


def check_against_plain_forward(actor, prompt, completion, temperature=1.0):
    ids = np.concatenate([prompt, completion.token_ids])
    logps, routes = recompute(actor, ids, temperature)
    np.testing.assert_allclose(completion.logprobs, logps[len(prompt) - 1 :], atol=2e-5)
    start, stop = completion.routes_start, len(ids) - 1
    assert completion.routes.shape == (stop - start, 3, 2)
    np.testing.assert_array_equal(np.sort(completion.routes, -1), np.sort(routes[start:stop], -1))


def test_is_an_engine(actor):
    assert isinstance(make_engine(actor), Engine)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_and_routes_equal_a_plain_forward(actor, temperature):
    prompts = prompts_of([1, 5, 17, 9, 30, 2] * 2)
    completions = make_engine(actor, prefill_tokens=40).generate(prompts, SamplingParams(temperature, 20, seed=1))
    assert {completion.finish_reason for completion in completions} == {"stop", "length"}
    for prompt, completion in zip(prompts, completions, strict=True):
        assert (STOP in completion.token_ids) == (completion.finish_reason == "stop")
        assert STOP not in completion.token_ids[:-1]
        assert completion.logprobs.dtype == np.float32
        assert completion.token_ids.dtype == np.int32
        assert completion.routes.dtype == np.uint8
        check_against_plain_forward(actor, prompt, completion, temperature)


def test_greedy_takes_the_likeliest_and_reports_temperature_one(actor):
    prompt = prompts_of([7])[0]
    (completion,) = make_engine(actor).generate([prompt], SamplingParams(0.0, 8))
    check_against_plain_forward(actor, prompt, completion)
    ids = np.concatenate([prompt, completion.token_ids])
    with torch.no_grad():
        logits = actor(input_ids=torch.tensor(ids[None].astype(np.int64))).logits[0, len(prompt) - 1 : -1]
    np.testing.assert_array_equal(logits.argmax(-1).numpy(), completion.token_ids)


def test_same_seed_same_result_other_seed_other_result(actor):
    prompts = prompts_of([4, 9, 3])
    first, again, other = (make_engine(actor).generate(prompts, SamplingParams(1.0, 12, seed=seed)) for seed in (5, 5, 6))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        np.testing.assert_array_equal(a.routes, b.routes)
    assert any(len(a.token_ids) != len(b.token_ids) or (a.token_ids != b.token_ids).any() for a, b in zip(first, other, strict=True))


def test_no_seed_uses_the_engines_stream(actor):
    prompts = prompts_of([6] * 4)
    engine, twin = make_engine(actor, seed=9), make_engine(actor, seed=9)
    params = SamplingParams(1.0, 12)
    first, second = engine.generate(prompts, params), engine.generate(prompts, params)
    assert [c.token_ids.tolist() for c in first] != [c.token_ids.tolist() for c in second]
    assert [c.token_ids.tolist() for c in first] == [c.token_ids.tolist() for c in twin.generate(prompts, params)]


def test_sampling_follows_the_distribution(actor):
    prompt = prompts_of([5])[0]
    completions = make_engine(actor).generate([prompt] * 3000, SamplingParams(1.0, 1, seed=0))
    counts = np.bincount([int(c.token_ids[0]) for c in completions], minlength=VOCAB)
    with torch.no_grad():
        expected = actor(input_ids=torch.tensor(prompt[None].astype(np.int64))).logits[0, -1].softmax(-1).numpy() * 3000
    # Chi-square over cells with enough mass: 99.99% quantile for up to 39 degrees of freedom is below 80.
    cells = expected > 5
    assert ((counts - expected)[cells] ** 2 / expected[cells]).sum() < 80


def play(engine, turns=4, sessions=5, end_early=True):
    """Several sessions of several turns with observations of ragged lengths in between; sessions leave on the way."""
    rng = np.random.default_rng(3)
    histories = {f"s{i}": prompts_of([int(rng.integers(1, 12))], seed=i)[0] for i in range(sessions)}
    played = []
    for turn in range(turns):
        names = list(histories)
        completions = engine.generate([histories[n] for n in names], SamplingParams(1.0, 6, seed=turn), session_ids=names)
        for name, completion in zip(names, completions, strict=True):
            played.append((name, turn, histories[name], completion))
            observation = rng.integers(4, VOCAB, int(rng.integers(1, 9))).astype(np.int32)
            histories[name] = np.concatenate([histories[name], completion.token_ids, observation])
        if end_early:
            gone = names[turn % len(names)]
            engine.end_session(gone)
            del histories[gone]
        histories = dict(sorted(histories.items(), key=lambda item: zlib.crc32(f"{item[0]} {turn}".encode())))
    return played


def test_prefix_cache_changes_nothing_but_the_work(actor):
    cached, plain = make_engine(actor), make_engine(actor, prefix_cache=False)
    with_cache, without = play(cached), play(plain)
    assert len(with_cache) == len(without)
    for (name, turn, history, a), (_, _, _, b) in zip(with_cache, without, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids, err_msg=f"{name} turn {turn}")
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
        assert b.routes_start == 0
        np.testing.assert_array_equal(a.routes, b.routes[a.routes_start :])
        check_against_plain_forward(actor, history, a)
    assert cached.stats.reused_tokens > 0
    assert plain.stats.reused_tokens == 0
    assert cached.stats.prefilled_tokens + cached.stats.reused_tokens == plain.stats.prefilled_tokens


def test_rows_of_all_turns_tile_the_episode_but_its_last_token(actor):
    rows: dict[str, int] = {}
    for name, turn, history, completion in play(make_engine(actor), end_early=False):
        assert completion.routes_start == rows.get(name, 0), f"{name} turn {turn}"
        rows[name] = completion.routes_start + len(completion.routes)
        assert rows[name] == len(history) + len(completion.token_ids) - 1


def test_changed_history_is_cut_back_to_the_common_prefix(actor):
    engine = make_engine(actor)
    prompt = prompts_of([12])[0]
    engine.generate([prompt], SamplingParams(1.0, 5, seed=0), session_ids=["a"])
    changed = prompt.copy()
    changed[8] = 4 + (changed[8] - 3) % (VOCAB - 4)
    (completion,) = engine.generate([changed], SamplingParams(1.0, 5, seed=1), session_ids=["a"])
    assert completion.routes_start == 8
    check_against_plain_forward(actor, changed, completion)


def test_same_prompt_again_rereads_only_its_last_token(actor):
    engine = make_engine(actor)
    prompt = prompts_of([12])[0]
    first, second = (engine.generate([prompt], SamplingParams(1.0, 5, seed=0), session_ids=["a"])[0] for _ in range(2))
    assert second.routes_start == 11
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    check_against_plain_forward(actor, prompt, second)


def test_ended_session_starts_over(actor):
    engine = make_engine(actor)
    prompt = prompts_of([12])[0]
    engine.generate([prompt, prompt], SamplingParams(1.0, 5, seed=0), session_ids=["a", "b"])
    engine.end_session("a")
    engine.end_session("never seen")
    a, b = engine.generate([prompt, prompt], SamplingParams(1.0, 5, seed=1), session_ids=["a", "b"])
    assert (a.routes_start, b.routes_start) == (0, 11)


def test_requests_without_a_session_leave_nothing(actor):
    engine = make_engine(actor)
    engine.generate(prompts_of([5, 6]), SamplingParams(1.0, 5, seed=0))
    engine.generate(prompts_of([5, 6]), SamplingParams(1.0, 5, seed=0))
    assert engine.stats.reused_tokens == 0


def test_turn_is_cut_where_the_positions_end(actor):
    prompt = prompts_of([90])[0]
    completions = make_engine(actor).generate([prompt] * 8, SamplingParams(1.0, 30, seed=0))
    cut = [c for c in completions if c.finish_reason == "length"]
    assert cut
    assert all(len(c.token_ids) == 6 for c in cut)
    for completion in completions:
        check_against_plain_forward(actor, prompt, completion)


@pytest.mark.parametrize(
    ("prompts", "options", "complaint"),
    [
        ([np.zeros(0, dtype=np.int32)], {}, "0 tokens"),
        ([np.zeros(96, dtype=np.int32)], {}, "96 tokens"),
        ([np.array([1, VOCAB], dtype=np.int32)], {}, f"token id {VOCAB}"),
        ([np.array([-1, 2], dtype=np.int32)], {}, "token id -1"),
        ([np.array([1], dtype=np.int32)] * 2, {"session_ids": ["a", "a"]}, "one distinct id each"),
        ([np.array([1], dtype=np.int32)] * 2, {"session_ids": ["a"]}, "1 session ids for 2 prompts"),
    ],
)
def test_bad_requests_are_refused_and_leave_the_engine_usable(actor, prompts, options, complaint):
    engine = make_engine(actor)
    with pytest.raises(EngineError, match=complaint):
        engine.generate(prompts, SamplingParams(), **options)
    check_against_plain_forward(actor, prompts_of([4])[0], engine.generate(prompts_of([4]), SamplingParams(1.0, 3, seed=0))[0])


def test_bad_sampling_parameters_are_refused(actor):
    for params in (SamplingParams(temperature=-1.0), SamplingParams(max_tokens=0)):
        with pytest.raises(EngineError, match="expected temperature"):
            make_engine(actor).generate(prompts_of([4]), params)


def test_no_prompts_no_completions(actor):
    assert make_engine(actor).generate([], SamplingParams()) == []


def test_interrupted_call_does_not_poison_the_cache(actor, monkeypatch):
    engine = make_engine(actor)
    prompt = prompts_of([10])[0]
    engine.generate([prompt], SamplingParams(1.0, 5, seed=0), session_ids=["a"])
    longer = np.concatenate([prompt, prompts_of([6], seed=8)[0]])
    real_forward, calls = engine._forward, []

    def failing(*args):
        calls.append(args)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return real_forward(*args)

    monkeypatch.setattr(engine, "_forward", failing)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([longer, prompt], SamplingParams(1.0, 20, seed=0), session_ids=["a", "b"])
    monkeypatch.undo()
    for seed, ids in ((1, longer), (2, prompt)):
        (completion,) = engine.generate([ids], SamplingParams(1.0, 5, seed=seed), session_ids=["a"])
        check_against_plain_forward(actor, ids, completion)
    assert not any(module._forward_hooks for module in engine._model.modules())


def test_engine_keeps_its_own_copy_of_the_weights(actor):
    other = build_actor(actor.config, seed=7)
    engine = make_engine(other)
    prompts = prompts_of([5])
    before = engine.generate(prompts, SamplingParams(1.0, 5, seed=0))[0]
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-2.0)
    after = engine.generate(prompts, SamplingParams(1.0, 5, seed=0))[0]
    np.testing.assert_array_equal(before.logprobs, after.logprobs)
    assert other.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_weights_is_verified_versioned_and_drops_caches(actor, dtype):
    other = build_actor(actor.config, seed=7)
    engine = make_engine(actor, dtype=dtype)
    prompt = prompts_of([9])[0]
    (old,) = engine.generate([prompt], SamplingParams(1.0, 5, seed=0), session_ids=["a"])
    checksum = engine.load_weights(other.state_dict(), version=4)
    assert checksum == weights_checksum(other.state_dict(), dtype=dtype)
    assert checksum != weights_checksum(actor.state_dict(), dtype=dtype)
    (new,) = engine.generate([prompt], SamplingParams(1.0, 5, seed=0), session_ids=["a"])
    assert (old.weight_version, new.weight_version, engine.weight_version) == (0, 4, 4)
    assert new.routes_start == 0
    if dtype == torch.float32:
        check_against_plain_forward(other.eval(), prompt, new)


def test_weights_that_do_not_fit_are_refused_and_change_nothing(actor):
    engine = make_engine(actor)
    state = actor.state_dict()
    checksum = weights_checksum(state)
    partial = {name: torch.zeros_like(tensor) for name, tensor in list(state.items())[:-1]}
    with pytest.raises(EngineError, match="missing"):
        engine.load_weights(partial, 1)
    with pytest.raises(EngineError, match="unknown"):
        engine.load_weights({**state, "extra": torch.zeros(1)}, 1)
    bent = {name: torch.zeros(1) if name == "model.norm.weight" else torch.zeros_like(tensor) for name, tensor in state.items()}
    with pytest.raises(EngineError, match=r"model.norm.weight has shape \(1,\)"):
        engine.load_weights(bent, 1)
    assert engine.weight_version == 0
    assert engine.load_weights(state, 1) == checksum


def test_bf16_engine_rounds_parameters_but_not_rotary_frequencies(actor):
    engine = make_engine(actor, dtype=torch.bfloat16)
    assert engine.dtype == torch.bfloat16
    assert engine._model.model.rotary_emb.inv_freq.dtype == torch.float32
    prompt = prompts_of([20])[0]
    (completion,) = engine.generate([prompt], SamplingParams(1.0, 10, seed=0))
    logps, _ = recompute(actor, np.concatenate([prompt, completion.token_ids]))
    difference = np.abs(completion.logprobs - logps[len(prompt) - 1 :])
    assert 0 < difference.max() < 1.0


def test_dense_models_have_no_routes():
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    prompt = prompts_of([6])[0]
    (completion,) = make_engine(model).generate([prompt], SamplingParams(1.0, 6, seed=0))
    assert completion.routes is None
    with torch.no_grad():
        ids = np.concatenate([prompt, completion.token_ids]).astype(np.int64)
        logits = model(input_ids=torch.tensor(ids[None])).logits[0, len(prompt) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids[:, None].astype(np.int64)))[:, 0]
    np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=2e-5)


def test_sliding_window_models_are_refused():
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=4,
    )
    with pytest.raises(EngineError, match="full causal attention"):
        make_engine(MistralForCausalLM(config))


def test_closed_engine_says_so(actor):
    engine = make_engine(actor)
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.generate(prompts_of([3]), SamplingParams())


def test_checksum_sees_values_names_and_dtypes():
    base = {"a": torch.zeros(3), "b": torch.ones(2)}
    variants = [
        {"a": torch.zeros(3), "b": torch.tensor([1.0, 1.0000001])},
        {"a": torch.zeros(3), "c": torch.ones(2)},
        {"a": torch.zeros(1, 3), "b": torch.ones(2)},
        {"a": torch.zeros(3).double(), "b": torch.ones(2)},
    ]
    digests = {weights_checksum(state) for state in [base, *variants]}
    assert len(digests) == 5
    assert weights_checksum(dict(reversed(base.items()))) == weights_checksum(base)
    assert weights_checksum({"s": torch.tensor(2.0)}) != weights_checksum({"s": torch.tensor(3.0)})
