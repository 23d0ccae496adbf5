"""What the linear layers of a model see: our own forward pass over a text, one layer in memory at a time.

The hidden states of all calibration tokens are kept (in a temporary file where they are large); layer after layer is
built, advanced over all sequences and dropped. On the way its distinct inputs are summed: q, k and v read one, o
another, gate and up a third, down the fourth (``Module.reads``); each routed expert has its own. Products run in
float32 over at most 2,048 tokens and are added in float64. Pieces are cut by shape alone: the same bits at any thread
count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.architectures import MATRIX_KINDS, Role
from trapetum.models.config import ModelConfig, parse_config
from trapetum.progress import Progress
from trapetum.runtime.layers import Layer, Observe
from trapetum.runtime.model import Model

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource

__all__ = ["CONTEXT", "TOKENS", "Inputs", "calibration_ids", "collect", "distinct_inputs"]

Floats = NDArray[np.float32]

TOKENS = 131_072
"""Tokens that calibration takes by default: 16 for each of 8,192 inputs."""
CONTEXT = 2048
"""Length of a calibration sequence where the model allows it."""

_IN_MEMORY = 1 << 30  # bytes of hidden states; above them a temporary file holds them
_BATCH_TOKENS = 2048
_COLUMNS = 256  # of a moment, a piece of work


@dataclass(frozen=True, eq=False)
class Inputs:
    """Sums over the tokens of one distinct input.

    Parameters
    ----------
    weights : tuple of str
        The checkpoint's names of the weights that read it.
    tokens : int
    squares : ndarray of float64, shape (in_features,)
        Sum of squares.
    moment : ndarray of float64, shape (in_features, in_features), optional
        Sum of ``x x^T``.
    """

    weights: tuple[str, ...]
    tokens: int
    squares: NDArray[np.float64]
    moment: NDArray[np.float64] | None = None


class _Streamed(Model):
    """A model whose layers are built when asked for and not kept."""

    def __init__(self, source: TensorSource, pool: Pool) -> None:
        self._ready = False
        super().__init__(source, pool)
        self._ready = True
        self.weights.expand = True  # one layer at a time always fits

    def _layer(self, number: int) -> Layer:
        return super()._layer(number) if self._ready else cast(Layer, None)

    def layer(self, number: int) -> Layer:
        """Read one layer."""
        return self._layer(number)


def calibration_ids(
    source: TensorSource, text: str, tokens: int = TOKENS, ctx: int = CONTEXT
) -> NDArray[np.intp]:
    """Equally long sequences from a text.

    Parameters
    ----------
    source : TensorSource
        With a tokenizer.
    text : str
    tokens : int
        Most tokens to take.
    ctx : int
        Length of a sequence, where the model allows it.

    Returns
    -------
    ndarray of intp, shape (sequences, ctx)
        Spread evenly over the text where it is longer than asked for; one shorter sequence where it is shorter
        than ``ctx``.

    Raises
    ------
    RecipeError
        If the text has no token.
    """
    from trapetum.runtime.tokenizer import Tokenizer

    ctx = min(ctx, parse_config(source.config).max_position_embeddings or ctx)
    ids = np.array(Tokenizer.from_source(source).encode(text), np.intp)
    if not ids.size:
        raise RecipeError("the calibration text has no token", hint="Name a text of a few hundred kilobytes.")
    if ids.size < ctx:
        return ids[None]
    windows = ids[: ids.size // ctx * ctx].reshape(-1, ctx)
    wanted = max(1, tokens // ctx)
    if wanted >= len(windows):
        return windows
    return windows[np.arange(wanted) * len(windows) // wanted]


_Key = tuple[str, int | None]  # the part that ``Observe`` gets, and the expert


def _layer_inputs(config: ModelConfig, names: Mapping[Role, str], layer: int) -> dict[_Key, tuple[str, ...]]:
    """The distinct inputs of a layer -> names of the weights that read them.

    A stacked tensor reads what is routed to any of its experts.
    """
    found: dict[_Key, tuple[str, ...]] = {}
    for module, at, expert in config.architecture.settled(names.values()).places(config):
        name = names.get(Role(module.kind, at, expert, module.part))
        if at == layer and name is not None and module.kind in MATRIX_KINDS:
            key = (module.input, expert)
            found[key] = (*found.get(key, ()), name)
    return found


def distinct_inputs(source: TensorSource) -> list[tuple[tuple[str, ...], int]]:
    """(weights, in_features) of every distinct input of a model, in the order of :func:`collect`."""
    config = parse_config(source.config)
    names = config.architecture.index(source.names())
    return [
        (weights, int(source.shape(weights[0])[-1]))
        for number in range(config.num_hidden_layers)
        for weights in _layer_inputs(config, names, number).values()
    ]


def collect(
    source: TensorSource,
    ids: NDArray[np.intp],
    pool: Pool,
    *,
    moments: bool = False,
    progress: Progress | None = None,
) -> Iterator[Inputs]:
    """Run the layers over calibration sequences; yields every distinct input, layer by layer.

    Parameters
    ----------
    source : TensorSource
        A model that can be run; stays open.
    ids : ndarray of intp, shape (sequences, positions)
    pool : Pool
    moments : bool
        Sum whole second moments, not only their diagonals: ``in_features`` multiplications a value more.
    progress : Progress, optional
        Counts tokens times layers.

    Yields
    ------
    Inputs

    Raises
    ------
    RecipeError
        If an id is outside the vocabulary or the sequences are too long for the model.
    """
    progress = progress or Progress()
    model = _Streamed(source, pool)
    model.check_length(ids.shape[1])
    for sequence in ids:
        model.check_ids(sequence)
    layers, (count, positions) = model.config.num_hidden_layers, ids.shape
    rotary = model.rotary(0, positions, positions)
    step = max(1, _BATCH_TOKENS // positions)
    progress.begin("calibrate", ids.size * layers, "token")
    with _States((count, positions, model.config.hidden_size)) as hidden:
        for start in range(0, count, step):
            batch = ids[start : start + step]
            hidden[start : start + step] = model.embedding(batch.reshape(-1)).reshape(*batch.shape, -1)
        for number in range(layers):
            layer = model.layer(number)
            sums = {
                key: _empty(source, weights, moments)
                for key, weights in _layer_inputs(model.config, model.weights.names, number).items()
            }
            observe = _observer(sums, pool)
            with pool.session():
                for start in range(0, count, step):
                    part = np.ascontiguousarray(hidden[start : start + step])
                    state = layer.mixer.new_state(len(part), positions)
                    layer(part, state, 0, rotary[layer.rope], pool, observe)
                    hidden[start : start + step] = part
                    progress.advance(len(part) * positions)
            del layer
            for counted in sums.values():
                inputs = counted.inputs()
                if not np.isfinite(inputs.squares).all():
                    raise RecipeError(
                        f"{inputs.weights[0]}: its inputs are not finite on this text; the model overflows float32",
                        hint="Quantize without calibration.",
                    )
                if inputs.moment is not None:
                    _mirror(inputs.moment)
                yield inputs
    progress.end()


class _States:
    """Hidden states of all tokens: in memory, or in a temporary file that disappears."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape

    def __enter__(self) -> Floats:
        if 4 * int(np.prod(self._shape)) <= _IN_MEMORY:
            return np.empty(self._shape, np.float32)
        self._file = tempfile.TemporaryFile(prefix="trapetum-calibrate-")
        return np.memmap(self._file, np.float32, "w+", shape=self._shape)

    def __exit__(self, *exc: object) -> None:
        if hasattr(self, "_file"):
            self._file.close()


