"""tokenizer.json -> tokenizer.ggml.*: both kinds, every fault, and padding."""

from __future__ import annotations

import json

import pytest

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.export.gguf_tokenizer import tokenizer_pairs
from trapetum.formats.gguf_tokenizer import PRE_TOKENIZERS

PIECES = [
    "<unk>",
    "<s>",
    "</s>",
    *(chr(33 + i) for i in range(60)),
    "Ġ",
    "Ġt",
    "Ġth",
    "你",
    "你好",
    "好",
    "🙂",
    "Ã©",
]
COUNT = len(PIECES)
MERGES = [("Ġ", "t"), ("Ġt", "h"), ("你", "好")]


def added(i, text, *, special=False):
    return {
        "id": i,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": special,
    }


def byte_level(steps=None, **model):
    return {
        "added_tokens": [added(i, PIECES[i], special=True) for i in range(3)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps or PRE_TOKENIZERS["gpt-2"][0]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel"},
        "model": {
            "type": "BPE",
            "vocab": {p: i for i, p in enumerate(PIECES)},
            "merges": [" ".join(m) for m in MERGES],
            **model,
        },
    }


@pytest.fixture
def pairs(tmp_path):
    def make(content, rows=COUNT, config=None, settings=None, **others):
        files = {"tokenizer.json": content, "tokenizer_config.json": settings or {}, **others}
        paths = {}
        for name, value in files.items():
            paths[name] = tmp_path / name
            paths[name].write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
        found, notes = tokenizer_pairs(paths, config or {}, rows)
        return {k.removeprefix("tokenizer."): v.value for k, v in found.items()}, notes

    return make


def test_tokens_and_merges_are_the_files_own(pairs):
    content = byte_level()
    found, notes = pairs(content, settings={"bos_token": "<s>", "eos_token": {"content": "</s>"}})
    assert found["ggml.model"] == "gpt2"
    assert found["ggml.pre"] == "gpt-2"
    assert found["ggml.tokens"] == PIECES
    assert found["ggml.token_type"] == [3, 3, 3] + [1] * (len(PIECES) - 3)
    assert found["ggml.merges"] == ["Ġ t", "Ġt h", "你 好"]
    assert (found["ggml.bos_token_id"], found["ggml.eos_token_id"]) == (1, 2)
    assert found["ggml.add_bos_token"] is False
    assert not notes
    content["model"]["merges"] = [list(m) for m in MERGES]
    assert pairs(content)[0]["ggml.merges"] == found["ggml.merges"]


def test_ids_without_a_token_are_padded_with_distinct_ones(pairs):
    content = byte_level()
    count = len(PIECES)
    content["model"]["vocab"][f"[PAD{count + 1}]"] = count  # somebody's own token of that name
    content["added_tokens"] += [added(count + 3, "<tool>"), added(count + 5, "<|x|>")]
    found, _ = pairs(content, rows=count + 7)
    assert found["ggml.tokens"][count:] == [
        f"[PAD{count + 1}]",
        f"[PAD{count + 1}]_",
        f"[PAD{count + 2}]",
        "<tool>",
        f"[PAD{count + 4}]",
        "<|x|>",
        f"[PAD{count + 6}]",
    ]
    assert found["ggml.token_type"][count:] == [1, 5, 5, 4, 5, 3, 5]


def test_too_many_tokens_are_refused_with_both_numbers(pairs):
    with pytest.raises(
        CheckpointError, match=rf"{len(PIECES)} tokens, the embedding has {len(PIECES) - 2} rows"
    ):
        pairs(byte_level(), rows=len(PIECES) - 2)


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_known_rule_gives_a_name_with_the_same_rule(name, pairs):
    steps, ignore_merges = PRE_TOKENIZERS[name]
    found, _ = pairs(byte_level(steps, ignore_merges=ignore_merges))
    assert PRE_TOKENIZERS[found["ggml.pre"]] == (steps, ignore_merges)


def test_line_ends_may_be_spelled_out_or_not(pairs):
    steps = json.loads(json.dumps(PRE_TOKENIZERS["qwen2"][0]))
    rule = steps[0]["pattern"]
    rule["Regex"] = rule["Regex"].replace(r"\r", "\r").replace(r"\n", "\n")
    assert pairs(byte_level(steps))[0]["ggml.pre"] == "qwen2"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pre_tokenizer": {"type": "Whitespace"}}, "neither byte-level"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]]}}, "Unigram"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
    ],
)
def test_what_llama_cpp_does_not_have_is_refused(change, said, pairs):
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        pairs({**byte_level(), **change})
    assert "hf" in str(caught.value.hint)


