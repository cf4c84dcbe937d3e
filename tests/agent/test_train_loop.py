"""The whole road on a scripted game: learning, kill and resume, refusals."""

from __future__ import annotations

import itertools
import json
import os
import signal

import pytest

torch = pytest.importorskip("torch")

from t1_agent.config import RunConfig, build_config  # noqa: E402
from t1_agent.models.tiny_moe import build_actor, tiny_moe_config  # noqa: E402
from t1_agent.testing import CopyGame  # noqa: E402
from t1_agent.train.checkpoint import list_checkpoints, load_checkpoint, read_progress, save_checkpoint  # noqa: E402
from t1_agent.train.loop import train  # noqa: E402
from t1_agent.train.parts import Parts  # noqa: E402
from t1_agent.train.rundir import open_run, read_metrics  # noqa: E402
from t1_agent.train.seeds import derive_seed, random_states, restore_random_states, seed_everything  # noqa: E402
from t1_env.errors import ConfigError  # noqa: E402

torch.set_num_threads(1)
GAME = CopyGame(symbols=3, turns=2)


class Killed(BaseException):
    """Stands for ``kill -9``: nothing may catch it."""


class World:
    """A collector, evaluator and weight sink around a copy of the actor. ``fuse`` counts external calls down to a kill."""

    def __init__(self, fuse: int | None = None) -> None:
        self.fuse = fuse
        self.version = -1
        self.calls: list[str] = []

    def _burn(self, what: str) -> None:
        self.calls.append(what)
        if self.fuse is not None:
            self.fuse -= 1
            if self.fuse < 0:
                raise Killed(what)

    def push(self, actor, version):
        self._burn(f"push {version}")
        self.actor.load_state_dict(actor.state_dict())
        self.version = version
        return "checksum"

    def collect(self, policy_version, n_episodes, seed, tasks):
        self._burn(f"collect {n_episodes}")
        assert policy_version == self.version
        return GAME.play(self.actor, n_episodes, seed=seed, weight_version=policy_version)

    def evaluate(self, tag):
        self._burn(f"evaluate {tag}")
        episodes = GAME.play(self.actor, 64, seed=99)
        return {"solved_rate": sum(t.solved for t in episodes) / 64, "note": "text is left out of the metrics"}

    def demonstrate(self, seed):
        self._burn("demonstrate")
        self.run.log("demonstrations", 0, {"episodes": 32.0})
        return GAME.demonstrations(32, seed=seed)

    def connect(self, actor):
        self.actor = make_actor(1)
        return self, self, self

    def parts(self, run) -> Parts:
        self.run = run
        return Parts(demonstrate=self.demonstrate, build_actor=make_actor, connect=self.connect, say=lambda line: None)


def make_actor(seed: int):
    config = tiny_moe_config(
        GAME.vocab_size, hidden=16, layers=1, heads=2, kv_heads=1, experts=4, top_k=2, moe_intermediate=32, max_positions=32
    )
    return build_actor(config, seed)


def make_config(tmp_path, group_size=1, **ppo) -> RunConfig:
    return build_config(
        {
            "name": "run",
            "runs_dir": str(tmp_path),
            "tensorboard": False,
            "warmstart": {"actor_steps": 6, "critic_episodes": 16, "critic_max_epochs": 2},
            "rollout": {"episodes": 16, "group_size": group_size, "max_context_tokens": 32},
            "model": {"max_positions": 32},
            "ppo": {"iterations": 2, **ppo},
            "optim": {"actor_lr": 1e-3, "critic_lr": 2e-3},
            "eval": {"every": 1},
        }
    )


def deterministic_lines(run):
    """Metrics without what depends on the clock."""
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in read_metrics(run.metrics_file)]


