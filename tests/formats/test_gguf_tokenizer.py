"""Tokenizers out of GGUF metadata: rebuilt from their own vocabulary, they must split texts as before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trapetum.formats.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_config, tokenizer_json
from trapetum.formats.gguf_values import ValueType as T
from trapetum.formats.gguf_writer import GgufWriter
from trapetum.formats.source import open_source

CORPUS = [
    "The old house stood at the end of the lane, and nobody had lived in it since 1987.",
    "  def area(width, height):\n\treturn width * height  # don't\n\n\n",
    "Größe, naïve, 東京 2024, 🙂 we're 12345 apples; they'll go. 'Tis WON'T",
] * 5
TEXTS = [*CORPUS[:3], "", " ", "a  b", "<s>hello<|im_end|>", "Ωmega \u2581 x\r\n", "trailing  "]


def rebuilt(metadata: dict[str, Any]) -> Tokenizer:
    content = tokenizer_json(metadata)
    assert isinstance(content, dict), content
    return Tokenizer.from_str(json.dumps(content))


def in_order(vocab: dict[str, int]) -> list[str]:
    return sorted(vocab, key=vocab.__getitem__)


def byte_level(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """A small trained tokenizer and the metadata that a converter would write for it."""
    steps, ignore_merges = PRE_TOKENIZERS[pre]
    original = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    made = json.loads(original.to_str())
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    original = Tokenizer.from_str(json.dumps(made))
    original.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    original.train_from_iterator(CORPUS, trainer)
    model = json.loads(original.to_str())["model"]
    tokens = in_order(model["vocab"])
    merges = [" ".join(m) if isinstance(m, list) else m for m in model["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens],
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"),
        "tokenizer.ggml.add_bos_token": False,
    }
    return original, metadata


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level(pre: str) -> None:
    original, metadata = byte_level(pre)
    again = rebuilt(metadata)
    for text in TEXTS:
        ids = original.encode(text).ids
        if pre != "qwen2":  # its normalizer composes characters first
            assert again.encode(text).ids == ids, text
        assert again.decode(again.encode(text).ids, skip_special_tokens=False) == text


def test_the_expressions_split_as_their_models_do() -> None:
    expected = {
        "llama-bpe": ["123", "45", "Ġapples", "'ll", "Ċ"],
        "qwen2": ["1", "2", "3", "4", "5", "Ġapples", "'ll", "Ċ"],
        "gpt-2": ["12345", "Ġapples", "'ll", "Ċ"],
        "smollm": ["1", "2", "3", "4", "5", "Ġapples", "'ll", "Ċ"],
    }
    for pre, pieces in expected.items():
        steps = PRE_TOKENIZERS[pre][0]
        made = json.loads(Tokenizer(models.BPE()).to_str())
        made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        splitter = Tokenizer.from_str(json.dumps(made)).pre_tokenizer
        assert [piece for piece, _ in splitter.pre_tokenize_str("12345 apples'll\n")] == pieces, pre


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(prefix: bool) -> None:
    bytes_ = [f"<0x{b:02X}>" for b in range(256)]
    special = ["<unk>", "<s>", "</s>", *bytes_]
    original = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "\u2581")
    original.normalizer = (
        normalizers.Sequence([normalizers.Prepend("\u2581"), replace]) if prefix else replace
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, show_progress=False, limit_alphabet=60
    )
    original.train_from_iterator([line.replace(" ", " \u2581 ") for line in CORPUS], trainer)
    model = json.loads(original.to_str())["model"]
    made = {**json.loads(original.to_str()), "added_tokens": []}
    original = Tokenizer.from_str(json.dumps(made))
    tokens = in_order(model["vocab"])
    # As the converters do: the first merge that makes a token gives its score.
    scores = np.full(len(tokens), -1e4, np.float32)
    for rank, merge in enumerate(model["merges"]):
        made_token = "".join(merge if isinstance(merge, list) else merge.split(" "))
        scores[tokens.index(made_token)] = max(scores[tokens.index(made_token)], -rank)
    again = rebuilt(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
            "tokenizer.ggml.add_space_prefix": prefix,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.bos_token_id": 1,
        }
    )
    for text in TEXTS:
        if "<s>" not in text:
            ids = again.encode(text, add_special_tokens=False).ids
            assert ids == original.encode(text).ids, text
            assert again.encode(text).ids == [1, *ids]
            assert again.decode(ids).lstrip(" ") == text.replace("\u2581", " ").lstrip(" "), text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "kind 'bert'"),
        ({"tokenizer.ggml.pre": "viking"}, "pre is 'viking'"),
        ({"tokenizer.ggml.merges": None}, "no tokenizer.ggml.merges"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "twice"),
        ({"tokenizer.ggml.token_type": [1]}, "1 token types"),
    ],
)
def test_what_cannot_be_made_says_why(change: dict[str, Any], message: str) -> None:
    answer = tokenizer_json({**byte_level("gpt-2")[1], **change})
    assert isinstance(answer, str)
    assert message in answer


def test_source_offers_the_files_until_it_is_closed(tmp_path: Path) -> None:
    _, metadata = byte_level("smollm")
    with GgufWriter(tmp_path / "m.gguf") as writer:
        writer.add("general.architecture", "llama")
        sizes = {
            "embedding_length": 8, "block_count": 1, "feed_forward_length": 8, "context_length": 8,
            "attention.head_count": 1,
        }  # fmt: skip
        for key, value in sizes.items():
            writer.add(f"llama.{key}", value, T.UINT32)
        writer.add("llama.attention.layer_norm_rms_epsilon", 1e-5, T.FLOAT32)
        for key, value in metadata.items():
            item = {"tokens": T.STRING, "merges": T.STRING, "token_type": T.INT32}.get(key.rpartition(".")[2])
            kind = T.UINT32 if isinstance(value, int) and not isinstance(value, bool) else None
            writer.add(key, value, T.ARRAY if item else kind, item)
        writer.add("tokenizer.chat_template", "{{ messages }}")
        writer.add_tensor("token_embd.weight", "F32", (400, 8))
        writer.begin()
        writer.write("token_embd.weight", np.zeros((400, 8), np.float32))
    with open_source(tmp_path / "m.gguf") as source:
        files = {path.name: path for path in source.side_files()}
        assert list(files) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
        assert json.loads(files["config.json"].read_text()) == source.config
        assert json.loads(files["tokenizer_config.json"].read_text()) == {
            "bos_token": "<s>",
            "chat_template": "{{ messages }}",
        }
        tokenizer = source.tokenizer_file()
        assert tokenizer is not None
        assert Tokenizer.from_file(str(tokenizer)).get_vocab_size() == len(metadata["tokenizer.ggml.tokens"])
    assert not tokenizer.exists()
    assert tokenizer_config({}) == {}
