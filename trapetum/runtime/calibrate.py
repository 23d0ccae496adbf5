"""What the linear layers of a model see: our own forward pass over a text, one layer in memory at a time.

The hidden states of all calibration tokens are kept (in a temporary file where they are large); layer after layer is
built, advanced over all sequences and dropped. On the way its distinct inputs are summed: q, k and v read one, o
another, gate and up a third, down the fourth (``Module.reads``); each routed expert has its own, and so has a head of
its own. Products run in float32 over at most 2,048 tokens and are added in float64. Pieces are cut by shape alone: the
same bits at any thread count.

An expert that was routed few tokens borrows: what it lacks of :data:`ENOUGH` tokens an input is taken from the mean of
its layer's experts.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.architectures import MATRIX_KINDS, Role
from trapetum.models.config import ModelConfig, parse_config
from trapetum.progress import Progress
from trapetum.runtime.blocks import build_layer
from trapetum.runtime.layers import Layer, Observe
from trapetum.runtime.model import Model

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource

__all__ = [
    "CONTEXT",
    "ENOUGH",
    "TOKENS",
    "Inputs",
    "Key",
    "Scratch",
    "Streamed",
    "Sums",
    "batches",
    "calibration_ids",
    "collect",
    "distinct_inputs",
    "layer_inputs",
    "mirror",
]

Floats = NDArray[np.float32]

TOKENS = 131_072
"""Tokens that calibration takes by default: 16 for each of 8,192 inputs."""
CONTEXT = 2048
"""Length of a calibration sequence where the model allows it."""

ENOUGH = 4
"""Tokens for each of its inputs up to which an expert borrows from its layer."""

Key = tuple[str, int | None]
"""The part that ``Observe`` gets, and the expert."""

_IN_MEMORY = 1 << 30  # bytes; what is larger lies in a temporary file
BATCH_TOKENS = 2048
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
    borrowed : int
        Tokens among them that other experts lent.
    """

    weights: tuple[str, ...]
    tokens: int
    squares: NDArray[np.float64]
    moment: NDArray[np.float64] | None = None
    borrowed: int = 0


class Streamed(Model):
    """A model whose layers are built when asked for and not kept.

    Parameters
    ----------
    source : TensorSource
        Stays open.
    pool : Pool
    """

    def __init__(self, source: TensorSource, pool: Pool) -> None:
        super().__init__(source, pool)
        self.weights.expand = True  # one layer at a time always fits

    def _layer(self, number: int) -> Layer:
        return cast(Layer, None)  # none is kept

    def layer(self, number: int) -> Layer:
        """Read one layer."""
        return build_layer(self.weights, number)

    def begin(self, ids: NDArray[np.intp], hidden: Floats) -> None:
        """Check calibration sequences and embed them into ``hidden`` [sequences, positions, hidden_size]."""
        self.check_length(ids.shape[1])
        for sequence in ids:
            self.check_ids(sequence)
        for cut in batches(ids.shape):
            hidden[cut] = self.embedding(ids[cut].reshape(-1)).reshape(*ids[cut].shape, -1)

    def inputs(self, number: int | None) -> dict[Key, tuple[str, ...]]:
        """See :func:`layer_inputs`."""
        return layer_inputs(self.config, self.weights.names, number)


