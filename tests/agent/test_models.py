"""The tiny MoE, the critic and the artefact that holds both."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from t1_agent.models.actor_critic import ActorCritic, load_actor  # noqa: E402
from t1_agent.models.critic import Critic, ValueHead  # noqa: E402
from t1_agent.models.precision import cast_parameters  # noqa: E402
from t1_agent.models.tiny_moe import build_actor, parameter_count, tiny_moe_config  # noqa: E402
from t1_env.errors import ConfigError  # noqa: E402

pytestmark = pytest.mark.torch

SMALL = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "experts": 4, "moe_intermediate": 16, "max_positions": 64}


def small(seed=0):
    return build_actor(tiny_moe_config(50, **SMALL), seed)


def tokens(batch=2, length=7):
    return torch.randint(1, 50, (batch, length), generator=torch.Generator().manual_seed(0))


def same_state(first, second):
    a, b = first.state_dict(), second.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def test_default_size_and_settings():
    config = tiny_moe_config(768)
    assert 1.4e6 < parameter_count(build_actor(config, 0)) < 1.6e6
    assert config.norm_topk_prob
    assert config.router_aux_loss_coef == 0.0
    assert config.max_position_embeddings >= 2048


def test_weights_are_a_function_of_the_seed_and_leave_the_global_stream_alone():
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    first = small(1)
    assert torch.equal(torch.rand(3), expected)
    assert same_state(first, small(1))
    assert not same_state(first, small(2))
    assert same_state(Critic.from_config(first.config, 3), Critic.from_config(first.config, 3))


def test_embeddings_are_tied_on_request():
    tied, untied = small(), build_actor(tiny_moe_config(50, **SMALL, tie_embeddings=False), 0)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert parameter_count(untied) - parameter_count(tied) == 50 * 32


@pytest.mark.parametrize(
    "sizes",
    [{"hidden": 30}, {"hidden": 20, "heads": 4}, {"heads": 4, "kv_heads": 3}, {"experts": 2, "top_k": 3}, {"top_k": 0}, {"vocab_size": 1}],
)
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(ConfigError, match="tiny MoE"):
        tiny_moe_config(**{"vocab_size": 50, **sizes})


def test_critic_starts_at_zero_and_learns_in_head_and_trunk():
    critic = Critic.from_actor(small())
    values = critic.values(tokens())
    assert values.shape == (2, 7)
    assert values.dtype == torch.float32
    assert torch.equal(values, torch.zeros(2, 7))
    (values - 1).square().mean().backward()
    assert critic.head.weight.grad.abs().max() > 0
    torch.nn.init.normal_(critic.head.weight)
    critic(tokens()).sum().backward()
    assert critic.trunk.layers[0].mlp.gate.weight.grad.abs().max() > 0


def test_critic_shares_no_memory_with_the_actor():
    actor = small()
    critic = Critic.from_actor(actor)
    assert same_state(critic.trunk, actor.model)
    pointers = {parameter.data_ptr() for parameter in actor.parameters()}
    assert not any(parameter.data_ptr() in pointers for parameter in critic.parameters())


def test_values_ignore_padding_on_either_side():
    critic = Critic.from_config(small().config, 0)
    torch.nn.init.normal_(critic.head.weight)
    ids = tokens(1, 5)
    alone = critic.values(ids)[0]
    pad = torch.zeros(1, 3, dtype=torch.long)
    mask = torch.tensor([[1] * 5 + [0] * 3])
    right = torch.cat([ids, pad], 1)
    torch.testing.assert_close(critic.values(right)[0, :5], alone)
    torch.testing.assert_close(critic.values(right, mask)[0, :5], alone)
    positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4]])
    torch.testing.assert_close(critic.values(torch.cat([pad, ids], 1), mask.flip(-1), positions)[0, 3:], alone)


def test_value_head_stays_float32():
    critic = Critic.from_actor(small())
    critic.head.weight.data.fill_(1.0001)
    critic.to(torch.bfloat16)
    assert critic.trunk.norm.weight.dtype == torch.bfloat16
    assert critic.head.weight.dtype == torch.float32
    assert critic.head.weight[0, 0].item() == np.float32(1.0001)
    assert critic.values(tokens()).dtype == torch.float32
    assert ValueHead(4).half()(torch.ones(2, 4, dtype=torch.float16)).dtype == torch.float32


def test_cast_spares_buffers_and_ties():
    actor = small()
    before = actor.model.rotary_emb.inv_freq.clone()
    cast_parameters(actor, torch.bfloat16)
    assert {parameter.dtype for parameter in actor.parameters()} == {torch.bfloat16}
    assert torch.equal(actor.model.rotary_emb.inv_freq, before)
    assert actor.lm_head.weight is actor.model.embed_tokens.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_and_loaded_bit_for_bit(tmp_path, dtype):
    actor = small()
    critic = Critic.from_config(actor.config, 5)
    torch.nn.init.normal_(critic.head.weight)
    both = ActorCritic(actor, critic)
    cast_parameters(actor, dtype)
    cast_parameters(critic.trunk, dtype)
    both.save(tmp_path / "deep" / "model")
    loaded = ActorCritic.load(tmp_path / "deep" / "model")
    assert same_state(both, loaded)
    assert torch.equal(loaded.critic.values(tokens()), critic.values(tokens()))
    assert torch.equal(loaded.actor(tokens()).logits, actor(tokens()).logits)
    assert same_state(load_actor(tmp_path / "deep" / "model" / "actor"), actor)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["model"]


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path, monkeypatch):
    both = ActorCritic(small(), Critic.from_config(small().config, 0))
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="already exists"):
        both.save(tmp_path / "taken")

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(both.critic.trunk.config, "save_pretrained", full)
    with pytest.raises(OSError, match="no space"):
        both.save(tmp_path / "new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_what_is_not_a_saved_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"actor_critic.json is missing"):
        ActorCritic.load(tmp_path)
    with pytest.raises(ConfigError, match=r"config.json is missing"):
        load_actor(tmp_path)
    ActorCritic(small(), Critic.from_config(small().config, 0)).save(tmp_path / "m")
    (tmp_path / "m" / "actor_critic.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="format 99"):
        ActorCritic.load(tmp_path / "m")
