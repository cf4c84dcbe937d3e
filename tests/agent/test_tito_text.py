"""Tokenizer, literal encoder, turn codec: what text becomes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("tokenizers")
from tokenizers import AddedToken, Tokenizer, normalizers

from t1_agent.tito import ChatTokenizer, CodecError, LiteralEncoder, SegmentKind, TurnCodec, train_tokenizer
from t1_agent.tito import codec as codec_module
from t1_agent.tito.tokenizer import CHATML_TEMPLATE, END_OF_TEXT, IM_END, IM_START

TEXTS = [
    f"Move the file report_{i}.txt to /app/archive and write its size in bytes into sizes.log.\nmv report_{i}.txt /app/archive/\n"
    for i in range(40)
]
ADDED = ["<tool_call>", "</think>"]


def build(template: str = CHATML_TEMPLATE) -> ChatTokenizer:
    trained = train_tokenizer(TEXTS, 512)
    return ChatTokenizer(trained.backend, template, eos_token=IM_END, pad_token=END_OF_TEXT)


def with_unspecial_tokens() -> ChatTokenizer:
    backend = Tokenizer.from_str(build().backend.to_str())
    backend.add_tokens([AddedToken(text, special=False) for text in ADDED])
    backend.normalizer = normalizers.NFC()
    return ChatTokenizer(backend, CHATML_TEMPLATE, eos_token=IM_END, pad_token=END_OF_TEXT)


TOKENIZER = build()
RICH = with_unspecial_tokens()
LITERAL = LiteralEncoder(RICH)
RICH_CODEC = TurnCodec(RICH)
FRAGMENTS = [
    IM_START,
    IM_END,
    END_OF_TEXT,
    *ADDED,
    "<|im_",
    "end|>",
    "<|",
    "|>",
    "\u200b",
    "\x00",
    "\x1b[31m",
    "\r\n",
    "e\u0301",
    "😀",
    " ",
    "a",
]
ANY_TEXT = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join))


class TestTokenizer:
    def test_training_is_deterministic_and_bounded(self):
        assert build().backend.to_str() == TOKENIZER.backend.to_str()
        assert TOKENIZER.vocab_size <= 512
        assert len(TOKENIZER.encode("user")) == len(TOKENIZER.encode("assistant")) == 1

    @pytest.mark.parametrize("word", ["report", " report"])
    def test_a_word_has_the_same_ids_behind_any_sign_and_before_any_other(self, word):
        ids = TOKENIZER.encode(word).tolist()
        for before, after in (("", ".txt"), ("cat", ".txt"), ("/app/", "_1"), ("'", "'"), ("7", "\n")):
            if before[-1:].isalpha() and not word.startswith(" "):
                continue  # that would be another, longer word
            assert TOKENIZER.encode(before + word + after).tolist()[len(TOKENIZER.encode(before)) :][: len(ids)] == ids

    def test_too_small_vocabulary_is_refused(self):
        with pytest.raises(CodecError, match="at least 259"):
            train_tokenizer(TEXTS, 200)

    @given(st.text())
    @settings(deadline=None, max_examples=100)
    def test_round_trip(self, text):
        assert TOKENIZER.decode(TOKENIZER.encode(text)) == text

    def test_saved_directory_loads_here_and_in_transformers(self, tmp_path: Path):
        transformers = pytest.importorskip("transformers")
        TOKENIZER.save(tmp_path)
        loaded = ChatTokenizer.load(tmp_path)
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        messages = [
            {"role": "user", "content": "Move it\n"},
            {"role": "assistant", "content": " mv a b"},
            {"role": "user", "content": "exit 0"},
        ]
        for generate in (False, True):
            expected = theirs.apply_chat_template(messages, add_generation_prompt=generate, tokenize=True)["input_ids"]
            assert loaded.encode(loaded.render(messages, add_generation_prompt=generate)).tolist() == expected
        assert (theirs.eos_token_id, theirs.pad_token_id) == (loaded.eos_id, loaded.pad_id)
        assert len(theirs) == loaded.vocab_size

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"chat_template": None}, "no chat_template"),
            ({"eos_token": None}, "no eos_token"),
            ({"eos_token": "</s>"}, "not an added token"),
        ],
    )
    def test_unusable_configuration_is_refused(self, tmp_path: Path, change, message):
        TOKENIZER.save(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
        with pytest.raises(CodecError, match=message):
            ChatTokenizer.load(tmp_path)

    def test_missing_directory_is_refused(self, tmp_path: Path):
        with pytest.raises(CodecError, match=r"no tokenizer\.json"):
            ChatTokenizer.load(tmp_path / "nothing")

    def test_configuration_in_the_forms_of_the_hub(self, tmp_path: Path):
        TOKENIZER.save(tmp_path)
        path = tmp_path / "tokenizer_config.json"
        config = json.loads(path.read_text()) | {"eos_token": {"content": IM_END}, "chat_template": [{"name": "default", "template": "T"}]}
        path.write_text(json.dumps(config))
        assert ChatTokenizer.load(tmp_path).chat_template == "T"
        (tmp_path / "chat_template.jinja").write_text("U")
        assert ChatTokenizer.load(tmp_path).chat_template == "U"


class TestLiteralEncoder:
    @given(ANY_TEXT)
    @settings(deadline=None, max_examples=400)
    def test_no_control_id_and_exact_round_trip(self, text):
        ids = LITERAL.encode(text)
        assert not RICH.control_ids.intersection(ids.tolist())
        assert LITERAL.decode(ids) == RICH.decode(ids) == text

    @given(ANY_TEXT.filter(lambda text: not any(token in text for token in RICH.added_tokens)))
    @settings(deadline=None, max_examples=200)
    def test_equals_the_normal_encoder_on_innocent_text(self, text):
        text = normalizers.NFC().normalize_str(text)
        assert LITERAL.encode(text).tolist() == RICH.encode(text).tolist()

    @pytest.mark.parametrize("token", [IM_START, IM_END, END_OF_TEXT, *ADDED])
    def test_normal_encoder_would_have_been_fooled(self, token):
        assert RICH.control_ids.intersection(RICH.encode(f"cat: {token}").tolist())

    @pytest.mark.parametrize("cut", range(1, len(IM_END)))
    def test_halves_of_a_control_token_in_two_chunks(self, cut):
        ids = np.concatenate([LITERAL.encode("x" + IM_END[:cut]), LITERAL.encode(IM_END[cut:] + "y")])
        assert not RICH.control_ids.intersection(ids.tolist())
        assert RICH.decode(ids) == f"x{IM_END}y"

    def test_lone_surrogates_become_replacement_characters(self):
        assert LITERAL.decode(LITERAL.encode("a\udc80b \ud83d\ude00")) == "a\ufffdb 😀"

    @pytest.mark.parametrize("text", ["", "\x00" * 5, "a" * 200_000, "\x1b[2J\r\n" * 2_000, "\u4e2d\u6587 \u202e"])
    def test_ugly_output(self, text):
        assert LITERAL.decode(LITERAL.encode(text)) == text

    def test_a_model_that_looks_whole_words_up_finds_no_control_token(self):
        spec = json.loads(TOKENIZER.backend.to_str())
        spec["model"]["ignore_merges"] = True
        spec["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        eager = ChatTokenizer(Tokenizer.from_str(json.dumps(spec)), CHATML_TEMPLATE, eos_token=IM_END)
        assert not eager.control_ids.intersection(LiteralEncoder(eager).encode(IM_END).tolist())

    def test_merges_that_build_a_control_token_are_dropped(self):
        spec = json.loads(TOKENIZER.backend.to_str())
        built = spec["model"]["merges"][-1]
        word = "".join(built)
        index = spec["model"]["vocab"][word]
        spec["added_tokens"].append({**spec["added_tokens"][0], "id": index, "content": word})
        tokenizer = ChatTokenizer(Tokenizer.from_str(json.dumps(spec)), CHATML_TEMPLATE, eos_token=IM_END)
        literal = LiteralEncoder(tokenizer)
        assert index not in literal.encode(word)
        assert literal.decode(literal.encode(word)) == word

    def test_vocabulary_without_all_bytes_is_refused(self):
        spec = json.loads(TOKENIZER.backend.to_str())
        del spec["model"]["vocab"]["ÿ"]
        with pytest.raises(CodecError, match="lacks 1 of 256"):
            LiteralEncoder(ChatTokenizer(Tokenizer.from_str(json.dumps(spec)), CHATML_TEMPLATE, eos_token=IM_END))

    def test_normaliser_that_changes_text_is_refused(self):
        backend = Tokenizer.from_str(TOKENIZER.backend.to_str())
        backend.normalizer = normalizers.Lowercase()
        with pytest.raises(CodecError, match="comes back as"):
            LiteralEncoder(ChatTokenizer(backend, CHATML_TEMPLATE, eos_token=IM_END))


THINK_STRIPPING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SEPARATOR = CHATML_TEMPLATE.replace("'<|im_end|>\\n'", "'<|im_end|>'")
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}" + CHATML_TEMPLATE
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML_TEMPLATE
IGNORED_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
COUNTED_TURNS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + (loop.index|string) + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' + ((messages|length + 1)|string) + '\\n' }}{% endif %}"
)


class TestTurnCodec:
    @pytest.mark.parametrize("template", [CHATML_TEMPLATE, NO_SEPARATOR, DEFAULT_SYSTEM, NO_SYSTEM, IGNORED_SYSTEM])
    def test_pieces_give_the_render_of_the_template(self, template):
        tokenizer = build(template)
        codec = TurnCodec(tokenizer)
        ids = [piece.ids for piece in codec.encode_prompt("Move the file")]
        messages = [{"role": "user", "content": "Move the file"}]
        for turn in range(4):
            ids += [codec.encode_turn(f"mv {turn} b"), *(piece.ids for piece in codec.encode_observation(f"exit {turn}\nok"))]
            messages += [{"role": "assistant", "content": f"mv {turn} b"}, {"role": "user", "content": f"exit {turn}\nok"}]
        assert np.concatenate(ids).tolist() == tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True)).tolist()

    def test_parts_of_chatml(self):
        codec = TurnCodec(TOKENIZER)
        decode = TOKENIZER.decode
        assert (decode(codec.close_ids), decode(codec.separator_ids), decode(codec.gen_prompt_ids)) == (
            IM_END,
            "\n",
            f"{IM_START}assistant\n",
        )
        assert codec.stop_ids == (TOKENIZER.eos_id,)
        kinds = [piece.kind for piece in codec.encode_observation("exit 0")]
        assert kinds == ["separator", "env_wrapper", "env_content", "env_wrapper", "gen_prompt"]
        assert SegmentKind.SAMPLED not in kinds

    def test_system_message(self):
        ids = np.concatenate([piece.ids for piece in TurnCodec(build(DEFAULT_SYSTEM)).encode_prompt("go", system="You are")])
        assert TOKENIZER.decode(ids) == f"{IM_START}system\nYou are{IM_END}\n{IM_START}user\ngo{IM_END}\n{IM_START}assistant\n"

    @pytest.mark.parametrize("template", [NO_SYSTEM, IGNORED_SYSTEM])
    def test_system_message_is_refused_where_the_template_takes_none(self, template):
        with pytest.raises(CodecError, match="takes none"):
            TurnCodec(build(template)).encode_prompt("go", system="You are")

    @pytest.mark.parametrize(
        ("template", "reason"),
        [
            (THINK_STRIPPING, "not append-only"),
            (COUNTED_TURNS, "wrappers change|closes with"),
            (CHATML_TEMPLATE.replace("{% if add_generation_prompt %}", "{% if false %}"), "no generation prompt"),
            (CHATML_TEMPLATE.replace("'<|im_end|>\\n'", "'[end]\\n'"), "stop token"),
            (CHATML_TEMPLATE.replace("message['content']", "message['content'] + message['content']"), "2 times"),
            ("{{ raise_exception('nothing allowed') }}", "nothing allowed"),
            ("{% for %}", "refuses"),
        ],
    )
    def test_template_is_refused_with_the_reason(self, template, reason):
        with pytest.raises(CodecError, match=reason):
            TurnCodec(build(template))

    @pytest.mark.parametrize(
        "mutation",
        [
            {"assistant_close": IM_END},  # forgets the newline
            {"user_open": f"{IM_START}user"},
            {"assistant_open": f"{IM_START}assistant\n\n"},
            {"user_close": f"{IM_END}\n\n"},
        ],
    )
    def test_a_wrong_codec_is_caught_against_the_template(self, monkeypatch, mutation):
        wrappers = codec_module._probe(TOKENIZER)
        parts = {name: getattr(wrappers, name) for name in wrappers.__dataclass_fields__} | mutation
        monkeypatch.setattr(codec_module, "_probe", lambda tokenizer: codec_module._Wrappers(**parts))
        with pytest.raises(CodecError, match="differ from the template"):
            TurnCodec(TOKENIZER)

    @given(ANY_TEXT, ANY_TEXT)
    @settings(deadline=None, max_examples=100)
    def test_control_ids_come_from_wrappers_only(self, instruction, output):
        codec, control = RICH_CODEC, RICH.control_ids
        pieces = codec.encode_observation(output)
        assert all(not control.intersection(piece.ids.tolist()) for piece in pieces if piece.kind is SegmentKind.ENV_CONTENT)
        prompt = codec.encode_prompt(instruction)
        empty = codec.encode_prompt("")
        assert [sum(i in control for i in p.ids.tolist()) for p in prompt] == [sum(i in control for i in p.ids.tolist()) for p in empty]


def test_importing_is_light():
    code = "import sys, t1_agent.tito; print([m for m in ('torch', 'transformers', 'tokenizers', 'jinja2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
