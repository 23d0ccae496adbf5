"""What a GGUF says about a model beside its vocabulary: ``general.*``, hyperparameters, and the file's name.

Engines need the hyperparameters; people need to know what the file was made from and under which licence. Types
are those that llama.cpp's converter writes: counts UINT32, epsilon and bases FLOAT32, names STRING.

Source: the GGUF specification (ggml, docs/gguf.md); llama.cpp, include/llama.h (file types).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trapetum.errors import CheckpointError
from trapetum.export.gguf_attention import attention_pairs
from trapetum.formats.artifact import Artifact
from trapetum.formats.gguf_header import ALIGNMENT_KEY
from trapetum.formats.gguf_source import GgufSource
from trapetum.formats.gguf_values import KeyValue, ValueType
from trapetum.formats.names import text_name
from trapetum.formats.source import TensorSource
from trapetum.models.config import ModelConfig
from trapetum.quantize.card import read_front_matter

__all__ = [
    "FILE_TYPES",
    "file_name",
    "general_pairs",
    "model_pairs",
    "model_title",
    "size_label",
]

FILE_TYPES: dict[str, int] = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "IQ2_XXS": 19,
    "IQ2_XS": 20,
    "IQ3_XXS": 23,
    "IQ1_S": 24,
    "IQ4_NL": 25,
    "IQ3_S": 26,
    "IQ2_S": 28,
    "IQ4_XS": 30,
    "IQ1_M": 31,
    "BF16": 32,
    "TQ1_0": 36,
    "TQ2_0": 37,
    "MXFP4": 38,
    "NVFP4": 39,
    "Q1_0": 40,
    "Q2_0": 41,
    "PQ2_0": 141,
    "PTQ1_0": 143,
}
"""``general.file_type`` of a file whose weights are mostly of a type; another enumeration than the types' own ids.
Of K-quants the "small" number, which stands for one type throughout."""

_QUANTIZATION_VERSION = 2
_FINE_TUNES = re.compile(r"(?i:instruct|chat|it|base|coder|math|thinking|reasoning|distill)")


def model_title(source: TensorSource) -> str:
    """The model's name: what the artifact was made from, what a GGUF says of itself, else the folder."""
    stated = source.metadata.get("general.name") if isinstance(source, GgufSource) else None
    return str(stated or _origin(source).get("name") or text_name(source.path.resolve().name))


def _origin(source: TensorSource) -> Mapping[str, Any]:
    """What an artifact says of the model that it was made from."""
    stated = source.manifest.get("source") if isinstance(source, Artifact) else None
    return stated if isinstance(stated, Mapping) else {}


def size_label(parameters: int) -> str:
    """Number of parameters to two or more digits.

    Examples
    --------
    >>> size_label(2_492_160), size_label(18_356_736), size_label(6_738_415_616)
    ('2.5M', '18M', '6.7B')
    """
    units = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3))
    unit, scale = next((u for u in units if parameters >= u[1]), units[-1])
    value = parameters / scale
    return f"{value:.0f}{unit}" if round(value) >= 10 else f"{value:.1f}{unit}"


def file_name(title: str, label: str, encoding: str) -> str:
    """``BaseName-SizeLabel-FineTune-Version-Encoding.gguf``, as the specification has it.

    Examples
    --------
    >>> file_name("books-18m", "18M", "Q2_0"), file_name("Qwen2.5-0.5B-Instruct", "494M", "F16")
    ('books-18M-v1.0-Q2_0.gguf', 'Qwen2-5-494M-Instruct-v1.0-F16.gguf')
    """
    base: list[str] = []
    tune: list[str] = []
    version = "v1.0"
    for part in re.split(r"[-_\s]+", title):
        if re.fullmatch(r"[vV]\d+(\.\d+)*", part):
            version = part.lower()
        elif re.fullmatch(r"(\d+x)?(\d+\.)?\d+[KMBTkmbt]", part):
            continue  # the size, which the label says
        elif base and _FINE_TUNES.fullmatch(part):
            tune.append(part)
        elif words := re.findall(r"[A-Za-z0-9]+", part):
            base += words
    return "-".join([*(base or ["model"]), label, *tune, version, encoding]) + ".gguf"


def general_pairs(
    source: TensorSource, architecture: str, title: str, parameters: int, majority: str
) -> dict[str, KeyValue]:
    """``general.*``: name, size, type, licence and origin.

    Parameters
    ----------
    source : TensorSource
        Its folder's README.md is read for the licence, languages and the base model; of a GGUF its own keys are.
    architecture : str
        GGUF's name of the family.
    title : str
    parameters : int
    majority : str
        The type of most weights.
    """
    pairs = {
        "general.architecture": KeyValue.text(architecture),
        "general.type": KeyValue.text("model"),
        "general.name": KeyValue.text(title),
        "general.size_label": KeyValue.text(size_label(parameters)),
        "general.file_type": KeyValue.count(FILE_TYPES[majority]),
        "general.quantization_version": KeyValue.count(_QUANTIZATION_VERSION),
    }
    if isinstance(source, GgufSource):  # whatever else it says of itself stays true
        own = source.files[0].kv
        return {**{k: v for k, v in own.items() if k.startswith("general.") and k != ALIGNMENT_KEY}, **pairs}
    card = read_front_matter(source.path if source.path.is_dir() else source.path.parent)
    for key, stated in (
        ("general.license", card.get("license")),
        ("general.license.name", card.get("license_name")),
        ("general.license.link", card.get("license_link")),
        ("general.source.huggingface.repository", _origin(source).get("repo")),
    ):
        if stated:
            pairs[key] = KeyValue.text(stated if isinstance(stated, str) else ", ".join(stated))
    for i, base in enumerate(_listed(card.get("base_model"))):
        organization, _, name = base.rpartition("/")
        pairs["general.base_model.count"] = KeyValue.count(i + 1)
        pairs[f"general.base_model.{i}.name"] = KeyValue.text(name)
        if organization:
            pairs[f"general.base_model.{i}.organization"] = KeyValue.text(organization)
    if languages := _listed(card.get("language")):
        pairs["general.languages"] = KeyValue(languages, ValueType.ARRAY, ValueType.STRING)
    return pairs


def model_pairs(config: ModelConfig, architecture: str) -> dict[str, KeyValue]:
    """Hyperparameters under ``ARCHITECTURE.*``.

    Raises
    ------
    CheckpointError
        If config.json does not say how long a context may be, which engines insist on.
    """
    context = config.max_position_embeddings
    if context is None:
        raise CheckpointError(
            "config.json: max_position_embeddings is missing, and a GGUF must state a context length"
        )
    values: dict[str, KeyValue] = {
        "context_length": KeyValue.count(context),
        "embedding_length": KeyValue.count(config.hidden_size),
        "block_count": KeyValue.count(config.num_hidden_layers),
        "feed_forward_length": KeyValue.count(config.intermediate_size),
        "attention.head_count": KeyValue.count(config.num_attention_heads),
        "attention.head_count_kv": KeyValue.count(config.num_key_value_heads),
        "attention.key_length": KeyValue.count(config.head_dim),
        "attention.value_length": KeyValue.count(config.head_dim),
        "attention.layer_norm_rms_epsilon": KeyValue.number(config.rms_norm_eps),
        "vocab_size": KeyValue.count(config.vocab_size),
        **attention_pairs(config, architecture),
    }
    return {f"{architecture}.{key}": value for key, value in values.items()}


def _listed(stated: str | list[str] | None) -> list[str]:
    return [] if stated is None else [stated] if isinstance(stated, str) else stated