@dataclass
class _Sums:
    """Sums of one distinct input while they grow; see :class:`Inputs`."""

    weights: tuple[str, ...]
    squares: NDArray[np.float64]
    moment: NDArray[np.float64] | None
    tokens: int = 0

    def inputs(self) -> Inputs:
        return Inputs(self.weights, self.tokens, self.squares, self.moment)


def _empty(source: TensorSource, weights: tuple[str, ...], moments: bool) -> _Sums:
    width = int(source.shape(weights[0])[-1])
    return _Sums(weights, np.zeros(width), np.zeros((width, width)) if moments else None)


def _observer(sums: dict[_Key, _Sums], pool: Pool) -> Observe:
    def observe(part: str, x: Floats, /, *, expert: int | None = None) -> None:
        found = sums.get((part, expert))
        sum_ = sums[part, None] if found is None else found
        sum_.tokens += len(x)
        if sum_.moment is None:
            sum_.squares[:] += np.einsum("ij,ij->j", x, x, dtype=np.float64)
            return
        moment = sum_.moment

        def piece(columns: slice) -> None:  # the lower triangle, by blocks of rows
            moment[columns, : columns.stop] += x[:, columns].T @ x[:, : columns.stop]

        pool.blocks(piece, x.shape[1], _COLUMNS)
        sum_.squares[:] = moment.diagonal()

    return observe


def _mirror(moment: NDArray[np.float64]) -> None:
    """Copy what lies below the diagonal above it."""
    for start in range(0, len(moment), _COLUMNS):
        rows = slice(start, start + _COLUMNS)
        block = moment[rows, rows]
        block[...] = np.tril(block) + np.tril(block, -1).T
        moment[:start, rows] = moment[rows, :start].T
