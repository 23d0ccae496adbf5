"""A model that can be run: weights from any source, the forward pass, logits and generation.

Everything is float32. A matrix keeps the layout that it is stored in (see ``runtime.matrix``); dense
matrices are widened to float32 when the whole model stays below 2 GiB in that form, and tile by tile otherwise
(``runtime.weights``). The prompt runs in blocks of positions whose widest activation stays near 4 MiB; logits are
computed only where asked for. Results have the same bits at any thread count (see ``kernels.cpu.pool``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import KernelUnavailable, RecipeError, UnsupportedModelError, located
from trapetum.formats.decoded import rotation_of
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.config import ModelConfig, parse_config
from trapetum.models.rope import Rope
from trapetum.runtime.attention import CACHE_TYPES, Cache, rotary_tables
from trapetum.runtime.blocks import build_layer
from trapetum.runtime.finite import check_logits
from trapetum.runtime.layers import Head, Layer, Rotary
from trapetum.runtime.sampling import Sampling
from trapetum.runtime.weights import Weights

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource
    from trapetum.runtime.tokenizer import Tokenizer

__all__ = ["DEVICES", "Model", "check_device", "load", "model_of"]

Floats = NDArray[np.float32]

# Elements of the widest activation of one block: 4 MiB. With 16 MiB the allocator gave them back to the system each
# time, and page faults took 13 % of the time of books-18m (8369 tokens, one Zen1 core: 5.43 s, with 4 MiB 4.93 s).
_ACTIVATIONS = 1 << 20
DEVICES = ("cpu", "cuda")
_LOGITS = 16 << 20  # elements of one block of logits inside the library


def load(
    path: str | Path,
    device: str = "cpu",
    threads: int | None = None,
    precision: str = "exact",
    cache_type: str = "f32",
    experts: str = "card",
) -> Model:
    """Load any supported model for inference.

    Parameters
    ----------
    path : path-like
        Hugging Face folder, artifact, ``.cbk``, GGUF or planes.
    device : str
        ``cpu`` or ``cuda`` (``runtime.cuda``).
    threads : int, optional
        All CPUs of the process when omitted; the numbers do not depend on it.
    precision : str
        ``exact`` gives the numbers of the decoded model in float32; ``precise`` and ``fast`` round activations
        to integers where few tokens are multiplied: see ``runtime.matrix``.
    cache_type : str
        How attention keeps keys and values: ``f32``, or ``f16`` in half the memory. On the card always ``f16``.
    experts : str
        Where routed experts run if the device is ``cuda``: ``card`` or ``cpu``.

    Raises
    ------
    KernelUnavailable
        For another device, or if there is no card or no kernel for a part of the model.
    RecipeError
        If the precision or the cache type is unknown.
    CheckpointError, FormatError, UnsupportedModelError
        If the model cannot be read or run.
    """
    check_device(device)
    if experts not in ("card", "cpu"):
        raise RecipeError(f"experts is {experts!r}; card and cpu are allowed")
    pool = Pool(threads)
    from trapetum.formats.source import open_source

    source = open_source(path)
    try:
        return model_of(source, pool, device, precision, cache_type, experts)
    except BaseException:
        source.close()
        raise


def check_device(device: str) -> None:
    """Refuse a device that is unknown or not there, before anything is read.

    Raises
    ------
    KernelUnavailable
    """
    if device not in DEVICES:
        raise KernelUnavailable(f"device is {device!r}; {', '.join(DEVICES)} are known")
    if device == "cuda":
        from trapetum.kernels.cuda.module import import_cupy

        import_cupy()


def model_of(
    source: TensorSource,
    pool: Pool,
    device: str = "cpu",
    precision: str = "exact",
    cache_type: str = "f32",
    experts: str = "card",
) -> Model:
    """As :func:`load`, of an open source, which stays the caller's when this raises."""
    if device == "cuda":
        from trapetum.runtime.cuda.model import CardModel

        return CardModel(source, pool, experts)
    return Model(source, pool, precision, cache_type)


