"""A tokenizer with a chat template: train a small byte-level BPE, save it so that transformers can load it, encode and decode.

``tokenizers`` and ``jinja2`` are imported on first use, and transformers never: importing this module is quick.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from t1_agent.tito.errors import CodecError
from t1_agent.types import IntArray

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

IM_START: Final = "<|im_start|>"
IM_END: Final = "<|im_end|>"
END_OF_TEXT: Final = "<|endoftext|>"

CHATML_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SPLIT_PATTERN: Final = r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]| +|\r?\n|\s"
"""Runs of letters, single digits and single signs are kept apart, each with the one blank before it; runs of blanks and line ends stand
alone. Words that follow each other are then neighbours, and a name has the same ids wherever it stands behind the same sign. A very small
model learnt to copy names from the instruction into a command in two thirds of the steps it needed with blanks as tokens of their own."""

_FRAME_WORDS: Final = "system\nuser\nassistant\nexit\nsubmit\n"
_FRAME_REPEATS: Final = 10_000

Message = Mapping[str, str]


class ChatTokenizer:
    """A ``tokenizers.Tokenizer`` with its chat template and the ids that steer a conversation.

    Args:
        backend: The fast tokenizer.
        chat_template: Jinja template over ``messages`` and ``add_generation_prompt``.
        eos_token: Content of the token that ends a generation; must be an added token of ``backend``.
        pad_token: Content of the padding token, or None.
        bos_token: Content of the first token, or None; only handed to the template.

    Raises:
        CodecError: When one of the named tokens is not an added token of the tokenizer.
    """

    def __init__(
        self, backend: Tokenizer, chat_template: str, *, eos_token: str, pad_token: str | None = None, bos_token: str | None = None
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.eos_token = eos_token
        self.pad_token = pad_token
        self.bos_token = bos_token
        self._added: dict[str, int] = {token.content: index for index, token in backend.get_added_tokens_decoder().items()}
        for name, content in (("eos_token", eos_token), ("pad_token", pad_token), ("bos_token", bos_token)):
            if content is not None and content not in self._added:
                raise CodecError(f"{name} {content!r} is not an added token of the tokenizer; it has {sorted(self._added)[:20]}")

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the smallest embedding table that fits."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def added_tokens(self) -> dict[str, int]:
        """Content -> id of every added token, those declared ``special=False`` included."""
        return dict(self._added)

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that text from outside must never produce."""
        return frozenset(self._added.values())

    @property
    def eos_id(self) -> int:
        """Id of ``eos_token``."""
        return self._added[self.eos_token]

    @property
    def pad_id(self) -> int:
        """Id of ``pad_token``, or of ``eos_token`` when there is none."""
        return self._added[self.pad_token] if self.pad_token is not None else self.eos_id

    def encode(self, text: str) -> IntArray:
        """Encode trusted text: the string of an added token becomes its id. Text from outside goes through ``LiteralEncoder``.

        Returns:
            int32 [n]; nothing is put before or after.
        """
        return np.asarray(self.backend.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def encode_with_offsets(self, text: str) -> tuple[IntArray, IntArray]:
        """Encode trusted text.

        Returns:
            int32 [n] ids and int32 [n] position of the first character of each.
        """
        encoding: Encoding = self.backend.encode(text, add_special_tokens=False)
        starts = np.asarray([start for start, _ in encoding.offsets], dtype=np.int32)
        return np.asarray(encoding.ids, dtype=np.int32), starts

    def decode(self, ids: Sequence[int] | IntArray) -> str:
        """Text of the ids, control tokens written out; bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False)

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Render a conversation with the chat template, under the settings transformers uses.

        Raises:
            CodecError: When the template itself refuses the conversation or cannot be rendered.
        """
        from jinja2 import TemplateError
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.globals["raise_exception"] = refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        names = {"eos_token": self.eos_token, "pad_token": self.pad_token or "", "bos_token": self.bos_token or ""}
        try:
            template = environment.from_string(self.chat_template)
            return template.render(messages=[dict(message) for message in messages], add_generation_prompt=add_generation_prompt, **names)
        except (TemplateError, TypeError, KeyError) as error:
            roles = [message["role"] for message in messages]
            raise CodecError(f"the chat template refuses a conversation of roles {roles}: {error}") from error

    def save(self, directory: Path | str) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json``, which ``PreTrainedTokenizerFast.from_pretrained`` reads."""
        target = Path(directory)
        target.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos_token,
            "pad_token": self.pad_token,
            "bos_token": self.bos_token,
            "chat_template": self.chat_template,
            "clean_up_tokenization_spaces": False,
        }
        (target / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path | str) -> ChatTokenizer:
        """Read a directory with ``tokenizer.json`` and ``tokenizer_config.json``, ours or any fast tokenizer of the Hub.

        Raises:
            CodecError: When a file is missing or holds no end-of-sequence token or chat template.
        """
        from tokenizers import Tokenizer

        source = Path(directory)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if not (source / name).is_file():
                raise CodecError(f"no {name} in {source}; expected the directory of a saved fast tokenizer")
        config: dict[str, Any] = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        template_file = source / "chat_template.jinja"
        template = template_file.read_text(encoding="utf-8") if template_file.is_file() else _default_template(config.get("chat_template"))
        eos_token = _token_content(config.get("eos_token"))
        if template is None or eos_token is None:
            missing = "chat_template" if template is None else "eos_token"
            raise CodecError(f"{source / 'tokenizer_config.json'} has no {missing}; a chat model's tokenizer is needed")
        return cls(
            Tokenizer.from_file(str(source / "tokenizer.json")),
            template,
            eos_token=eos_token,
            pad_token=_token_content(config.get("pad_token")),
            bos_token=_token_content(config.get("bos_token")),
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int = 768) -> ChatTokenizer:
    """Train a byte-level BPE with ChatML control tokens; the same texts in the same order give the same vocabulary.

    Args:
        texts: Training texts, e.g. instructions, commands and outputs of the corpus.
        vocab_size: Most ids, the 256 bytes and the three control tokens included.

    Returns:
        The tokenizer. ``<|im_end|>`` ends a generation, ``<|endoftext|>`` pads.

    Raises:
        CodecError: When ``vocab_size`` does not hold the bytes and the control tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    control = [END_OF_TEXT, IM_START, IM_END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    smallest = len(alphabet) + len(control)
    if vocab_size < smallest:
        raise CodecError(f"vocab_size: got {vocab_size}, expected at least {smallest} (256 bytes and {len(control)} control tokens)")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, special_tokens=control, initial_alphabet=sorted(alphabet), show_progress=False
    )
    # Role names frame every turn, so each is made one token whatever the texts are.
    backend.train_from_iterator([_FRAME_WORDS * _FRAME_REPEATS, *texts], trainer=trainer)
    return ChatTokenizer(backend, CHATML_TEMPLATE, eos_token=IM_END, pad_token=END_OF_TEXT)


def _token_content(value: object) -> str | None:
    """Content of a token as configuration files write it: a string, or a mapping with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _default_template(value: object) -> str | None:
    """The chat template of a configuration file: a string, or the entry named ``default`` of a list."""
    if isinstance(value, list):
        value = next((entry.get("template") for entry in value if entry.get("name") == "default"), None)
    return value if isinstance(value, str) else None
