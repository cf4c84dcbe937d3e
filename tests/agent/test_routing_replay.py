"""R3: what is recorded is what computed, and replay is exact, scoped and leaves gradients alive."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from t1_agent.models.critic import Critic  # noqa: E402
from t1_agent.models.precision import cast_parameters  # noqa: E402
from t1_agent.models.tiny_moe import build_actor, tiny_moe_config  # noqa: E402
from t1_agent.routing.adapters import ADAPTERS, RoutingError, UnsupportedRouter, router_sites  # noqa: E402
from t1_agent.routing.record import RouteRecorder  # noqa: E402
from t1_agent.routing.replay import RoutingReplay  # noqa: E402

pytestmark = pytest.mark.torch

VOCAB, LAYERS, EXPERTS, TOP_K = 40, 3, 6, 2
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "num_experts_per_tok": TOP_K,
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def qwen3(norm=True):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, head_dim=8, moe_intermediate_size=16, num_experts=EXPERTS, norm_topk_prob=norm))


def qwen2():
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**SIZES, moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=EXPERTS, norm_topk_prob=False)
    )


def olmoe():
    from transformers import OlmoeConfig, OlmoeForCausalLM

    return OlmoeForCausalLM(OlmoeConfig(**SIZES, intermediate_size=16, num_experts=EXPERTS, pad_token_id=0))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**SIZES, intermediate_size=16, num_local_experts=EXPERTS))


FAMILIES = {"qwen3": qwen3, "qwen3-unnormalised": lambda: qwen3(norm=False), "qwen2": qwen2, "olmoe": olmoe, "mixtral": mixtral}


def make(family, dtype=torch.float32):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    cast_parameters(model, dtype)
    return model


@pytest.fixture
def model():
    return make("qwen3")


def tokens(batch=3, length=9, seed=1):
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def forward(model, input_ids, **inputs):
    return model(input_ids=input_ids, use_cache=False, **inputs).logits


def record(model, input_ids, **inputs):
    with torch.no_grad(), RouteRecorder(model) as recorder:
        logits = forward(model, input_ids, **inputs)
    return logits, recorder.take()


def other_experts(routes, seed=0):
    """Routes that name K other experts, distinct, in every row."""
    rng = np.random.default_rng(seed)
    flat = routes.reshape(-1, TOP_K)
    others = [rng.permutation([e for e in range(EXPERTS) if e not in row])[:TOP_K] for row in flat]
    return np.array(others, dtype=routes.dtype).reshape(routes.shape)


def every(routes):
    return np.ones(len(routes), dtype=bool)


def router_grads(model):
    return [site.router.weight.grad for site in router_sites(model)]


# -- recording -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_recording_sees_every_layer_and_changes_nothing(family):
    model, ids = make(family), tokens()
    with torch.no_grad():
        plain = forward(model, ids)
    logits, routes = record(model, ids)
    assert torch.equal(plain, logits)
    assert routes.shape == (ids.numel(), LAYERS, TOP_K)
    assert routes.dtype == np.uint8
    # The scores the family itself reports name the same experts.
    outputs = model(input_ids=ids, output_router_logits=True)
    for layer, scores in enumerate(outputs.router_logits):
        np.testing.assert_array_equal(np.sort(scores.topk(TOP_K).indices.numpy()), np.sort(routes[:, layer]))


def test_several_passes_are_taken_in_order(model):
    first, second = tokens(2, 4, seed=1), tokens(1, 5, seed=2)
    with torch.no_grad(), RouteRecorder(model) as recorder:
        forward(model, first)
        forward(model, second)
        together = recorder.take()
        assert recorder.take().shape == (0, LAYERS, TOP_K)
    np.testing.assert_array_equal(together, np.concatenate([record(model, first)[1], record(model, second)[1]]))


def test_hooks_are_gone_after_the_scope_and_after_an_error(model):
    recorder = RouteRecorder(model)
    with pytest.raises(RuntimeError, match="boom"), recorder:
        raise RuntimeError("boom")
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with recorder, pytest.raises(RoutingError, match="entered twice"):
        recorder.__enter__()


def test_half_a_pass_is_not_handed_out(model):
    with RouteRecorder(model) as recorder, torch.no_grad():
        site = recorder.sites[0]
        hidden = torch.zeros(2, 32)
        site.experts(hidden, torch.zeros(2, TOP_K, dtype=torch.long), torch.zeros(2, TOP_K))
        with pytest.raises(RoutingError, match=r"different numbers of tokens: \[2, 0, 0\]"):
            recorder.take()


def test_more_than_256_experts_take_16_bits():
    config = tiny_moe_config(VOCAB, hidden=16, layers=1, heads=2, kv_heads=1, experts=300, top_k=4, moe_intermediate=8)
    model = build_actor(config, 0).eval()
    logits, routes = record(model, tokens(4, 30))
    assert routes.dtype == np.uint16
    assert routes.max() > 255
    with torch.no_grad(), RoutingReplay(model, routes, every(routes)) as replay:
        assert torch.equal(forward(model, tokens(4, 30)), logits)
    np.testing.assert_array_equal(replay.used(), routes)


# -- exactness -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_record_then_replay_is_bit_equal_in_outputs_and_gradients(family, dtype):
    model, ids = make(family, dtype), tokens()
    plain = forward(model, ids)
    plain.float().logsumexp(-1).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    _, routes = record(model, ids)
    with RoutingReplay(model, routes, every(routes)) as replay:
        logits = forward(model, ids)
    assert torch.equal(logits, plain)
    logits.float().logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name
    np.testing.assert_array_equal(replay.used(), routes)
    report = replay.verify(max_disjoint=0.0)
    assert (report.rows, report.replayed, report.fallback_fraction) == (27, 27, 0.0)
    assert report.agreement.any_layer == 0.0


@pytest.mark.parametrize("family", FAMILIES)
def test_forcing_other_experts_changes_outputs_and_keeps_router_gradients(family):
    model, ids = make(family), tokens()
    plain, routes = record(model, ids)
    forced = other_experts(routes)
    with RoutingReplay(model, forced, every(forced)) as replay:
        logits = forward(model, ids)
        logits.logsumexp(-1).sum().backward()
    assert (logits - plain).abs().max() > 1e-3
    for layer, grad in enumerate(router_grads(model)):
        assert grad.abs().max() > 1e-6, layer
    np.testing.assert_array_equal(replay.used(), forced)
    report = replay.verify()
    # The first layer sees the same hidden states, so its live choice is the recorded one, of which nothing was forced.
    assert report.agreement.disagreement[0] == 1.0
    assert report.agreement.overlap[0] == 0.0
    np.testing.assert_array_equal(replay.live()[:, 0], routes[:, 0])


def test_forced_weights_come_from_the_softmax_over_all_experts(model):
    site = router_sites(model)[0]
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    logits, _, live = site.router(hidden)
    forced = torch.as_tensor(other_experts(live.numpy()))
    _, weights, indices = site.adapter.replace(site.router, site.router(hidden), forced)
    scores = logits.softmax(-1).gather(-1, forced)
    torch.testing.assert_close(weights, scores / scores.sum(-1, keepdim=True))
    assert torch.equal(indices, forced)


def test_order_of_experts_within_a_row_is_immaterial_up_to_rounding(model):
    ids = tokens()
    plain, routes = record(model, ids)
    with torch.no_grad(), RoutingReplay(model, routes[..., ::-1].copy(), every(routes)) as replay:
        torch.testing.assert_close(forward(model, ids), plain, atol=1e-5, rtol=1e-5)
    assert replay.verify().agreement.any_layer == 0.0


def test_batch_shapes_and_integer_types_are_accepted(model):
    ids = tokens()
    plain, routes = record(model, ids)
    shaped = routes.reshape(*ids.shape, LAYERS, TOP_K)
    valid = np.ones(ids.shape, dtype=bool)
    for given in (shaped, torch.from_numpy(shaped), torch.from_numpy(shaped).long(), shaped.astype(np.uint16)):
        with torch.no_grad(), RoutingReplay(model, given, torch.from_numpy(valid)):
            assert torch.equal(forward(model, ids), plain)


# -- padding, packing, missing rows ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_agree_with_single_sequences(model, side):
    lengths, width = [4, 9, 7], 9
    singles = [tokens(1, length, seed=length) for length in lengths]
    alone = [record(model, ids) for ids in singles]
    forced = [other_experts(routes, seed=i) for i, (_, routes) in enumerate(alone)]
    ids, mask = torch.zeros(3, width, dtype=torch.long), torch.zeros(3, width, dtype=torch.long)
    routes, valid = np.zeros((3, width, LAYERS, TOP_K), dtype=np.uint8), np.zeros((3, width), dtype=bool)
    spans = [slice(width - n, width) if side == "left" else slice(0, n) for n in lengths]
    for row, span in enumerate(spans):
        ids[row, span], mask[row, span], routes[row, span], valid[row, span] = singles[row], 1, forced[row].reshape(-1, LAYERS, TOP_K), True
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad(), RoutingReplay(model, routes, valid, counted=mask.bool()) as replay:
        together = forward(model, ids, attention_mask=mask, position_ids=positions)
    report = replay.verify()
    assert (report.rows, report.fallback_fraction) == (sum(lengths), 0.0)
    for row, span in enumerate(spans):
        with torch.no_grad(), RoutingReplay(model, forced[row], every(forced[row])):
            torch.testing.assert_close(together[row, span], forward(model, singles[row])[0], atol=1e-5, rtol=1e-4)


def test_packed_sequences_agree_with_single_sequences(model):
    lengths = [4, 9, 7]
    singles = [tokens(1, length, seed=length) for length in lengths]
    forced = [other_experts(record(model, ids)[1], seed=i) for i, ids in enumerate(singles)]
    packed, positions = torch.cat(singles, 1), torch.cat([torch.arange(n) for n in lengths])[None]
    routes = np.concatenate(forced)
    with torch.no_grad(), RoutingReplay(model, routes, every(routes)) as replay:
        together = forward(model, packed, position_ids=positions)
    np.testing.assert_array_equal(replay.used(), routes)
    start = 0
    for ids, rows in zip(singles, forced, strict=True):
        with torch.no_grad(), RoutingReplay(model, rows, every(rows)):
            torch.testing.assert_close(together[0, start : start + len(rows)], forward(model, ids)[0], atol=1e-5, rtol=1e-4)
        start += len(rows)


def test_rows_without_a_route_are_routed_live_and_counted(model):
    ids = tokens()
    plain, routes = record(model, ids)
    valid = np.random.default_rng(0).random(len(routes)) < 0.5
    holes = routes.copy()
    holes[~valid] = 255
    counted = np.ones(len(routes), dtype=bool)
    counted[-4:] = False
    with torch.no_grad(), RoutingReplay(model, holes, valid, counted=counted) as replay:
        assert torch.equal(forward(model, ids), plain)
    report = replay.verify()
    assert report.rows == counted.sum()
    assert report.replayed == (valid & counted).sum()
    assert report.fallback_fraction == pytest.approx((~valid & counted).sum() / counted.sum())
    assert report.fallback_fraction > 0


# -- refusals --------------------------------------------------------------------------------------------------------------------


def bent(routes, row, layer, experts):
    changed = routes.astype(np.int64)
    changed[row, layer] = experts
    return changed


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda r: (bent(r, 4, 1, [2, 2]), every(r)), r"row 4 of layer 1 repeats an expert: \[2, 2\]"),
        (lambda r: (bent(r, 5, 2, [0, EXPERTS]), every(r)), r"row 5 of layer 2 names an expert outside 0 to 5"),
        (lambda r: (bent(r, 5, 0, [-1, 1]), every(r)), "row 5 of layer 0 names an expert outside"),
        (lambda r: (r[:, :-1], every(r)), r"expected \[tokens, 3 MoE layers, 2 experts a token\]"),
        (lambda r: (r[..., :1], every(r)), "expected"),
        (lambda r: (r.reshape(-1, TOP_K), every(r)), "expected"),
        (lambda r: (r.astype(np.float32), every(r)), "expected integers"),
        (lambda r: (r, every(r)[:-1]), "valid has 26 rows, routes have 27"),
        (lambda r: (r, every(r).astype(np.int64)), "expected bool"),
    ],
)
def test_malformed_routes_are_refused_before_anything_runs(model, change, complaint):
    _, routes = record(model, tokens())
    with pytest.raises(RoutingError, match=complaint):
        RoutingReplay(model, *change(routes))


def test_wrong_row_count_raises_in_the_forward_pass_and_restores(model):
    ids = tokens()
    plain, routes = record(model, ids)
    for rows in (routes[:-1], np.concatenate([routes, routes[:1]])):
        with pytest.raises(RoutingError, match=f"routes 27 tokens, {len(rows)} rows were given"), RoutingReplay(model, rows, every(rows)):
            forward(model, ids)
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
        assert torch.equal(forward(model, ids), plain)


def test_scopes_do_not_nest_and_can_follow_one_another(model):
    ids = tokens()
    _, routes = record(model, ids)
    with RoutingReplay(model, routes, every(routes)) as outer:
        with pytest.raises(RoutingError, match="do not nest"), RoutingReplay(model, routes, every(routes)):
            pytest.fail("entered")
        forward(model, ids).sum().backward()
    outer.verify()
    with torch.no_grad(), RoutingReplay(model, routes, every(routes)) as later:
        forward(model, ids)
    later.verify()


def test_dense_models_are_refused():
    with pytest.raises(RoutingError, match="no MoE layer"):
        RoutingReplay(nn.Linear(2, 2), np.zeros((1, 1, 1), dtype=np.uint8), np.ones(1, dtype=bool))


def test_unknown_routers_are_named():
    from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

    granite = GraniteMoeForCausalLM(GraniteMoeConfig(**SIZES, intermediate_size=16, num_local_experts=EXPERTS))
    with pytest.raises(UnsupportedRouter, match="GraniteMoeTopKRouter"):
        RouteRecorder(granite)

    class OddBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate = nn.Linear(4, 2)
            self.experts = nn.ModuleList([nn.Linear(4, 4)])

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([OddBlock()])

    with pytest.raises(UnsupportedRouter, match="OddBlock, router class not recognised"):
        router_sites(Odd())


def test_every_adapter_in_the_table_is_tested():
    tested = {type(site.router).__name__ for family in FAMILIES for site in router_sites(make(family))}
    assert tested == set(ADAPTERS)


def test_dense_layers_have_no_column():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **SIZES, head_dim=8, moe_intermediate_size=16, intermediate_size=16, num_experts=EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]
    )
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    assert [site.layer for site in router_sites(model)] == [0, 2]
    plain, routes = record(model, tokens())
    assert routes.shape == (27, 2, TOP_K)
    with torch.no_grad(), RoutingReplay(model, routes, every(routes)):
        assert torch.equal(forward(model, tokens()), plain)


# -- the checks would notice -----------------------------------------------------------------------------------------------------


def test_verify_notices_experts_changed_behind_its_back(model):
    ids = tokens()
    _, routes = record(model, ids)
    forced = other_experts(routes)
    site = router_sites(model)[1]
    with torch.no_grad(), RoutingReplay(model, routes, every(routes)) as replay:
        handle = site.router.register_forward_hook(lambda _m, _a, out: (out[0], out[1], torch.as_tensor(forced[:, 1]).long()))
        forward(model, ids)
        handle.remove()
    np.testing.assert_array_equal(replay.used()[:, 1], forced[:, 1])
    with pytest.raises(RoutingError, match=r"27 \(row, layer\) pairs .* layer 1"):
        replay.verify()


@pytest.mark.parametrize("fault", ["shifted by one row", "layers exchanged"])
def test_well_formed_but_wrong_routes_show_in_the_overlap(model, fault):
    ids = tokens(6, 20)
    _, routes = record(model, ids)
    wrong = np.roll(routes, 1, axis=0) if fault == "shifted by one row" else routes[:, ::-1].copy()
    with torch.no_grad(), RoutingReplay(model, wrong, every(routes)) as replay:
        forward(model, ids)
    replay.verify()
    with pytest.raises(RoutingError, match="are rows shifted, layers exchanged"):
        replay.verify(max_disjoint=0.05)


def test_verify_needs_a_pass(model):
    _, routes = record(model, tokens())
    with RoutingReplay(model, routes, every(routes)) as replay, pytest.raises(RoutingError, match="no whole forward pass"):
        replay.verify()


# -- recompute and other models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_with_the_same_routes(model, reentrant):
    ids = tokens()
    forced = other_experts(record(model, ids)[1])
    model.train()
    with RoutingReplay(model, forced, every(forced)) as replay:
        forward(model, ids).logsumexp(-1).sum().backward()
    expected = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with RoutingReplay(model, forced, every(forced)) as replay:
        forward(model, ids).logsumexp(-1).sum().backward()
    np.testing.assert_array_equal(replay.used(), forced)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], msg=name)


def test_leaving_before_the_recompute_raises(model):
    ids = tokens()
    _, routes = record(model, ids)
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(RoutingError, match=r"Call backward\(\) inside the scope"), RoutingReplay(model, routes, every(routes)):
        forward(model, ids)
    with torch.no_grad(), RoutingReplay(model, routes, every(routes)) as replay:
        forward(model, ids)
    replay.verify()


def test_replay_reaches_neither_critic_nor_copy(model):
    ids = tokens()
    _, routes = record(model, ids)
    forced = other_experts(routes)
    critic = Critic.from_actor(model)
    torch.nn.init.normal_(critic.head.weight)
    with torch.no_grad():
        values = critic.values(ids)
        with RoutingReplay(model, forced, every(forced)):
            assert torch.equal(critic.values(ids), values)


def test_recorder_inside_replay_sees_what_computes(model):
    ids = tokens()
    forced = other_experts(record(model, ids)[1])
    with torch.no_grad(), RouteRecorder(model) as before, RoutingReplay(model, forced, every(forced)), RouteRecorder(model) as after:
        forward(model, ids)
    np.testing.assert_array_equal(before.take(), forced)
    np.testing.assert_array_equal(after.take(), forced)