def test_an_unknown_rule_is_shown(pairs):
    steps = json.loads(json.dumps(PRE_TOKENIZERS["qwen2"][0]))
    steps[0]["pattern"]["Regex"] = r"\d+|\D+"
    with pytest.raises(UnsupportedModelError, match=r"\\\\d\+"):
        pairs(byte_level(steps))
    with pytest.raises(UnsupportedModelError, match="ignore_merges true"):
        pairs(byte_level(PRE_TOKENIZERS["qwen2"][0], ignore_merges=True))


@pytest.mark.parametrize(
    ("vocab", "extra", "said"),
    [
        ({"a": 0, "b": 0}, [], "both have the id 0"),
        ({"a": 0}, [added(1, "a")], "has the ids 0 and 1"),
        ({"a": -1}, [], "the id -1"),
    ],
)
def test_a_vocabulary_that_contradicts_itself(vocab, extra, said, pairs):
    content = byte_level(vocab=vocab, merges=[])
    content["added_tokens"] = extra
    with pytest.raises(CheckpointError, match=said):
        pairs(content, rows=4)


def test_a_merge_of_three_is_refused(pairs):
    with pytest.raises(CheckpointError, match="not a merge"):
        pairs(byte_level(merges=["a b c"]))


def test_no_tokenizer():
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        tokenizer_pairs({}, {}, 4)


def test_template_decides_about_marks(pairs):
    content = byte_level()
    mark = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [mark, text],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
    }
    content["post_processor"] = {"type": "Sequence", "processors": [{"type": "ByteLevel"}, processor]}
    found, _ = pairs(content, settings={"add_bos_token": False, "eos_token": "</s>"})
    assert found["ggml.add_bos_token"] is True
    assert found["ggml.bos_token_id"] == 1
    processor["single"] = [text, mark]
    found, _ = pairs(content, settings={"add_bos_token": True})
    assert (found["ggml.add_bos_token"], found["ggml.add_eos_token"]) == (False, True)
    processor["single"] = [mark, mark, text]
    with pytest.raises(UnsupportedModelError, match="2 tokens before"):
        pairs(content)


def test_special_ids_come_from_the_settings_then_the_config(pairs):
    found, _ = pairs(byte_level(), config={"eos_token_id": [2, 5, 7], "pad_token_id": 9})
    assert (found["ggml.eos_token_id"], found["ggml.eot_token_id"], found["ggml.eom_token_id"]) == (2, 5, 7)
    assert found["ggml.padding_token_id"] == 9
    assert found["ggml.bos_token_id"] == 2  # none is known: not llama.cpp's default, token 11
    found, _ = pairs(byte_level(), config={"eos_token_id": [2, 5]}, settings={"eos_token": PIECES[5]})
    assert (found["ggml.eos_token_id"], found["ggml.eot_token_id"]) == (5, 2)
    _, notes = pairs(byte_level())
    assert any("no end token" in note for note in notes)


def test_chat_templates(pairs):
    found, _ = pairs(byte_level(), settings={"chat_template": "{{ a }}"})
    assert found["chat_template"] == "{{ a }}"
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    found, _ = pairs(byte_level(), settings={"chat_template": named})
    assert (found["chat_template"], found["chat_template.tool_use"]) == ("A", "B")
    assert found["chat_templates"] == ["tool_use"]
    found, _ = pairs(byte_level(), settings={"chat_template": "old"}, **{"chat_template.jinja": "new ü"})
    assert found["chat_template"] == "new ü"


def sentencepiece(**changes):
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(3)), "a", "b", "ab", "▁", "▁ab", "▁▁x"]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return {
        "added_tokens": [*(added(i, pieces[i], special=True) for i in range(3)), added(11, "▁▁x")],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, replace]},
        "pre_tokenizer": None,
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "byte_fallback": True,
            "vocab": {p: i for i, p in enumerate(pieces)},
            "merges": ["a b", "▁ ab", "▁a b"],
        },
        **changes,
    }


def test_sentencepiece_scores_are_ranks(pairs):
    found, _ = pairs(sentencepiece(), rows=13)
    assert found["ggml.model"] == "llama"
    assert found["ggml.token_type"] == [2, 3, 3, 6, 6, 6, 1, 1, 1, 1, 1, 4, 5]
    scores = found["ggml.scores"]
    assert scores[8] == 0  # the first merge
    assert scores[10] == -1  # the second makes it first, the third again
    assert scores[3] == 0
    assert scores[6] == scores[11] == scores[12] == -4
    assert found["ggml.tokens"][11] == "  x"
    assert found["ggml.add_space_prefix"] is True


@pytest.mark.parametrize(
    ("change", "prefix"),
    [
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, False),
        ({"normalizer": None, "pre_tokenizer": {"type": "Metaspace", "replacement": "▁"}}, True),
        (
            {
                "normalizer": None,
                "pre_tokenizer": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"},
            },
            False,
        ),
    ],
)
def test_where_a_space_goes_before_a_text(change, prefix, pairs):
    assert pairs(sentencepiece(**change), rows=12)[0]["ggml.add_space_prefix"] is prefix
