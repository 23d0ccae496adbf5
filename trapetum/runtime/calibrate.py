"""What the linear layers of a model see: our own forward pass over a text, one layer in memory at a time.

The hidden states of all calibration tokens are kept (in a temporary file where they are large); layer after layer is
built, advanced over all sequences and dropped. On the way the inputs of its four distinct inputs are summed: q, k and
v read one, o another, gate and up a third, down the fourth. Products run in float32 over at most 2,048 tokens and are
added in float64. Pieces are cut by shape alone: the same bits at any thread count.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.formats.decoded import rotation_of
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.architectures import Role
from trapetum.models.config import parse_config
from trapetum.progress import Progress
from trapetum.runtime.attention import Cache, rotary_tables
from trapetum.runtime.layers import Layer
from trapetum.runtime.model import Model

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource

__all__ = ["CONTEXT", "INPUTS", "TOKENS", "Inputs", "calibration_ids", "collect", "distinct_inputs"]

Floats = NDArray[np.float32]

TOKENS = 131_072
"""Tokens that calibration takes by default: 16 for each of 8,192 inputs."""
CONTEXT = 2048
"""Length of a calibration sequence where the model allows it."""

INPUTS: dict[str, tuple[str, ...]] = {
    "q": ("q", "k", "v"),
    "o": ("o",),
    "gate": ("gate", "up"),
    "down": ("down",),
}
"""The distinct inputs of a layer: the name that ``Layer`` observes them by -> the parts that read them."""

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
        self._expand = True  # one layer at a time always fits

    def _layer(self, number: int) -> Layer:
        return super()._layer(number) if self._ready else cast(Layer, None)

    def layer(self, number: int) -> Layer:
        """Read one layer."""
        return self._layer(number)

    def weights(self, number: int, parts: tuple[str, ...]) -> tuple[str, ...]:
        """The checkpoint's names of parts of a layer."""
        return tuple(self._names[Role(part, number, part=part)] for part in parts)

    def start(self, ids: NDArray[np.intp]) -> Floats:
        """Embedded tokens, float32 [len(ids), hidden]."""
        found = self.embed.look_up(ids)
        rotation = rotation_of(self.source, self._names[Role("embed", part="embed")])
        return found if rotation is None else rotation.unfold(found)


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


def distinct_inputs(source: TensorSource) -> list[tuple[tuple[str, ...], int]]:
    """(weights, in_features) of every distinct input of a model, in the order of :func:`collect`."""
    config = parse_config(source.config)
    names = config.architecture.index(source.names())
    found = []
    for number in range(config.num_hidden_layers):
        for parts in INPUTS.values():
            weights = tuple(names[Role(part, number, part=part)] for part in parts)
            found.append((weights, int(source.shape(weights[0])[-1])))
    return found


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
    rotary = rotary_tables(model.config.rope.inverse_frequencies(model.config.head_dim), 0, positions)
    step = max(1, _BATCH_TOKENS // positions)
    progress.begin("calibrate", ids.size * layers, "token")
    with _States((count, positions, model.config.hidden_size)) as hidden:
        for start in range(0, count, step):
            batch = ids[start : start + step]
            hidden[start : start + step] = model.start(batch.reshape(-1)).reshape(*batch.shape, -1)
        for number in range(layers):
            layer = model.layer(number)
            sums = {
                key: Inputs(
                    model.weights(number, parts),
                    ids.size,
                    np.zeros(getattr(layer, key).matrix.in_features),
                    np.zeros((getattr(layer, key).matrix.in_features,) * 2) if moments else None,
                )
                for key, parts in INPUTS.items()
            }
            observe = _observer(sums, pool)
            with pool.session():
                for start in range(0, count, step):
                    part = np.ascontiguousarray(hidden[start : start + step])
                    config = model.config
                    cache = Cache(1, len(part), config.num_key_value_heads, config.head_dim, positions)
                    layer(part, 0, rotary, cache, pool, observe)
                    hidden[start : start + step] = part
                    progress.advance(len(part) * positions)
            del layer
            for inputs in sums.values():
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


def _observer(sums: dict[str, Inputs], pool: Pool) -> Callable[[str, Floats], None]:
    def observe(key: str, x: Floats) -> None:
        inputs = sums[key]
        if inputs.moment is None:
            inputs.squares[:] += np.einsum("ij,ij->j", x, x, dtype=np.float64)
            return
        moment = inputs.moment

        def piece(columns: slice) -> None:  # the lower triangle, by blocks of rows
            moment[columns, : columns.stop] += x[:, columns].T @ x[:, : columns.stop]

        pool.blocks(piece, x.shape[1], _COLUMNS)
        inputs.squares[:] = moment.diagonal()

    return observe


def _mirror(moment: NDArray[np.float64]) -> None:
    """Copy what lies below the diagonal above it."""
    for start in range(0, len(moment), _COLUMNS):
        rows = slice(start, start + _COLUMNS)
        block = moment[rows, rows]
        block[...] = np.tril(block) + np.tril(block, -1).T
        moment[:start, rows] = moment[rows, :start].T
