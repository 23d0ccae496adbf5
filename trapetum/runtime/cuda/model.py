"""A model on the card: prompts through tensor cores, each further token one replay of a CUDA graph.

A graph holds every launch of a step for one number of sequences, from the look-up of the ids that the step before chose
to the choice of the next ones; ids, positions and random numbers are read from device memory, so the host only says
"again". Two steps are in flight: the host reads a token while the next is computed.

Numbers: float16 activations and cache, float32 sums and residual stream; ternary weights meet 8-bit activations. Greedy
tokens equal those of the CPU but for ternary models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.kernels.cuda.module import import_cupy
from trapetum.kernels.cuda.workspace import Workspace
from trapetum.runtime.cuda.layers import (
    Buffers,
    CardLayer,
    KeyValueCache,
    Pass,
    build_card_layer,
    launch,
)
from trapetum.runtime.cuda.products import build_product
from trapetum.runtime.cuda.support import NORM_THREADS, card_memory, check_support
from trapetum.runtime.model import Model
from trapetum.runtime.sampling import Sampling

if TYPE_CHECKING:
    from trapetum.formats.source import TensorSource
    from trapetum.kernels.cpu.pool import Pool
    from trapetum.models.rope import Rope

__all__ = ["CardModel", "Session"]

Floats = NDArray[np.float32]

_PROMPT_BLOCK = 1024  # positions that pass the layers at once
_FEWER_BITS = (
    "Quantize to fewer bits, or use --device cpu; routed experts can stay in the machine's (--experts cpu)."
)
_SHORTER = "Give a shorter text, or use --device cpu."


class CardModel(Model):
    """A loaded model on the card; see :class:`~trapetum.runtime.model.Model`.

    Parameters
    ----------
    source : TensorSource
    pool : Pool
        For what stays on the CPU.
    experts : str
        ``card`` or ``cpu``: where routed experts run.

    Raises
    ------
    KernelUnavailable
        If there is no card, or a part of the model has no kernels.
    """

    def __init__(self, source: TensorSource, pool: Pool, experts: str = "card") -> None:
        import_cupy()
        self._experts = experts
        super().__init__(source, pool, "fast")

    def _build(self) -> None:
        check_support(self.weights, self._experts)
        with card_memory(self.source.path, "the weights", _FEWER_BITS):
            self._load()

    def _load(self) -> None:
        cupy = import_cupy()
        config, weights = self.config, self.weights
        self.stream = cupy.cuda.Stream(non_blocking=True)
        with self.stream:
            self._workspace = Workspace()
            self._table = build_product(weights, ("embed",), None, self._workspace)
            self._output = self._table
            if weights.find("head") is not None:
                self._output = build_product(weights, ("head",), None, self._workspace)
            self._on_card: dict[Rope, Any] = {}
            for rope in config.ropes:
                if rope is not None and rope not in self._on_card:
                    self._on_card[rope] = cupy.asarray(rope.inverse_frequencies(config.rotary_dim))
            self._regimes = {rope: rope.regime(0) for rope in self._on_card}
            self.card_layers: list[CardLayer] = [
                build_card_layer(
                    weights,
                    i,
                    self._workspace,
                    None if (rope := config.ropes[i]) is None else self._on_card[rope],
                )
                for i in range(config.num_hidden_layers)
            ]
            self._norm = cupy.asarray(weights.norm("final_norm").weight)
        self.vocab_size = self._output.rows
        self.vocabulary = self._table.rows
        self.stream.synchronize()

    @property
    def nbytes(self) -> int:
        """Bytes of weights that one decode step reads."""
        products = [p for layer in self.card_layers for p in layer.products]
        return self._output.nbytes + sum(p.nbytes for p in products)

    def _embedding_row(self, token: int) -> Floats:
        cupy = import_cupy()
        with self.stream:
            out = cupy.empty((1, self._table.in_features), cupy.float32)
            self._table.take(cupy.asarray([token], cupy.int32), out)
            found: Floats = cupy.asnumpy(out)
        return found

    def hidden(self, ids: NDArray[np.intp], cache: Any = None, *, last: bool = False) -> Floats:
        """See :meth:`Model.hidden`; every sequence starts anew."""
        if cache is not None:
            raise ValueError("the card keeps its own cache")
        with card_memory(self.source.path, f"{ids.shape[1]} positions", _SHORTER):
            return self._hidden(ids, last)

    def _hidden(self, ids: NDArray[np.intp], last: bool) -> Floats:
        cupy = import_cupy()
        batch, positions = ids.shape
        out = np.empty((batch, 1 if last else positions, self.config.hidden_size), np.float32)
        session = Session(self, 1, positions, 0)
        with self.stream:
            self.set_length(positions)
            for number in range(batch):
                blocks = []
                for x in session.prompt(0, ids[number]):
                    blocks.append(cupy.asnumpy(x[-1:] if last else x))
                out[number] = blocks[-1] if last else np.concatenate(blocks)
        return out

    def head_logits(self, hidden: Floats) -> Floats:
        """Logits of float32 [tokens, hidden], rounded to float16 as the card has them."""
        cupy = import_cupy()
        with self.stream:
            x = cupy.asarray(np.ascontiguousarray(hidden, np.float32)).astype(cupy.float16)
            logits = self._output.buffers(x.shape[0])[0]
            self.multiply_head(x, logits)
            found: Floats = cupy.asnumpy(logits)
        return found

    def multiply_head(self, x: Any, logits: Any) -> None:
        """Logits of float16 [tokens, hidden] into float32 [tokens, vocab]."""
        self._output(x, [logits])
        if (cap := self.config.logit_softcap) is not None:
            grid = (-(-self.vocab_size // 256), x.shape[0])
            launch("soft_cap", grid, 256, [logits, self.vocab_size, float(cap)])

    def run_layers(self, ids: Any, buffers: Buffers, now: Pass, cache: KeyValueCache) -> Any:
        """Launch everything from the look-up of ``ids`` to the final norm.

        Returns
        -------
        cupy.ndarray of float16, shape (tokens, hidden)
        """
        tokens, hidden = now.tokens, self.config.hidden_size
        eps, h = float(self.config.rms_norm_eps), buffers.h[:tokens]
        self._table.take(ids, h)
        if self.config.embedding_scale != 1.0:
            launch(
                "scale",
                (-(-tokens * hidden // 256),),
                256,
                [h, tokens * hidden, float(self.config.embedding_scale)],
            )
        delta, after = None, None
        for number, layer in enumerate(self.card_layers):
            for norm, block in ((layer.attn_norm, layer.attention), (layer.ffn_norm, layer.ffn)):
                launch("add_norm", (tokens,), NORM_THREADS, [h, delta, after, norm, buffers.x, hidden, eps])
                x = buffers.x[:tokens]
                if block is layer.attention:
                    layer.attention(x, buffers, now, cache, number)
                    after = layer.attn_post_norm
                else:
                    layer.ffn(x, buffers, tokens)
                    after = layer.ffn_post_norm
                delta = buffers.delta
        launch("add_norm", (tokens,), NORM_THREADS, [h, delta, after, self._norm, buffers.x, hidden, eps])
        return buffers.x[:tokens]

    def set_length(self, length: int) -> None:
        """Rotary frequencies for a text of this length, which some types depend on; addresses stay."""
        for rope, array in self._on_card.items():
            if (regime := rope.regime(length)) != self._regimes[rope]:
                array.set(rope.inverse_frequencies(self.config.rotary_dim, length))
                self._regimes[rope] = regime

    def _tokens(self, prompt: NDArray[np.intp], n: int, sampling: Sampling, seed: int) -> Iterator[int]:
        done: list[int] = []
        while len(done) < n:  # a second time only where frequencies change with the length
            start = prompt.size + len(done)
            same = n - len(done)
            while same > 1 and self._regime(start) != self._regime(start + same - 1):
                same -= 1
            text = np.array([*prompt, *done], np.intp)
            for token in self.decode([text], same, sampling, [seed], skip=len(done)):
                done.append(int(token[0]))
                yield done[-1]

    def decode(
        self,
        prompts: Sequence[NDArray[np.intp]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        skip: int = 0,
    ) -> Iterator[NDArray[np.int32]]:
        """Continue several prompts side by side.

        Parameters
        ----------
        prompts : sequence of ndarray of intp
            Checked ids; lengths may differ.
        n : int
            Tokens for each.
        sampling : Sampling
        seeds : sequence of int
            One a prompt; the same numbers as on the CPU.
        skip : int
            Random numbers that are used up already.

        Yields
        ------
        ndarray of int32, shape (prompts,)
            The next token of each.
        """
        longest = max(p.size for p in prompts)
        what = f"{len(prompts)} x {longest + n} positions"
        with card_memory(self.source.path, what, _SHORTER):
            yield from self._decode(prompts, longest, n, sampling, seeds, skip)

    def _decode(
        self,
        prompts: Sequence[NDArray[np.intp]],
        longest: int,
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        skip: int,
    ) -> Iterator[NDArray[np.int32]]:
        session = Session(self, len(prompts), longest + n, n)
        session.randomise([np.random.default_rng(seed).random(skip + n)[skip:] for seed in seeds])
        with self.stream:
            self.set_length(longest)
            for number, ids in enumerate(prompts):
                session.begin(number, ids)
            session.choose(sampling)
            events = [session.fetch(0)]
            # Dynamic scaling turns each new key by what the text is long by then; see :meth:`Model._regime`.
            growing = any(rope.type == "dynamic" for rope in self._on_card)
            for step in range(n):
                if step + 1 < n:
                    if growing:
                        self.set_length(longest + step + 1)
                    session.step(sampling)
                    events.append(session.fetch(step + 1))
                events[step].synchronize()
                yield session.tokens[step].copy()
        self.stream.synchronize()


class Session:
    """Cache, buffers and graph of a number of sequences.

    Parameters
    ----------
    model : CardModel
    sequences : int
    capacity : int
        Positions of each.
    steps : int
        New tokens of each.

    Attributes
    ----------
    tokens : ndarray of int32, shape (steps, sequences)
        In pinned memory; row s is there once the event of ``fetch(s)`` has passed.
    """

    def __init__(self, model: CardModel, sequences: int, capacity: int, steps: int) -> None:
        cupy = import_cupy()
        self._model, self.sequences = model, sequences
        config = model.config
        query = config.num_attention_heads * config.head_dim
        with model.stream:
            self.cache = KeyValueCache(
                config.num_hidden_layers, sequences, config.num_key_value_heads, capacity, config.head_dim
            )
            self._buffers = Buffers(sequences, config.hidden_size, query)
            self._prompt_buffers: Buffers | None = None
            self._ids = cupy.zeros(sequences, cupy.int32)
            self._position = cupy.zeros(sequences, cupy.int32)
            self._count = cupy.zeros(sequences, cupy.int32)
            self._steps = max(1, steps)
            self._history = cupy.zeros((sequences, self._steps), cupy.int32)
            self._uniform = cupy.zeros((sequences, self._steps), cupy.float64)
            self._logits = cupy.empty((sequences, model.vocab_size), cupy.float32)
            self._last = cupy.empty((sequences, config.hidden_size), cupy.float16)
        memory = cupy.cuda.alloc_pinned_memory(4 * sequences * self._steps)
        self.tokens: NDArray[np.int32] = np.frombuffer(memory, np.int32, sequences * self._steps).reshape(
            self._steps, sequences
        )
        self._graph: Any = None
        self._warm = False
        self._query = query

    def prompt(self, sequence: int, ids: NDArray[np.intp]) -> Iterator[Any]:
        """Run a prompt from position 0 on, a block at a time; yields float16 [block, hidden] after the final norm."""
        cupy = import_cupy()
        model, config = self._model, self._model.config
        block = min(_PROMPT_BLOCK, ids.size)
        if self._prompt_buffers is None or self._prompt_buffers.tokens < block:
            self._prompt_buffers = Buffers(block, config.hidden_size, self._query)
        for start in range(0, ids.size, block):
            part = ids[start : start + block]
            position = cupy.arange(start, start + part.size, dtype=cupy.int32)
            zeros = cupy.zeros(part.size, cupy.int32)
            now = Pass(part.size, position, zeros, past=start)
            yield model.run_layers(
                cupy.asarray(part.astype(np.int32)), self._prompt_buffers, now, _Shifted(self.cache, sequence)
            )

    def begin(self, sequence: int, ids: NDArray[np.intp]) -> None:
        """Run a prompt; its last position is what :meth:`choose` continues."""
        for x in self.prompt(sequence, ids):
            self._last[sequence] = x[-1]
        self._position[sequence] = ids.size - 1

    def randomise(self, numbers: Sequence[NDArray[np.float64]]) -> None:
        """Uniform random numbers, one a step and sequence."""
        with self._model.stream:
            for sequence, row in enumerate(numbers):
                self._uniform[sequence, : row.size].set(np.ascontiguousarray(row))

    def choose(self, sampling: Sampling) -> None:
        """The first token after the prompts."""
        self._model.multiply_head(self._last, self._logits)
        self._choose(sampling)

    def _choose(self, sampling: Sampling) -> None:
        model = self._model
        launch(
            "choose",
            (self.sequences,),
            1024,
            [
                self._logits, model.vocab_size, model.real_vocab_size, float(sampling.temperature),
                sampling.top_k, float(sampling.top_p), self._uniform, self._steps, self._ids, self._history,
                self._position, self._count,
            ],
        )  # fmt: skip

    def _launches(self, sampling: Sampling) -> None:
        model = self._model
        now = Pass(self.sequences, self._position)
        x = model.run_layers(self._ids, self._buffers, now, self.cache)
        model.multiply_head(x, self._logits)
        self._choose(sampling)

    def step(self, sampling: Sampling) -> None:
        """One token of each sequence; the second step is captured, later ones replay it."""
        if any(layer.on_host for layer in self._model.card_layers) or not self._warm:
            self._launches(sampling)  # loads kernels and makes buffers, which a capture must not
            self._warm = True
            return
        stream = self._model.stream
        if self._graph is None:
            stream.begin_capture()
            self._launches(sampling)
            self._graph = stream.end_capture()
        self._graph.launch(stream)

    def fetch(self, step: int) -> Any:
        """Copy the tokens of a step to the host; an event that has passed when they are there."""
        cupy = import_cupy()
        stream = self._model.stream
        row = self.tokens[step]
        cupy.cuda.runtime.memcpyAsync(row.ctypes.data, self._ids.data.ptr, 4 * self.sequences, 2, stream.ptr)
        event = cupy.cuda.Event(disable_timing=True)
        event.record(stream)
        return event


class _Shifted(KeyValueCache):
    """A cache seen from one of its sequences on."""

    def __init__(self, cache: KeyValueCache, sequence: int) -> None:
        self.capacity, self.store = cache.capacity, cache.store[:, :, sequence:]
