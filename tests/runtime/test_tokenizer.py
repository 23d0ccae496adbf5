"""Encoding, byte-exact streaming, stop strings, chat templates, end tokens, faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trapetum.errors import CheckpointError, FormatError, RecipeError
from trapetum.runtime.tokenizer import TextStream, Tokenizer, generation_eos, read_text

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = Tokenizer(REPOSITORY / "models" / "books-2m" / "tokenizer.json")
# Tokens that are not whole characters: their sequences make valid, broken and overlong UTF-8.
PARTIAL = [i for i in range(2048) if "\ufffd" in DEMO.decode([i])]


def metaspace_tokenizer(folder: Path) -> Tokenizer:
    """SentencePiece style: spaces as U+2581, byte fallback, a decoder that drops the first space."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)] + ["▁", "a", "b", "▁a", "ab"]
    content = {
        "version": "1.0",
        "added_tokens": [
            {"id": 1, "content": "<s>", "special": True, "normalized": False,
             "single_word": False, "lstrip": False, "rstrip": False}
        ],
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {"type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True,
                  "vocab": {p: i for i, p in enumerate(pieces)}, "merges": ["▁ a", "a b"]},
    }  # fmt: skip
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return Tokenizer(file)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return metaspace_tokenizer(tmp_path_factory.mktemp("metaspace"))


def streamed(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...] = ()) -> str:
    stream = TextStream(tokenizer, stop)
    pieces = []
    for i in ids:
        pieces.append(stream.push(i))
        if stream.stopped:
            return "".join(pieces)
    return "".join(pieces) + stream.finish()


def test_special_tokens_only_when_asked(sentencepiece: Tokenizer) -> None:
    plain = sentencepiece.encode("ab a")
    assert sentencepiece.encode("ab a", add_special_tokens=True) == [1, *plain]
    assert sentencepiece.decode([1, *plain], skip_special_tokens=True) == "ab a"
    assert sentencepiece.token_id("<s>") == 1
    assert sentencepiece.token_id("nothing") is None


@settings(deadline=None)
@given(st.text())
def test_round_trip_and_stream_of_any_text(text: str) -> None:
    ids = DEMO.encode(text)
    assert DEMO.decode(ids) == text
    assert streamed(DEMO, ids) == text


@settings(deadline=None)
@given(st.lists(st.integers(0, 2047) | st.sampled_from(PARTIAL), max_size=40))
def test_stream_of_any_tokens_is_the_decoded_whole(ids: list[int]) -> None:
    """Tokens that do not make valid UTF-8 included."""
    assert streamed(DEMO, ids) == DEMO.decode(ids)


@settings(deadline=None)
@given(st.text(alphabet="ab é€😀"))
def test_stream_with_a_decoder_that_looks_back(sentencepiece: Tokenizer, text: str) -> None:
    ids = sentencepiece.encode(text)
    assert streamed(sentencepiece, ids) == sentencepiece.decode(ids)


def test_a_character_in_several_tokens_comes_out_whole(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a😀b")
    stream = TextStream(sentencepiece)
    pieces = [stream.push(i) for i in ids]
    assert "".join(pieces) == "a😀b"
    assert "😀" in pieces
    assert pieces.count("") == 3
    assert stream.finish() == ""


def test_an_unfinished_character_is_given_at_the_end(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("a😀")[:-1]
    assert streamed(sentencepiece, ids) == sentencepiece.decode(ids)
    assert streamed(sentencepiece, ids).startswith("a\ufffd")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("fox",), "The quick brown "),
        (("zebra",), "The quick brown fox jumps"),
        (("jumps!", "own f"), "The quick br"),
        (("The",), ""),
    ],
)
def test_stop_strings_cut_the_text(stop: tuple[str, ...], expected: str) -> None:
    assert streamed(DEMO, DEMO.encode("The quick brown fox jumps"), stop) == expected


