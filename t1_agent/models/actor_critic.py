"""Actor and critic as one artefact on disk: ``actor/`` is a plain Hugging Face directory, ``critic/`` a configuration and safetensors."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from t1_agent.models.critic import Critic
from t1_agent.models.precision import cast_parameters
from t1_env.errors import ConfigError

_FORMAT = 1


class ActorCritic(nn.Module):
    """A causal language model (the policy) and a critic with its own trunk.

    Args:
        actor: A transformers causal LM.
        critic: The critic.
    """

    def __init__(self, actor: Any, critic: Critic) -> None:
        super().__init__()
        self.actor = actor
        self.critic = critic

    def save(self, directory: str | Path) -> None:
        """Write both models into a new directory; it appears only when complete.

        Args:
            directory: Must not exist yet.

        Raises:
            ConfigError: When it exists.
        """
        from safetensors.torch import save_file

        target = Path(directory)
        if target.exists():
            raise ConfigError(f"save actor-critic: {target} already exists; pass a new directory, nothing is overwritten")
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            self.actor.save_pretrained(staging / "actor")
            (staging / "critic").mkdir()
            self.critic.trunk.config.save_pretrained(staging / "critic")  # type: ignore[union-attr, operator]
            state = {name: tensor.detach().contiguous() for name, tensor in self.critic.state_dict().items()}
            save_file(state, staging / "critic" / "critic.safetensors")
            trunk_dtype = str(next(self.critic.trunk.parameters()).dtype).removeprefix("torch.")
            manifest = {"format": _FORMAT, "critic_trunk_dtype": trunk_dtype}
            (staging / "actor_critic.json").write_text(json.dumps(manifest) + "\n", encoding="utf-8")
            staging.chmod(0o755)
            staging.rename(target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    @classmethod
    def load(cls, directory: str | Path) -> ActorCritic:
        """Read what `save` wrote, bit for bit and in the dtypes it had.

        Args:
            directory: As given to `save`.

        Raises:
            ConfigError: When the directory is not a saved actor-critic or its critic does not fit its configuration.
        """
        from safetensors.torch import load_file
        from transformers import AutoConfig

        source = Path(directory)
        manifest_path = source / "actor_critic.json"
        if not manifest_path.is_file():
            raise ConfigError(f"load actor-critic: {manifest_path} is missing; expected a directory written by ActorCritic.save")
        manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
        if manifest.get("format") != _FORMAT:
            raise ConfigError(f"load actor-critic: {manifest_path} has format {manifest.get('format')!r}, this version reads {_FORMAT}")
        critic = Critic.from_config(AutoConfig.from_pretrained(source / "critic"), seed=0)
        cast_parameters(critic.trunk, getattr(torch, manifest["critic_trunk_dtype"]))
        state = load_file(source / "critic" / "critic.safetensors")
        try:
            critic.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(f"load actor-critic: {source / 'critic'} does not fit its own configuration: {error}") from error
        return cls(load_actor(source / "actor"), critic)


def load_actor(directory: str | Path) -> Any:
    """Load a causal LM saved by transformers, in the dtype it was saved in.

    Args:
        directory: A local Hugging Face model directory; nothing is fetched from a network.

    Raises:
        ConfigError: When there is no ``config.json``.
    """
    from transformers import AutoModelForCausalLM

    source = Path(directory)
    if not (source / "config.json").is_file():
        raise ConfigError(f"load actor: {source / 'config.json'} is missing; expected a model directory written by save_pretrained")
    return AutoModelForCausalLM.from_pretrained(source, local_files_only=True, dtype="auto")