def batches(shape: tuple[int, ...]) -> Iterator[slice]:
    """Sequences that run together, of [sequences, positions]: some 2,048 tokens."""
    step = max(1, BATCH_TOKENS // shape[1])
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))


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
        Length of a sequence, where the model and ``tokens`` allow it.

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

    ctx = min(ctx, parse_config(source.config).max_position_embeddings or ctx, tokens)
    ids = np.array(Tokenizer.from_source(source).encode(text), np.intp)
    if not ids.size:
        raise RecipeError("the calibration text has no token", hint="Name a text of a few hundred kilobytes.")
    if ids.size < ctx:
        return ids[None]
    windows = ids[: ids.size // ctx * ctx].reshape(-1, ctx)
    wanted = tokens // ctx
    if wanted >= len(windows):
        return windows
    return windows[np.arange(wanted) * len(windows) // wanted]


def layer_inputs(
    config: ModelConfig, names: Mapping[Role, str], layer: int | None
) -> dict[Key, tuple[str, ...]]:
    """The distinct inputs of a layer -> names of the weights that read them; of no layer: that of the head.

    A stacked tensor reads what is routed to any of its experts.
    """
    if layer is None:
        head = names.get(Role("head", part="head"))
        return {} if head is None else {("head", None): (head,)}
    found: dict[Key, tuple[str, ...]] = {}
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
        for number in (*range(config.num_hidden_layers), None)
        for weights in layer_inputs(config, names, number).values()
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
        Counts tokens times layers; is told of experts that were routed few tokens.

    Yields
    ------
    Inputs

    Raises
    ------
    RecipeError
        If an id is outside the vocabulary or the sequences are too long for the model.
    """
    progress = progress or Progress()
    model = Streamed(source, pool)
    layers, (count, positions) = model.config.num_hidden_layers, ids.shape
    rotary = model.rotary(0, positions, positions)
    experts, poor = 0, 0
    with Scratch() as room:
        hidden = room.zeros((count, positions, model.config.hidden_size), np.float32)
        model.begin(ids, hidden)
        progress.begin("calibrate", ids.size * layers, "token")
        for number in (*range(layers), None):
            with Scratch() as scratch:
                sums = {
                    key: Sums.zero(source, weights, scratch if moments else None)
                    for key, weights in model.inputs(number).items()
                }
                observe = _observer(sums, pool)
                layer = None if number is None else model.layer(number)
                with pool.session():
                    for cut in batches(ids.shape) if sums else ():
                        part = np.ascontiguousarray(hidden[cut])
                        if layer is None:
                            observe("head", model.final_norm(part, pool).reshape(-1, part.shape[-1]))
                            continue
                        state = layer.mixer.new_state(len(part), positions)
                        layer(part, state, 0, rotary[layer.rope], pool, observe)
                        hidden[cut] = part
                        progress.advance(part.shape[0] * positions)
                del layer
                for inputs in _lent(sums):
                    experts += inputs.borrowed > 0
                    poor += inputs.tokens == inputs.borrowed > 0
                    if inputs.moment is not None:
                        mirror(inputs.moment)
                    yield inputs
    progress.end()
    if experts:
        progress.note(
            f"{experts} inputs of experts saw fewer than {ENOUGH} tokens for each input ({poor} of them none): "
            "what they lack is taken from the other experts of their layer"
        )


class Scratch:
    """Zeroed arrays: in memory while they are small together, then in temporary files that disappear."""

    def __init__(self) -> None:
        self._files = contextlib.ExitStack()
        self._room = _IN_MEMORY

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._files.close()

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """A new array."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if size <= self._room:
            self._room -= size
            return np.zeros(shape, dtype)
        file = self._files.enter_context(tempfile.TemporaryFile(prefix="trapetum-calibrate-"))
        return np.memmap(file, dtype, "w+", shape=shape)


@dataclass
class Sums:
    """Sums of one distinct input while they grow; see :class:`Inputs`."""

    weights: tuple[str, ...]
    squares: NDArray[np.float64]
    moment: NDArray[np.float64] | None
    tokens: int = 0

    @classmethod
    def zero(cls, source: TensorSource, weights: tuple[str, ...], scratch: Scratch | None) -> Self:
        """Of no token yet; with a whole moment where there is room for one."""
        width = int(source.shape(weights[0])[-1])
        return cls(
            weights,
            np.zeros(width),
            None if scratch is None else scratch.zeros((width, width), np.float64),
        )

    def add(self, x: Floats, pool: Pool) -> None:
        """Add float32 [tokens, in_features]; of a moment what lies below its diagonal: :func:`mirror` ends it."""
        self.tokens += len(x)
        if self.moment is None:
            self.squares += np.einsum("ij,ij->j", x, x, dtype=np.float64)
            return
        moment = self.moment

        def piece(columns: slice) -> None:
            moment[columns, : columns.stop] += x[:, columns].T @ x[:, : columns.stop]

        pool.blocks(piece, x.shape[1], _COLUMNS)
        self.squares[:] = moment.diagonal()


def _observer(sums: Mapping[Key, Sums], pool: Pool) -> Observe:
    def observe(part: str, x: Floats, /, *, expert: int | None = None) -> None:
        found = sums.get((part, expert), sums.get((part, None)))
        if found is not None:  # what no quantizable weight reads does not count
            found.add(x, pool)

    return observe


def _lent(sums: Mapping[Key, Sums]) -> Iterator[Inputs]:
    """What was summed; experts of few tokens with what the others lend them.

    Raises
    ------
    RecipeError
        If an input is not finite.
    """
    pools: dict[str, tuple[int, NDArray[np.float64], NDArray[np.float64] | None]] = {}
    for (part, expert), one in sums.items():
        if not np.isfinite(one.squares).all():
            raise RecipeError(
                f"{one.weights[0]}: its inputs are not finite on this text; the model overflows float32",
                hint="Quantize without calibration.",
            )
        if expert is not None:
            tokens, squares, moment = pools.get(part, (0, np.zeros_like(one.squares), None))
            if one.moment is not None:
                moment = np.zeros_like(one.moment) if moment is None else moment
                moment += one.moment
            pools[part] = tokens + one.tokens, squares + one.squares, moment
    for (part, expert), one in sums.items():
        borrowed = 0
        if expert is not None:
            tokens, squares, moment = pools[part]
            borrowed = min(tokens, max(0, ENOUGH * len(squares) - one.tokens))
            if borrowed:
                one.squares += squares * (borrowed / tokens)
                if one.moment is not None and moment is not None:
                    one.moment += moment * (borrowed / tokens)
        yield Inputs(one.weights, one.tokens + borrowed, one.squares, one.moment, borrowed)


def mirror(moment: NDArray[np.float64]) -> None:
    """Copy what lies below the diagonal above it."""
    for start in range(0, len(moment), _COLUMNS):
        rows = slice(start, start + _COLUMNS)
        block = moment[rows, rows]
        block[...] = np.tril(block) + np.tril(block, -1).T
        moment[:start, rows] = moment[rows, :start].T