def test_text_that_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(DEMO, ("abc!",))
    given_out = "".join(stream.push(i) for i in DEMO.encode("xabc"))
    assert not "xabc!".startswith(given_out + "a") or given_out == "x"
    assert given_out + stream.finish() == "xabc"
    assert not stream.stopped
    with pytest.raises(RecipeError, match="empty"):
        TextStream(DEMO, ("",))


def with_settings(folder: Path, settings: dict[str, Any]) -> Tokenizer:
    (folder / "tokenizer.json").write_bytes(DEMO.path.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return Tokenizer(folder / "tokenizer.json")


TEMPLATE = """{{ bos_token }}{% for m in messages %}
    {% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}
<{{ m['role'] }}>{{ m['content'] | trim }}{{ eos_token }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}"""
TALK = [{"role": "user", "content": " hi <b> "}]


@pytest.mark.parametrize("form", ["string", "list", "file"])
def test_chat_templates(tmp_path: Path, form: str) -> None:
    settings: dict[str, Any] = {"bos_token": {"content": "[B]", "lstrip": False}, "eos_token": "[E]"}
    if form == "string":
        settings["chat_template"] = TEMPLATE
    elif form == "list":
        settings["chat_template"] = [
            {"name": "tool", "template": "x"},
            {"name": "default", "template": TEMPLATE},
        ]
    else:
        settings["chat_template"] = "the file beside it rules"
        (tmp_path / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer = with_settings(tmp_path, settings)
    assert tokenizer.chat(TALK) == "[B]<user>hi <b>[E]\n<assistant>"
    assert tokenizer.chat(TALK, add_generation_prompt=False) == "[B]<user>hi <b>[E]\n"
    with pytest.raises(RecipeError, match="no such role"):
        tokenizer.chat([{"role": "bad", "content": ""}])


def test_chat_equals_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    template = (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
        "{{ messages | tojson }}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
    )
    ours = with_settings(tmp_path, {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"})
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    talk = [{"role": "system", "content": "é <&> 'x'"}, {"role": "user", "content": "a\nb"}]
    assert ours.chat(talk) == theirs.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("template", ["{{ ''.__class__.__mro__ }}", "{% for %}", "{{ messages.append(1) }}"])
def test_templates_are_sandboxed_and_checked(tmp_path: Path, template: str) -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        with_settings(tmp_path, {"chat_template": template}).chat(TALK)


@pytest.mark.parametrize(
    "template", ["{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ range(10 ** 9) }}", "{{ messages[7].x }}"]
)
def test_a_template_that_fails_is_named(tmp_path: Path, template: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template fails: ") as caught:
        with_settings(tmp_path, {"chat_template": template}).chat(TALK)
    assert "\n" not in caught.value.message


def test_a_template_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: not a template that can be read"):
        with_settings(tmp_path, {}).chat(TALK)


def test_no_template(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no chat template"):
        with_settings(tmp_path, {}).chat(TALK)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "Strange"}}'])
def test_a_broken_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path / "tokenizer.json")


def test_broken_settings_are_named(tmp_path: Path) -> None:
    tokenizer = with_settings(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        tokenizer.chat(TALK)


@pytest.mark.parametrize(
    ("content", "ids"), [('{"eos_token_id": 3}', (3,)), ('{"eos_token_id": [3, 4]}', (3, 4)), ("{}", ())]
)
def test_generation_config(tmp_path: Path, content: str, ids: tuple[int, ...]) -> None:
    (tmp_path / "generation_config.json").write_text(content)

    class Source:
        def side_files(self) -> list[Path]:
            return [tmp_path / "generation_config.json"]

    assert generation_eos(Source()) == ids  # type: ignore[arg-type]


def test_text_files_are_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_bytes("Zoë\r\n".encode())
    assert read_text(path) == "Zoë\r\n"
    path.write_bytes(b"abc\xe9")
    with pytest.raises(FormatError, match=r"t\.txt: byte 3 is 0xe9") as caught:
        read_text(path)
    assert caught.value.hint is not None
    assert "iconv" in caught.value.hint
    with pytest.raises(RecipeError, match=r"none\.txt: cannot be read"):
        read_text(tmp_path / "none.txt")
