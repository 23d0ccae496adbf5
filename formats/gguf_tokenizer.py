"""tokenizer.json out of the ``tokenizer.ggml.*`` metadata of a GGUF file.

=======  ============================================================================================================
model    what it is
=======  ============================================================================================================
gpt2     byte-level BPE: tokens, merges ("left right", one space), and in ``pre`` the name of the regular expression
         that splits a text before merging
llama    SentencePiece BPE with byte fallback: tokens and scores; a merge's rank is the score of what it makes
=======  ============================================================================================================

``token_type``: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte. Control and user-defined tokens are
matched before anything else. A ``pre`` that is not in the table below gives no tokenizer: splitting differently would
give other tokens without any error.

Source: the GGUF specification; llama.cpp, src/llama-vocab.cpp (names and expressions).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["PRE_TOKENIZERS", "tokenizer_config", "tokenizer_json"]

_CONTROL, _USER_DEFINED = 3, 4
_SPACE = "\u2581"

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _split(*patterns: str) -> list[dict[str, Any]]:
    rules = [
        {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        for pattern in patterns
    ]
    return [*rules, _BYTES]


# Tekken and GPT-4o split words by case; GPT-4o keeps an English contraction with its word.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+%s|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*%s|\p{{N}}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_MARKS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_GPT2 = [{**_BYTES, "use_regex": True}]
_DIGITS = [{"type": "Digits", "individual_digits": True}, *_GPT2]

PRE_TOKENIZERS: dict[str, tuple[list[dict[str, Any]], bool]] = {
    "gpt-2": (_GPT2, False),
    "smollm": (_DIGITS, False),
    "starcoder": (_DIGITS, False),
    "llama-bpe": (_split(_WORDS % "{1,3}"), True),
    "llama3": (_split(_WORDS % "{1,3}"), True),
    "smaug-bpe": (_split(_WORDS % "{1,3}"), False),
    "dbrx": (_split(_WORDS % "{1,3}"), False),  # Phi-4, OLMo-2
    "qwen2": (_split(_WORDS % ""), False),
    "qwen35": (_split(_MARKS), False),
    "tekken": (_split(_CASED % ("", "", "")), True),
    "gpt-4o": (_split(_CASED % (_CONTRACTION, _CONTRACTION, "{1,3}")), False),
    "deepseek-v3": (_split(r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK), False),
}
"""``tokenizer.ggml.pre`` -> pre-tokenizers, and whether whole words in the vocabulary skip the merges."""


def tokenizer_json(metadata: Mapping[str, Any]) -> dict[str, Any] | str:
    """The content of a tokenizer.json.

    Parameters
    ----------
    metadata : mapping
        Of a GGUF file.

    Returns
    -------
    dict, or str
        A str says why there is none.
    """
    model, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if tokens is None or model not in ("gpt2", "llama"):
        return f"its vocabulary is of the kind {model!r}; gpt2 and llama can be read"
    tokens = list(tokens)
    if len(set(tokens)) != len(tokens):
        return "its vocabulary holds a token twice"
    vocab = {token: i for i, token in enumerate(tokens)}
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if types is None else [int(t) for t in types]
    if len(kinds) != len(tokens):
        return f"it has {len(tokens)} tokens and {len(kinds)} token types"
    base = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": kind == _CONTROL,
            }
            for i, (token, kind) in enumerate(zip(tokens, kinds))
            if kind in (_CONTROL, _USER_DEFINED)
        ],
    }
    parts = _byte_level(metadata, vocab) if model == "gpt2" else _sentencepiece(metadata, tokens, vocab)
    if isinstance(parts, str):
        return parts
    return {**base, **parts, "post_processor": _template(metadata, tokens, add_bos=model == "llama")}


def _byte_level(metadata: Mapping[str, Any], vocab: dict[str, int]) -> dict[str, Any] | str:
    pre, merges = metadata.get("tokenizer.ggml.pre"), metadata.get("tokenizer.ggml.merges")
    if pre not in PRE_TOKENIZERS:
        return f"tokenizer.ggml.pre is {pre!r}; {', '.join(PRE_TOKENIZERS)} can be read"
    if merges is None:
        return "it has no tokenizer.ggml.merges"
    steps, ignore_merges = PRE_TOKENIZERS[pre]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,  # Qwen's own; llama.cpp has none
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": _BYTES,
        "model": _bpe(vocab, list(merges), ignore_merges=ignore_merges),
    }


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], vocab: dict[str, int]
) -> dict[str, Any] | str:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        return "it has no tokenizer.ggml.scores for its tokens"
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = _bpe(vocab, _merges(tokens, vocab, [float(s) for s in scores]), ignore_merges=False)
    return {
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]}
        if prefix
        else replace,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**model, "unk_token": tokens[unknown], "fuse_unk": True, "byte_fallback": True},
    }


def _merges(tokens: list[str], vocab: dict[str, int], scores: list[float]) -> list[str]:
    """Every way to make a token of two others; best score first, and for one token in the order of its parts."""
    found = []
    for i, token in enumerate(tokens):
        ways = []
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                ways.append((left, right))
        found += [(-scores[i], i, left, right) for left, right in sorted(ways)]
    return [f"{tokens[left]} {tokens[right]}" for _, _, left, right in sorted(found)]


def _bpe(vocab: dict[str, int], merges: list[str], *, ignore_merges: bool) -> dict[str, Any]:
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": vocab,
        "merges": merges,
    }


def _template(metadata: Mapping[str, Any], tokens: list[str], *, add_bos: bool) -> dict[str, Any] | None:
    """The begin and end marks that the tokenizer puts around a text."""
    add_bos = add_bos or metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")
    before = _marks(metadata, tokens, "bos", bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)))
    after = _marks(metadata, tokens, "eos", bool(metadata.get("tokenizer.ggml.add_eos_token", False)))
    if not before and not after:
        return None
    special = {m: {"id": m, "ids": [tokens.index(m)], "tokens": [m]} for m in (*before, *after)}

    def piece(sequence: str, kind: int) -> list[dict[str, Any]]:
        inner = [{"Sequence": {"id": sequence, "type_id": kind}}]
        mark = [[{"SpecialToken": {"id": m, "type_id": kind}} for m in part] for part in (before, after)]
        return [*mark[0], *inner, *mark[1]]

    return {
        "type": "TemplateProcessing",
        "single": piece("A", 0),
        "pair": piece("A", 0) + piece("B", 1),
        "special_tokens": special,
    }


def _marks(metadata: Mapping[str, Any], tokens: list[str], which: str, wanted: bool) -> list[str]:
    index = metadata.get(f"tokenizer.ggml.{which}_token_id")
    return [tokens[index]] if wanted and isinstance(index, int) and 0 <= index < len(tokens) else []


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a tokenizer_config.json: chat template and the special tokens by name."""
    tokens = metadata.get("tokenizer.ggml.tokens", ())
    config: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        index = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        if isinstance(index, int) and 0 <= index < len(tokens):
            config[f"{ours}_token"] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    return {**config, "chat_template": template} if isinstance(template, str) else config
