"""How far a model moves when some weights of one layer alone are others: mean KL, for many such changes in one pass.

The stream of the original and one for each change so far run side by side over the same tokens, a layer in memory at a
time. A change begins at its layer: the layer runs once more, with the other weights, from the original's stream. At the
end every stream is held against the original's next-token probabilities. Of n layers with c changes each this costs
some ``c n / 2`` passes over the tokens, so they are few; the model is the same and the tokens are, which is why few
suffice (three samples of 1,024 tokens ordered 42 matrices of an 18-million-parameter model nearly alike).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.formats.view import ReplacedTensors
from trapetum.kernels.cpu.pool import Pool
from trapetum.progress import Progress
from trapetum.runtime.calibrate import Scratch, Streamed, batches
from trapetum.runtime.finite import unwarned
from trapetum.runtime.layers import Layer
from trapetum.tensors import QuantizedTensor

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource

__all__ = ["divergences"]

Floats = NDArray[np.float32]

_LOGITS = 1 << 22  # of one stream at a time: 16 MiB
_PIECE = 1 << 18


def divergences(
    source: TensorSource,
    changes: Sequence[tuple[int, Sequence[str]]],
    changed: Callable[[str], QuantizedTensor],
    ids: NDArray[np.intp],
    pool: Pool,
    progress: Progress | None = None,
) -> list[float]:
    """Mean KL(model || model with one change) of each change.

    Parameters
    ----------
    source : TensorSource
        A model that can be run; stays open.
    changes : sequence of (int, sequence of str)
        A layer, and the names of its tensors that are replaced together.
    changed : callable
        The other tensor of a name, as the model without any rotation has it; asked when its layer is reached.
    ids : ndarray of intp, shape (sequences, positions)
    pool : Pool
    progress : Progress, optional
        Counts tokens times layers that are run.

    Returns
    -------
    list of float
        Nats a token, in the order of ``changes``; infinite where a change leaves nothing that could be compared.

    Raises
    ------
    RecipeError
        If an id is outside the vocabulary, the sequences are too long for the model, or the model itself gives
        logits that are not finite.
    """
    progress = progress or Progress()
    view = ReplacedTensors(source)
    model = Streamed(view, pool)
    layers = model.config.num_hidden_layers
    runs = layers + sum(layers - layer for layer, _ in changes)
    progress.begin("measure the model", runs * ids.size, "token")
    with Scratch() as scratch, pool.session(), unwarned():  # a change may break the model
        shape = (1 + len(changes), *ids.shape, model.config.hidden_size)
        original, *own = scratch.zeros(shape, np.float32)  # one file, however many changes there are
        model.begin(ids, original)
        streams: dict[int, Floats] = {}
        for number in range(layers):
            begun = [i for i, (layer, _) in enumerate(changes) if layer == number]
            for i in begun:
                view.tensors = {name: changed(name) for name in changes[i][1]}
                streams[i] = own[i]
                _advance(model, model.layer(number), original, streams[i])
                view.tensors = {}
                progress.advance(ids.size)
            layer = model.layer(number)
            for stream in (original, *(s for i, s in streams.items() if i not in begun)):
                _advance(model, layer, stream, stream)
                progress.advance(ids.size)
        found = _compared(model, original, streams)
    progress.end()
    return [found[i] for i in range(len(changes))]


def _advance(model: Streamed, layer: Layer, before: Floats, after: Floats) -> None:
    """Run a layer over all sequences."""
    count, positions = before.shape[:2]
    rotary = model.rotary(0, positions, positions)[layer.rope]
    for cut in batches((count, positions)):
        h = np.array(before[cut])
        layer(h, layer.mixer.new_state(len(h), positions), 0, rotary, model.pool)
        after[cut] = h


def _compared(model: Streamed, original: Floats, streams: Mapping[int, Floats]) -> dict[int, float]:
    """KL of the next-token probabilities at the end of each stream, over all positions."""
    vocab, width = model.real_vocab_size, original.shape[-1]
    rows = original.reshape(-1, width)
    sums = {i: np.empty(len(rows)) for i in streams}
    step = max(1, _LOGITS // vocab)

    def logits(stream: Floats, part: slice) -> Floats:
        found: Floats = model.head_logits(
            model.final_norm(np.array(stream.reshape(-1, width)[part]), model.pool)
        )
        return np.ascontiguousarray(found[:, :vocab])

    for start in range(0, len(rows), step):
        part = slice(start, min(start + step, len(rows)))
        known = _logarithms(logits(original, part), model.pool)
        if not np.isfinite(known).all():
            raise RecipeError(
                "the model itself gives logits that are not finite on the calibration text, so nothing can be held "
                "against them",
                hint="Check the weights for NaN and infinity, or spend the budget without a calibration text.",
            )
        shares = np.exp(known)
        for i, stream in streams.items():
            other, into = _logarithms(logits(stream, part), model.pool), sums[i][part]

            def compare(
                piece: slice,
                other: Floats = other,
                into: NDArray[np.float64] = into,
                known: Floats = known,
                shares: Floats = shares,
            ) -> None:
                lost = known[piece] - other[piece]
                lost *= shares[piece]
                into[piece] = lost.sum(axis=1, dtype=np.float64)

            model.pool.blocks(compare, len(known), _PIECE // vocab)
    means = {i: float(values.mean()) for i, values in sums.items()}
    return {i: max(0.0, mean) if np.isfinite(mean) else np.inf for i, mean in means.items()}


def _logarithms(logits: Floats, pool: Pool) -> Floats:
    """Logarithms of probabilities, in place; float32 is enough: the means here are 100 times its rounding at least."""

    def piece(rows: slice) -> None:
        part = logits[rows]
        part -= part.max(axis=1, keepdims=True)
        part -= np.log(np.exp(part).sum(axis=1, keepdims=True, dtype=np.float64)).astype(np.float32)

    pool.blocks(piece, len(logits), _PIECE // logits.shape[1])
    return logits
