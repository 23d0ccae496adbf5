"""The one table of architectures: which tensors a model has, what each is for, and which shape it must have.

An entry lists its *modules* (``models.modules``); from that list follow the role of any tensor name, the name of any
tensor, and the shapes that a config promises. A new family is one entry, the layers that it needs in ``runtime``, and
a test. Quantize asks for roles and shapes, export for names, the runtime for both; none of them looks at names itself.

Names are accepted with or without ``model.`` and inside a multimodal wrapper (``language_model.model.``,
``model.language_model.``); tensors outside the text model get the role ``other``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trapetum.errors import CheckpointError, UnsupportedModelError
from trapetum.models.architecture import Architecture, Place, Section
from trapetum.models.deepseek import DEEPSEEK
from trapetum.models.expert_families import EXPERTS
from trapetum.models.families import DENSE, llama_modules
from trapetum.models.modules import MATRIX_KINDS, Module, Role
from trapetum.models.qwen_next import QWEN_NEXT

__all__ = [
    "ARCHITECTURES",
    "MATRIX_KINDS",
    "Architecture",
    "Module",
    "Place",
    "Role",
    "Section",
    "resolve",
    "text_config",
    "with_tied",
]

ARCHITECTURES: dict[str, Architecture] = {a.model_type: a for a in (*DENSE, *EXPERTS, *DEEPSEEK, *QWEN_NEXT)}

_TIED = "tie_word_embeddings"


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model (``text_config`` of a multimodal one).

    Where both parts say whether the head is the embedding, and not the same, neither counts: releases of transformers
    have heeded one or the other, and whether there is a head tensor tells what the file was saved with.
    """
    nested = config.get("text_config")
    if not isinstance(nested, Mapping):
        return config
    shared = {k: config[k] for k in (_TIED, "eos_token_id", "bos_token_id") if k in config}
    merged = {**shared, **nested}
    if merged.get(_TIED) != shared.get(_TIED, merged.get(_TIED)):
        merged[_TIED] = None
    return merged


def with_tied(config: Mapping[str, Any], tied: bool) -> dict[str, Any]:
    """A config that says of its head whether it is the embedding; in ``text_config``, where it has one, too."""
    found = {**config, _TIED: tied}
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        found["text_config"] = {**nested, _TIED: tied}
    return found


def resolve(config: Mapping[str, Any], *, any_architecture: bool = False) -> Architecture:
    """Find the architecture of a config.

    Parameters
    ----------
    config : mapping
        Content of config.json.
    any_architecture : bool
        Give a stand-in that guesses roles from names instead of refusing an unknown family.

    Raises
    ------
    CheckpointError
        If the config names no architecture at all.
    UnsupportedModelError
        If it names one outside the table.
    """
    text = text_config(config)
    listed = text.get("architectures") or []
    if not isinstance(listed, str | list | tuple):
        raise CheckpointError(f"config.json: architectures is {listed!r}; a list of names is expected")
    classes = [str(c) for c in ([listed] if isinstance(listed, str) else listed)]
    model_type = text.get("model_type")
    layers = text.get("num_hidden_layers")
    for arch in ARCHITECTURES.values():
        if any(c in arch.classes for c in classes) or (not classes and model_type == arch.model_type):
            return replace(arch, num_layers=layers if isinstance(layers, int) else None)
    if any_architecture:
        return Architecture(str(model_type), tuple(classes), llama_modules(), any_architecture=True)
    if not classes and not model_type:
        raise CheckpointError(
            "config.json: keys 'architectures' and 'model_type' are both missing",
            hint="add the one that the model's authors published",
        )
    known = ", ".join(c for a in ARCHITECTURES.values() for c in a.classes)
    raise UnsupportedModelError(
        f"config.json: architecture {', '.join(classes) or model_type!r} is not known; known are {known}",
        hint="--any-architecture quantizes it by tensor shapes (artifact and hf export only)",
    )