def weights(state):
    return {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    config = make_config(tmp_path_factory.mktemp("whole"))
    run = open_run(config)
    world = World()
    state = train(config, run, world.parts(run))
    return world.calls, weights(state), deterministic_lines(run)


def test_phases_come_in_order(uninterrupted):
    calls, _, lines = uninterrupted
    assert [call for call in calls if not call.startswith("push")] == [
        "demonstrate", "evaluate untrained", "evaluate warmstart", "collect 16", "collect 16", "evaluate iteration-1", "collect 16",
        "evaluate ppo",
    ]  # fmt: skip
    assert [call for call in calls if call.startswith("push")] == ["push 0", "push 1", "push 2", "push 3"]
    ppo = [line for line in lines if line["phase"] == "ppo"]
    assert lines[0] == {"phase": "demonstrations", "step": 0, "episodes": 32.0}
    assert [line["step"] for line in ppo] == [1, 2]
    assert all(line["tito/drift_tokens_in_loss"] == 0 and line["routing/fallback_fraction"] == 0 for line in ppo)
    assert all("note" not in line for line in lines)


@pytest.mark.parametrize("fuse", range(12))
def test_killed_anywhere_and_resumed_equals_uninterrupted_bitwise(tmp_path, uninterrupted, fuse):
    calls, final, lines = uninterrupted
    assert len(calls) == 12  # every external call is a place to die
    config = make_config(tmp_path)
    run = open_run(config)
    with pytest.raises(Killed):
        train(config, run, World(fuse).parts(run))
    run = open_run(config, resume=True)
    state = train(config, run, World().parts(run))
    resumed = weights(state)
    assert resumed.keys() == final.keys()
    assert all(torch.equal(resumed[name], final[name]) for name in final)
    assert deterministic_lines(run) == lines


def test_finished_run_resumes_to_nothing(tmp_path):
    config = make_config(tmp_path, iterations=1)
    run = open_run(config)
    train(config, run, World().parts(run))
    run = open_run(config, resume=True)
    before = run.metrics_file.read_bytes()
    world = World()
    train(config, run, world.parts(run))
    assert world.calls == ["push 2"]
    assert run.metrics_file.read_bytes() == before


def test_zero_iterations_stop_after_the_warm_start(tmp_path):
    config = make_config(tmp_path, iterations=0)
    world = World()
    run = open_run(config)
    train(config, run, world.parts(run))
    assert world.calls[-2:] == ["evaluate warmstart", "collect 16"]


def test_critic_only_iterations_leave_the_actor_alone(tmp_path):
    config = make_config(tmp_path, iterations=1, critic_only_iterations=1)
    run = open_run(config)
    state = train(config, run, World().parts(run))
    warm, _, _ = load_checkpoint(next(path for path in list_checkpoints(run.checkpoints) if path.name.endswith("-actor")))
    for name, tensor in state.model.actor.state_dict().items():
        assert torch.equal(tensor, warm.actor.state_dict()[name]), name
    assert state.progress.weight_version == 1


def test_kl_reference_is_the_warm_started_actor_also_after_resume(tmp_path):
    config = make_config(tmp_path, iterations=2, kl_coef=0.1)
    run = open_run(config)
    with pytest.raises(Killed):
        train(config, run, World(fuse=9).parts(run))
    run = open_run(config, resume=True)
    train(config, run, World().parts(run))
    kl = [line["train/reference_kl"] for line in read_metrics(run.metrics_file) if line["phase"] == "ppo"]
    assert len(kl) == 2
    assert 0 <= kl[0] < kl[1]


def test_group_baseline_runs_on_the_same_loop_without_a_critic(tmp_path):
    config = make_config(tmp_path, iterations=1, group_size=2, advantage="rloo")
    run = open_run(config)
    world = World()
    train(config, run, world.parts(run))
    assert world.calls.count("collect 16") == 1  # no rollouts for a critic
    metrics = next(line for line in read_metrics(run.metrics_file) if line["phase"] == "ppo")
    assert "train/value_loss" not in metrics
    assert metrics["train/actor_steps"] == 4


def test_ppo_improves_the_game(tmp_path):
    config = make_config(tmp_path, iterations=15)
    optim = config.optim.model_copy(update={"actor_lr": 5e-3, "critic_lr": 5e-3})
    config = config.model_copy(update={"optim": optim, "rollout": config.rollout.model_copy(update={"episodes": 64})})
    run = open_run(config)
    train(config, run, World().parts(run))
    rates = {line["phase"]: line["solved_rate"] for line in read_metrics(run.metrics_file) if line["phase"].startswith("eval/")}
    assert rates["eval/ppo"] > rates["eval/warmstart"] + 0.2, rates


# ------------------------------------------------------------------------------------------------------------------- run directory
def test_existing_run_is_not_overwritten(tmp_path):
    config = make_config(tmp_path)
    open_run(config)
    with pytest.raises(ConfigError, match="never overwritten"):
        open_run(config)


def test_changed_configuration_is_refused_by_name(tmp_path):
    open_run(make_config(tmp_path))
    with pytest.raises(ConfigError, match=r"ppo\.clip_low \(0\.2 -> 0\.1\)") as caught:
        open_run(make_config(tmp_path, clip_low=0.1), resume=True)
    assert "ppo.gamma" not in str(caught.value)


def test_foreign_directory_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("years of work")
    for resume in (False, True):
        with pytest.raises(ConfigError):
            open_run(make_config(tmp_path), resume=resume)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["thesis.tex"]


def test_unwritable_directory_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written") as caught:
        open_run(make_config(tmp_path / "file"))
    assert "\n" not in str(caught.value)


def test_resume_of_nothing_starts(tmp_path):
    run = open_run(make_config(tmp_path), resume=True)
    assert json.loads(run.config_file.read_text())["name"] == "run"


def test_half_written_line_is_cut_and_shrunk_metrics_are_refused(tmp_path):
    run = open_run(make_config(tmp_path))
    run.log("ppo", 1, {"a": 1.0, "bad": float("nan")})
    size = run.metrics_size_bytes()
    with run.metrics_file.open("a") as stream:
        stream.write('{"phase": "pp')
    assert read_metrics(run.metrics_file) == [{"phase": "ppo", "step": 1, "a": 1.0, "bad": None}]
    run.truncate_metrics(size)
    assert run.metrics_file.read_text().endswith("}\n")
    with pytest.raises(ConfigError, match="changed from outside"):
        run.truncate_metrics(size + 1)


# --------------------------------------------------------------------------------------------------------------------- checkpoints
def test_sigkill_in_the_middle_of_a_checkpoint_and_of_a_metrics_line(tmp_path, uninterrupted):
    config = make_config(tmp_path)
    run = open_run(config)
    pid = os.fork()
    if pid == 0:  # the child trains, and dies while it writes its third checkpoint
        saves = itertools.count()
        real_save = torch.save

        def die(*args, **kwargs):
            if next(saves) == 2:
                run.metrics_file.open("a").write('{"phase": "pp')
                os.kill(os.getpid(), signal.SIGKILL)
            real_save(*args, **kwargs)

        torch.save = die
        train(config, run, World().parts(run))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert [path.name for path in run.checkpoints.glob(".*")] == [".0002-iteration.partial"]
    state = train(config, run, World().parts(open_run(config, resume=True)))
    _, final, lines = uninterrupted
    assert all(torch.equal(tensor, final[name]) for name, tensor in state.model.state_dict().items())
    assert deterministic_lines(run) == lines
    assert not list(run.checkpoints.glob(".*"))


def test_unfinished_checkpoint_is_invisible(tmp_path, monkeypatch):
    config = make_config(tmp_path, iterations=1)
    run = open_run(config)
    state = train(config, run, World().parts(run))
    before = [path.name for path in list_checkpoints(run.checkpoints)]

    def die(*args, **kwargs):
        raise Killed

    monkeypatch.setattr("t1_agent.train.checkpoint.torch.save", die)
    with pytest.raises(Killed):
        save_checkpoint(run.checkpoints, state.model, {}, state.progress)
    assert [path.name for path in list_checkpoints(run.checkpoints)] == before


def test_old_iterations_are_pruned_and_phase_ends_stay(tmp_path):
    config = make_config(tmp_path, iterations=4)
    run = open_run(config)
    train(config, run, World().parts(run))
    names = [path.name for path in list_checkpoints(run.checkpoints)]
    assert names == ["0000-actor", "0001-critic", "0004-iteration", "0005-iteration", "0006-done"]
    assert read_progress(run.checkpoints / "0005-iteration").iteration == 4


def test_damaged_checkpoint_is_a_config_error(tmp_path):
    (tmp_path / "0000-actor").mkdir()
    with pytest.raises(ConfigError, match=r"meta\.json"):
        read_progress(tmp_path / "0000-actor")
    (tmp_path / "0000-actor" / "meta.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="another format"):
        read_progress(tmp_path / "0000-actor")


def test_random_states_round_trip(tmp_path):
    import random

    import numpy as np

    seed_everything(3)
    random.gauss(0, 1)
    np.random.normal()  # noqa: NPY002 - leaves a cached second value behind
    torch.save(random_states(), tmp_path / "states.pt")

    def draw():
        return random.random(), random.gauss(0, 1), np.random.normal(), float(torch.rand(()))  # noqa: NPY002

    expected = draw()
    seed_everything(4)
    assert draw() != expected
    restore_random_states(torch.load(tmp_path / "states.pt", weights_only=True))
    assert draw() == expected


def test_seeds_are_named():
    assert derive_seed(0, "collect", 1) == derive_seed(0, "collect", 1)
    assert len({derive_seed(0, "collect", index) for index in range(100)} | {derive_seed(1, "collect", 0)}) == 101
    assert 0 <= derive_seed("x") < 2**31
