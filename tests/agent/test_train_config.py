"""Configuration: recipes, overrides, and errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from t1_agent.config import RunConfig, build_config, differing_keys, load_config, recipes
from t1_env.errors import ConfigError


def test_quickstart_recipe_loads_and_overrides_win_in_order():
    config = load_config(["@quickstart"])
    assert config.name == "quickstart"
    assert len(config.tasks.train) == 4
    assert config.ppo.iterations > 4
    # Two critic steps for each step of the actor.
    assert config.optim.critic_epochs * config.optim.critic_minibatches == 2 * config.optim.epochs * config.optim.minibatches
    changed = load_config(["@quickstart", "--ppo.clip_low", "0.1", "--ppo.iterations=3", "--ppo.iterations", "4", "--name", "other"])
    assert (changed.ppo.clip_low, changed.ppo.iterations, changed.name) == (0.1, 4, "other")
    assert differing_keys(config.resolved(), changed.resolved()) == ["name", "ppo.clip_low", "ppo.iterations"]
    assert (
        config.digest()
        != changed.digest()
        == load_config(["@quickstart", "--ppo.clip_low=0.1", "--ppo.iterations=4", "--name=other"]).digest()
    )


@pytest.mark.parametrize("name", recipes())
def test_every_shipped_recipe_is_valid(name):
    assert isinstance(load_config([f"@{name}"]), RunConfig)


def test_toml_file_and_values(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('name = "mine"\n[tasks]\ntrain = ["families/a"]\n[ppo]\ntis_cap = 3.0\n')
    config = load_config(
        [f"@{path}", "--ppo.tis_cap", "none", "--tasks.held_out", '["families/b", "families/c"]', "--ppo.replay_routes", "false"]
    )
    assert config.tasks.train == ("families/a",)
    assert config.tasks.held_out == ("families/b", "families/c")
    assert config.ppo.tis_cap is None
    assert config.ppo.replay_routes is False


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--ppo.clip_lo", "0.1"], r"unknown key 'ppo.clip_lo' \(did you mean 'ppo.clip_low'\?\)"),
        (["--clip_low", "0.1"], r"unknown key 'clip_low' \(did you mean 'ppo.clip_low'\?\)"),
        (["--pppo.clip_low", "0.1"], r"unknown key 'pppo' \(did you mean 'ppo'\?\)"),
        (["--xyzzy", "1"], r"unknown key 'xyzzy'$"),
        (["--ppo.clip_low"], "a value is missing"),
        (["--ppo.clip_low", "1.5"], r"ppo\.clip_low: .*less than 1.*got 1\.5"),
        (["--ppo.iterations", "many"], r"ppo\.iterations: .*integer.*got 'many'"),
        (["--ppo.advantage", "magic"], r"ppo\.advantage"),
        (["--ppo", "3"], "ppo: "),
        (["--name", "../escape"], "name"),
        (["--name.x", "1", "--name", "a"], None),
        (["--name", "a", "--name.x", "1"], "'name' is a value"),
        (["ppo.clip_low=1"], "expected @recipe"),
        (["@quickstrat"], r"no such recipe \(did you mean 'quickstart'\?\)"),
        (["@missing.toml"], "no such file"),
        (["--ppo.advantage", "grpo"], "rollout.group_size"),
        (["--rollout.record_routes", "false"], "record_routes"),
        (["--rollout.max_context_tokens", "4096"], "max_positions"),
        (["--rollout.episodes", "10", "--rollout.group_size", "4"], "multiple of group_size"),
    ],
)
def test_mistakes_are_named(args, message):
    if message is None:
        assert load_config(args).name == "a"
        return
    with pytest.raises(ConfigError, match=message):
        load_config(args)


def test_several_mistakes_give_a_line_each():
    with pytest.raises(ConfigError) as caught:
        build_config({"ppo": {"clip_low": 2}, "optim": {"epochz": 1}})
    assert len(str(caught.value).splitlines()) == 2
    assert "optim.epochs" in str(caught.value)


def test_broken_toml_names_the_file(tmp_path):
    path = tmp_path / "broken.toml"
    path.write_text("[ppo\n")
    with pytest.raises(ConfigError, match=r"broken\.toml: not valid TOML"):
        load_config([f"@{path}"])


def test_no_component_has_more_than_twenty_fields_and_each_is_documented():
    components = [field.annotation for field in RunConfig.model_fields.values() if hasattr(field.annotation, "model_fields")]
    assert len(components) >= 8
    for component in components:
        assert len(component.model_fields) <= 20, component
        assert all(field.description for field in component.model_fields.values()), component


def test_importing_the_configuration_loads_no_torch():
    code = "import sys, t1_agent.config as c; c.load_config(['@quickstart']); sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_documented_table_is_that_of_the_types():
    manual = Path(__file__).parents[2] / "docs" / "training.md"
    if not manual.exists():
        pytest.skip("docs are not beside the tests")
    documented = manual.read_text(encoding="utf-8")
    for name, field in RunConfig.model_fields.items():
        nested = getattr(field.annotation, "model_fields", None)
        for key, entry in ({name: field} if nested is None else {f"{name}.{key}": entry for key, entry in nested.items()}).items():
            meaning = entry.description.replace("|", "\\|")
            default = "none" if entry.default is None else json.dumps(entry.default)
            assert f"| `{key}` | `{default}` | {meaning} |" in documented, f"docs/training.md: the row of {key} is missing or old"