class Model:
    """A loaded model.

    Parameters
    ----------
    source : TensorSource
        Stays open as long as the model: weights that are not widened are read from its pages.
    pool : Pool, optional
    precision, cache_type : str
        See :func:`load`.

    Attributes
    ----------
    config : ModelConfig
    vocab_size : int
        Columns of the logits.
    vocabulary : int
        Rows of the embedding.
    real_vocab_size : int
        Without the rows that pad the vocabulary of a ``.cbk``; sampling and evaluation look no further.

    Raises
    ------
    CheckpointError
        If tensors are missing or have another shape than the config says.
    UnsupportedModelError
        If the weights are in a packed format that must be imported first.
    """

    def __init__(
        self,
        source: TensorSource,
        pool: Pool | None = None,
        precision: str = "exact",
        cache_type: str = "f32",
    ) -> None:
        if cache_type not in CACHE_TYPES:
            raise RecipeError(f"cache type is {cache_type!r}; {', '.join(CACHE_TYPES)} are allowed")
        packed = getattr(source, "packed_format", lambda: None)()
        if packed is not None:
            raise UnsupportedModelError(
                f"{source.path}: the weights are packed as {packed}, which cannot be run directly"
            )
        self.source = source
        self.pool = pool or Pool()
        self.precision = precision
        with located(source.path):
            self.config: ModelConfig = parse_config(source.config)
            shapes = {name: tuple(source.shape(name)) for name in source.names()}
            self.config.architecture.check_tensors(self.config, shapes)
        self._kept_frequencies: dict[Rope, tuple[int, Floats]] = {}
        self.weights = Weights(source, self.config, self.pool, precision, cache_type)
        self._build()

    def _build(self) -> None:
        """Load the weights."""
        self.embed = self.weights.matrix("embed")
        self._embed_rotation = rotation_of(self.source, self.weights.place("embed").name)
        self.head = self._head()
        self.layers = [self._layer(i) for i in range(self.config.num_hidden_layers)]
        self.final_norm = self.weights.norm("final_norm")
        self.vocab_size = self.head.matrix.rows
        self.vocabulary = self.embed.rows

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the source and end the threads; the model cannot be used afterwards."""
        self.pool.close()
        self.source.close()

    def _head(self) -> Head:
        if self.weights.find("head") is None:
            return Head(self.embed, None, self._embed_rotation, self.config.logit_softcap)
        head = self.weights.linear("head")
        return Head(head.matrix, head.bias, head.rotation, self.config.logit_softcap)

    def _layer(self, number: int) -> Layer:
        return build_layer(self.weights, number)

    def embedding(self, ids: NDArray[np.intp]) -> Floats:
        """Embedded tokens, float32 [len(ids), hidden_size]; the rows of a rotated embedding are turned back."""
        found = self.embed.look_up(ids)
        if self._embed_rotation is not None:
            found = self._embed_rotation.unfold(found)
        scale = self.config.embedding_scale
        return found if scale == 1.0 else found * np.float32(scale)

    def rotary(self, start: int, stop: int, length: int) -> dict[Rope | None, Rotary | None]:
        """Rotary tables of positions ``start .. stop - 1`` for each kind of layer.

        Parameters
        ----------
        start, stop : int
        length : int
            Of the whole text so far, which some rotary types depend on.
        """
        tables: dict[Rope | None, Rotary | None] = {None: None}
        for rope in self._ropes:
            tables[rope] = rotary_tables(self._inverse_frequencies(rope, length), start, stop, rope.magnitude)
        return tables

    @cached_property
    def _ropes(self) -> tuple[Rope, ...]:
        """The different ones, in the order of layers."""
        return tuple(dict.fromkeys(r for r in self.config.ropes if r is not None))

    def _inverse_frequencies(self, rope: Rope, length: int) -> Floats:
        """Inverse frequencies for a text of a length; kept until another length needs others."""
        regime = rope.regime(length)
        kept = self._kept_frequencies.get(rope)
        if kept is None or kept[0] != regime:
            kept = regime, rope.inverse_frequencies(self.config.rotary_dim, length)
            self._kept_frequencies[rope] = kept
        return kept[1]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer, read on first use.

        Raises
        ------
        CheckpointError
            If there is no tokenizer.json.
        """
        from trapetum.runtime.tokenizer import Tokenizer

        return Tokenizer.from_source(self.source)

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: generation_config.json where it lies beside the weights, else config.json."""
        from trapetum.runtime.tokenizer import generation_eos

        return generation_eos(self.source) or self.config.eos_token_ids

    @cached_property
    def real_vocab_size(self) -> int:
        """``vocab_size`` less the all-zero rows at the end of a ``.cbk``'s embedding.

        That format pads the vocabulary and does not say by how much; a padded row's logit is exactly 0,
        which can beat every real one.
        """
        stop = self.vocab_size
        while self.source.kind == "cbk" and stop > 1 and not self._embedding_row(stop - 1).any():
            stop -= 1
        return stop

    def _embedding_row(self, token: int) -> Floats:
        return self.embed.look_up(np.array([token]))

    @property
    def block_positions(self) -> int:
        """Positions (batch x length) that one pass through the layers takes."""
        widest = max(self.config.dimensions[d] for d in ("intermediate", "hidden", "query"))
        return max(512, min(2048, _ACTIVATIONS // widest))

    def logits(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> Floats:
        """Logits after every position.

        Parameters
        ----------
        ids : sequence of int
            Token ids, at least one.

        Returns
        -------
        ndarray of float32, shape (len(ids), vocab_size)

        Raises
        ------
        RecipeError
            If ``ids`` is empty, too long for the model, or holds an id outside the vocabulary.
        """
        checked = self.check_ids(ids)
        with self.pool.session():
            hidden = self.hidden(checked[None])[0]
            return self.head_logits(hidden)

    def head_logits(self, hidden: Floats) -> Floats:
        """Logits float32 [tokens, vocab_size] of what :meth:`hidden` gives."""
        return self.head(hidden)

    def check_ids(self, ids: Sequence[int] | NDArray[np.integer[Any]]) -> NDArray[np.intp]:
        """Token ids as an array; see :meth:`logits` for the errors."""
        array = np.asarray(ids)
        if array.size == 0:
            raise RecipeError("there are no token ids: one sequence of at least one id is needed")
        if array.ndim != 1:
            raise RecipeError(f"token ids have the shape {list(array.shape)}; one sequence of ids is needed")
        if array.dtype.kind not in "iu":
            raise RecipeError(f"token ids are {array.dtype}; integers are needed")
        limit = self.vocabulary
        bad = np.flatnonzero((array < 0) | (array >= limit))
        if bad.size:
            raise RecipeError(
                f"token id {int(array[bad[0]])} at position {int(bad[0])} is outside the vocabulary of {limit}",
                hint="the text was encoded with another model's tokenizer",
            )
        self.check_length(array.size)
        return array.astype(np.intp)

    def check_length(self, length: int, remedy: str = "Shorten the text.") -> None:
        """Raise ``RecipeError`` if the model cannot take ``length`` positions; ``remedy`` is the hint."""
        limit = self.config.max_length
        if limit is not None and length > limit:
            raise RecipeError(f"{length} tokens do not fit in the model's context of {limit}", hint=remedy)

    def new_cache(self, batch: int, capacity: int) -> Cache:
        """An empty cache for ``batch`` sequences."""
        return Cache([layer.mixer.new_state(batch, capacity) for layer in self.layers])

    def hidden(self, ids: NDArray[np.intp], cache: Cache | None = None, *, last: bool = False) -> Floats:
        """Run the layers; call inside ``pool.session()``.

        Parameters
        ----------
        ids : ndarray of intp, shape (batch, positions)
            Checked ids; sequences continue what ``cache`` holds.
        cache : Cache, optional
            Extended by these positions.
        last : bool
            Return only the last position of each sequence.

        Returns
        -------
        ndarray of float32, shape (batch, positions or 1, hidden_size)
            After the final norm: what the head multiplies.
        """
        batch, positions = ids.shape
        cache = cache or self.new_cache(batch, positions)
        length = cache.length + positions
        step = max(1, self.block_positions // batch)
        out = np.empty((batch, 1 if last else positions, self.config.hidden_size), np.float32)
        for start in range(0, positions, step):
            block = ids[:, start : start + step]
            h = self.embedding(block.reshape(-1)).reshape(batch, block.shape[1], -1)
            rotary = self.rotary(cache.length, cache.length + block.shape[1], length)
            for layer, state in zip(self.layers, cache.states):
                layer(h, state, cache.length, rotary[layer.rope], self.pool)
            cache.length += block.shape[1]
            if last:
                out[:] = h[:, -1:]
            else:
                out[:, start : start + block.shape[1]] = h
        return self.final_norm(out, self.pool)

    def _regime(self, length: int) -> tuple[int, ...]:
        """What decides whether keys stay valid as a text grows; of dynamic scaling they do, as in transformers."""
        return tuple(rope.regime(length) for rope in self._ropes if rope.type == "longrope")

    def each_logits(self, hidden: Floats, use: Callable[[slice, Floats], object]) -> None:
        """Logits of many positions, a bounded block at a time.

        Parameters
        ----------
        hidden : ndarray of float32, shape (positions, hidden_size)
        use : callable
            Receives the positions of the block and its logits [block, vocab_size].
        """
        step = max(1, _LOGITS // self.vocab_size)
        for start in range(0, hidden.shape[0], step):
            rows = slice(start, min(start + step, hidden.shape[0]))
            use(rows, self.head_logits(hidden[rows]))

    def generate(
        self,
        ids: Sequence[int],
        n: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
        stop_ids: Iterable[int] | None = None,
        stop: Sequence[str] = (),
        on_token: Callable[[int, str], object] | None = None,
    ) -> list[int]:
        """Continue a prompt.

        Parameters
        ----------
        ids : sequence of int
            The prompt.
        n : int
            Most new tokens.
        temperature, top_p, top_k, seed
            See :class:`~trapetum.runtime.sampling.Sampling`; temperature 0 is greedy.
        stop_ids : iterable of int, optional
            End at one of these (it is not returned); the model's own end tokens when omitted.
        stop : sequence of str
            End when the new text holds one of these; needs a tokenizer.
        on_token : callable, optional
            Called with each new id and the text that it completes (empty without a tokenizer, or while a
            character or a possible stop string is incomplete). The last call may have id -1: left-over text.

        Returns
        -------
        list of int
            The new ids; with a stop string, up to and including the token that completed it.

        Raises
        ------
        RecipeError
            See :meth:`logits`; also if the prompt and ``n`` new tokens exceed the context.
        CheckpointError
            If logits are not finite.
        """
        from trapetum.runtime.tokenizer import TextStream

        sampling = Sampling(temperature, top_k or 0, top_p)
        prompt = self.check_ids(ids)
        if n < 0:
            raise RecipeError(f"n is {n}; 0 or more new tokens can be asked for")
        self.check_length(prompt.size + n, "Shorten the prompt, or ask for fewer new tokens.")
        ends = set(self.eos_token_ids if stop_ids is None else stop_ids)
        has_tokenizer = self.source.tokenizer_file() is not None
        stream = TextStream(self.tokenizer, stop) if stop or (on_token and has_tokenizer) else None
        new: list[int] = []
        for token in self._tokens(prompt, n, sampling, seed):
            if token in ends:
                break
            new.append(token)
            text = stream.push(token) if stream else ""
            if on_token:
                on_token(token, text)
            if stream and stream.stopped:
                return new
        if stream and on_token and (rest := stream.finish()):
            on_token(-1, rest)
        return new

    def _tokens(self, prompt: NDArray[np.intp], n: int, sampling: Sampling, seed: int) -> Iterator[int]:
        """Up to ``n`` tokens after a prompt, whatever they are."""
        from trapetum.runtime.step import build_step

        rng = np.random.default_rng(seed)
        cache = self.new_cache(1, prompt.size + n)
        new: list[int] = []
        with self.pool.session():
            pending = prompt
            step = build_step(self, cache) if self.precision != "exact" else None
            while len(new) < n:
                if new and self._regime(cache.length) != self._regime(cache.length + 1):
                    # Longer texts have other frequencies: what the cache holds was rotated by the old ones.
                    pending, step = np.array([*prompt, *new], np.intp), None
                    cache = self.new_cache(1, prompt.size + n)
                if step is not None and new:
                    logits = step(new[-1])
                else:
                    logits = self.head(self.hidden(pending[None], cache, last=True)[0])[0]
                logits = logits[: self.real_vocab_size]
                check_logits(logits, self.source.path, prompt.size + len(new) - 1)
                new.append(sampling.choose(logits, rng))
                yield new[-1]
                pending = np.array([new[-1]], np.intp)
