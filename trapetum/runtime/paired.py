"""The original and the model quantized so far, side by side over one text: what each stage of a layer sees in both.

A *stage* is what reads one input of a layer (q, k and v; o; gate and up; down). When its weights are to be stored, all
weights before it are stored already, so its input x' is no longer the x of the original. Three sums say what to do::

    moment    sum of x' x'^T                    where errors of these weights count
    cross     sum of (x - x') x'^T              the best weights for x' are W + W cross (moment + damping)^-1
    drift     sum of (h - h') x'^T              of a stage that ends half a layer; h and h' are the residual streams
                                                after it, its own weights being the original's in both. The weights
                                                that also make up for what earlier halves left in the stream are
                                                W + drift (moment + damping)^-1

The stream of the original and that of the stored model are kept for all tokens. A half layer runs once for each of its
stages on either side, up to the input in question, and once more on the stored side when all its weights are final.

Routed experts have the moment alone: two routers need not choose the same tokens. So has a stage before a norm of its
own output, whose result is not what enters the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.kernels.cpu.pool import Pool
from trapetum.progress import Progress
from trapetum.runtime.calibrate import Key, Scratch, Streamed, batches, mirror
from trapetum.runtime.finite import unwarned
from trapetum.runtime.layers import Layer, Observe

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource

__all__ = ["PairedInputs", "paired_stages"]

Floats = NDArray[np.float32]
_COLUMNS = 256  # of a sum, a piece of work
HALVES = ("mix", "feed")


@dataclass(eq=False)
class PairedInputs:
    """Sums over the tokens of one input; see the module.

    Parameters
    ----------
    weights : tuple of str
        The checkpoint's names of the weights that read it.
    tokens : int
    moment : ndarray of float64, shape (in_features, in_features)
    cross : ndarray of float64, shape (in_features, in_features), optional
    drift : ndarray of float64, shape (hidden_size, in_features), optional
    """

    weights: tuple[str, ...]
    tokens: int
    moment: NDArray[np.float64]
    cross: NDArray[np.float64] | None = None
    drift: NDArray[np.float64] | None = None


class _Seen(Exception):
    """The input in question has been seen; the rest of the half layer is of no interest."""


def paired_stages(
    original: TensorSource,
    stored: TensorSource,
    ids: NDArray[np.intp],
    pool: Pool,
    *,
    wanted: Callable[[tuple[str, ...]], bool],
    progress: Progress | None = None,
) -> Iterator[list[PairedInputs]]:
    """Run both models; yields each stage, whose weights the caller stores before it asks for the next.

    Parameters
    ----------
    original : TensorSource
    stored : TensorSource
        Gives the weights as stored where they are, else those of ``original``; asked anew after each stage.
    ids : ndarray of intp, shape (sequences, positions)
    pool : Pool
    wanted : callable
        Whether sums are needed for the weights that read one input.
    progress : Progress, optional
        Counts tokens, two halves a layer.

    Yields
    ------
    list of PairedInputs
        The inputs of a stage: one, or one an expert. A last stage may be that of the head.

    Raises
    ------
    RecipeError
        If an id is outside the vocabulary, the sequences are too long for the model, or an input is not finite.
    """
    with Scratch() as scratch:
        run = _Paired(original, stored, ids, pool, scratch)
        progress = progress or Progress()
        progress.begin("calibrate and quantize", len(HALVES) * run.layers * ids.size, "token")
        for number in range(run.layers):
            for half in HALVES:
                yield from run.half(number, half, wanted, progress)
        yield from run.head(wanted)
        progress.end()


class _Paired:
    def __init__(
        self,
        original: TensorSource,
        stored: TensorSource,
        ids: NDArray[np.intp],
        pool: Pool,
        scratch: Scratch,
    ) -> None:
        self.model, self.copy = Streamed(original, pool), Streamed(stored, pool)
        self.ids, self.pool = ids, pool
        self.layers = self.model.config.num_hidden_layers
        self.rotary = self.model.rotary(0, ids.shape[1], ids.shape[1])
        shape = (*ids.shape, self.model.config.hidden_size)
        # The streams of the original and of the stored model; the embedding counts as the original's until the end.
        self.streams = [scratch.zeros(shape, np.float32) for _ in range(2)]
        self.model.begin(ids, self.streams[0])
        self.streams[1][...] = self.streams[0]

    def half(
        self, number: int, half: str, wanted: Callable[[tuple[str, ...]], bool], progress: Progress
    ) -> Iterator[list[PairedInputs]]:
        """The stages of half a layer; then both streams are past it."""
        first, inputs = self.model.layer(number), self.model.inputs(number)
        stages = self._order(first, half)
        share = self.ids.size // (len(stages) + 1)
        ended = False
        for part in stages:
            keys = {key: weights for key, weights in inputs.items() if key[0] == part and wanted(weights)}
            if not keys:
                progress.advance(share)
                continue
            last = part == stages[-1]
            with Scratch() as scratch:
                second = self.copy.layer(number)
                yield self._sums(first, second, half, keys, last, scratch, progress, share)
            ended = last
        second = self.copy.layer(number)
        with self.pool.session():
            for cut in batches(self.ids.shape):
                if not ended:
                    self.streams[0][cut] = self._run(first, half, 0, cut)
                self.streams[1][cut] = self._run(second, half, 1, cut)
        progress.advance(self.ids.size - share * len(stages))

    def head(self, wanted: Callable[[tuple[str, ...]], bool]) -> Iterator[list[PairedInputs]]:
        """The stage of a head of its own."""
        for weights in self.model.inputs(None).values():
            if wanted(weights):
                with Scratch() as scratch, self.pool.session():
                    sums = self._empty(weights, scratch, cross=True, drift=0)
                    for cut in batches(self.ids.shape):
                        x, y = (
                            model.final_norm(np.ascontiguousarray(stream[cut]), self.pool).reshape(
                                -1, stream.shape[-1]
                            )
                            for model, stream in zip((self.model, self.copy), self.streams)
                        )
                        self._add(sums, y, x, None)
                    yield [_checked(sums)]

    def _order(self, layer: Layer, half: str) -> list[str]:
        """Parts of half a layer in the order in which they see their inputs."""
        seen: dict[str, None] = {}

        def observe(part: str, x: Floats, /, *, expert: int | None = None) -> None:
            seen[part] = None

        with self.pool.session():
            self._run(layer, half, 0, slice(0, 1), observe)
        return list(seen)

    @unwarned()
    def _run(self, layer: Layer, half: str, side: int, cut: slice, observe: Observe | None = None) -> Floats:
        """Half a layer over some sequences of a stream; what comes out of it."""
        h = np.array(self.streams[side][cut])
        if half == "mix":
            state = layer.mixer.new_state(len(h), h.shape[1])
            layer.mix(h, state, 0, self.rotary[layer.rope], self.pool, observe)
        else:
            layer.feed(h, self.pool, observe)
        return h

    def _empty(self, weights: tuple[str, ...], scratch: Scratch, *, cross: bool, drift: int) -> PairedInputs:
        width = int(self.model.source.shape(weights[0])[-1])
        return PairedInputs(
            weights,
            0,
            scratch.zeros((width, width), np.float64),
            scratch.zeros((width, width), np.float64) if cross else None,
            scratch.zeros((drift, width), np.float64) if drift else None,
        )

    @unwarned()
    def _sums(
        self,
        first: Layer,
        second: Layer,
        half: str,
        keys: dict[Key, tuple[str, ...]],
        last: bool,
        scratch: Scratch,
        progress: Progress,
        share: int,
    ) -> list[PairedInputs]:
        part = next(iter(keys))[0]
        plain = (part, None) in keys and not self._stacked(keys[part, None])
        normed = first.attn_post_norm if half == "mix" else first.ffn_post_norm
        drift = self.streams[0].shape[-1] if plain and last and normed is None else 0
        sums = {
            key: self._empty(weights, scratch, cross=plain and not drift, drift=drift)
            for key, weights in keys.items()
        }
        kept: dict[str, Floats] = {}

        def original(at: str, x: Floats, /, *, expert: int | None = None) -> None:
            if at == part and plain:
                kept["x"] = x.copy()
                if not last:
                    raise _Seen

        def stored(at: str, x: Floats, /, *, expert: int | None = None) -> None:
            found = sums.get((at, expert), sums.get((at, None)))
            if found is None:
                return
            if not drift:
                self._add(found, x, kept.get("x"), None)
            else:
                kept["y"] = x.copy()
            if plain and not last:
                raise _Seen

        with self.pool.session():
            done = 0
            for cut in batches(self.ids.shape):
                a = self._try(first, half, 0, cut, original) if plain or last else None
                b = self._try(second, half, 1, cut, stored)
                if drift and a is not None and b is not None:
                    hidden = a.shape[-1]
                    self._add(next(iter(sums.values())), kept["y"], None, (a - b).reshape(-1, hidden))
                if last and a is not None:
                    self.streams[0][cut] = a
                now = share * cut.stop // len(self.ids)
                progress.advance(now - done)
                done = now
        return [_checked(s) for s in sums.values()]

    def _stacked(self, weights: tuple[str, ...]) -> bool:
        """Whether the weights are those of all experts at once."""
        return any(len(self.model.source.shape(w)) > 2 for w in weights)

    def _try(self, layer: Layer, half: str, side: int, cut: slice, observe: Observe) -> Floats | None:
        try:
            return self._run(layer, half, side, cut, observe)
        except _Seen:
            return None

    @unwarned()
    def _add(self, sums: PairedInputs, y: Floats, x: Floats | None, lost: Floats | None) -> None:
        """Add tokens: inputs ``y`` of the stored model, ``x`` of the original, ``lost`` of the stream."""
        sums.tokens += len(y)
        cross, drift, moment = sums.cross, sums.drift, sums.moment
        change = x - y if cross is not None and x is not None else None

        def piece(columns: slice) -> None:
            moment[columns, : columns.stop] += y[:, columns].T @ y[:, : columns.stop]
            if change is not None and cross is not None:
                cross[columns] += change[:, columns].T @ y
            if lost is not None and drift is not None:
                drift[:, columns] += lost.T @ y[:, columns]

        self.pool.blocks(piece, y.shape[1], _COLUMNS)


@unwarned()
def _checked(sums: PairedInputs) -> PairedInputs:
    mirror(sums.moment)
    found: list[NDArray[Any] | None] = [sums.moment, sums.cross, sums.drift]
    if not all(np.isfinite(a.sum()) for a in found if a is not None):
        raise RecipeError(
            f"{sums.weights[0]}: its inputs are not finite on this text; the model overflows float32",
            hint="Quantize without calibration.",
        )
    return sums
