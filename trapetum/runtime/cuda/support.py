"""What a model needs that a card has not: kernels, all of them told before a weight is read, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trapetum.errors import KernelUnavailable, listed

if TYPE_CHECKING:
    from trapetum.runtime.weights import Weights

__all__ = ["HEAD_DIMS", "MOST_HIDDEN", "NORM_THREADS", "card_memory", "check_support"]

HEAD_DIMS = tuple(range(16, 257, 16))
"""Widths of a head that ``prefill.cu`` is compiled for."""
NORM_THREADS = 1024
MOST_HIDDEN = 16 * NORM_THREADS
"""``NORM_RUN`` of ``decoder.cu`` elements a thread."""

# Kinds of mixers (``runtime.blocks.MIXERS``) that run on the CPU only.
_MIXERS = {
    "delta_net": "gated delta nets",
    "gated_attention": "attention with an output gate",
    "latent_attention": "latent attention",
}
_EXPERTS = "routed experts"


def check_support(weights: Weights, experts: str) -> None:
    """Refuse a model that cannot run on the card.

    Parameters
    ----------
    weights : Weights
        Nothing is loaded from it.
    experts : str
        ``cpu``: routed experts run in host memory.

    Raises
    ------
    KernelUnavailable
        Naming everything that has no kernels.
    """
    missing = list(dict.fromkeys(_missing(weights, experts)))
    if not missing:
        return
    hint = "Use --device cpu."
    if missing == [_EXPERTS]:
        hint = "Use --experts cpu: attention on the card, experts in host memory."
    family = weights.config.architecture.model_type
    raise KernelUnavailable(
        f"{weights.source.path}: {family} needs what has no CUDA kernels: {listed(missing)}", hint=hint
    )


def _missing(weights: Weights, experts: str) -> Iterator[str]:
    config = weights.config
    mixers, blocks = zip(
        *(config.architecture.blocks(config, i) for i in range(config.num_hidden_layers)), strict=True
    )
    yield from (_MIXERS.get(mixer, mixer) for mixer in mixers if mixer != "attention")
    if experts != "cpu" and any(block != "mlp" for block in blocks):
        yield _EXPERTS
    if config.hidden_size > MOST_HIDDEN:
        yield f"a hidden size of {config.hidden_size} (up to {MOST_HIDDEN} have some)"
    if "attention" not in mixers:
        return
    if config.head_dim not in HEAD_DIMS:
        yield f"heads of {config.head_dim} (multiples of 16 up to 256 have some)"
    layer = mixers.index("attention")
    for part in ("q_norm", "k_norm"):
        place = weights.find(part, layer)
        if place is not None and weights.source.shape(place.name)[-1] != config.head_dim:
            yield "norms over all heads together"


@contextmanager
def card_memory(path: Path, what: str, hint: str) -> Iterator[None]:
    """Tell memory of the card that is used up from the machine's, which is a ``MemoryError``, too.

    Raises
    ------
    KernelUnavailable
        If CuPy finds no memory in the block.
    """
    try:
        yield
    except MemoryError as problem:
        if type(problem).__module__.partition(".")[0] != "cupy":
            raise
        raise KernelUnavailable(f"{path}: the card has no memory for {what}: {problem}", hint=hint) from None
