"""Perplexity of a model, and the distance between two models, on a text.

The text is cut into windows of ``ctx`` tokens that do not overlap; each is seen by itself, from an empty cache.

``all``
    Every token of a window but its first, which nothing predicts. The last, shorter window counts as well.
``second-half``
    Tokens ``ctx/2 + 1 .. ctx - 1`` of a window: every scored token has at least half a window before it. Whole windows
    only. This is the convention of llama.cpp's perplexity tool.

Log-probabilities are computed in float64 from float32 logits; the memory for logits is bounded whatever the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import RecipeError
from trapetum.progress import Progress
from trapetum.runtime.finite import check_losses, unwarned
from trapetum.runtime.model import Model

__all__ = ["SCORES", "compare", "perplexity"]

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ids = str | Sequence[int] | NDArray[np.integer[Any]]


@dataclass(frozen=True)
class _Score:
    """Which tokens count: the first scored token of a window, from ctx, and whether a shorter window counts."""

    first: Callable[[int], int]
    whole_windows: bool


SCORES: dict[str, _Score] = {
    "all": _Score(lambda ctx: 1, whole_windows=False),
    "second-half": _Score(lambda ctx: ctx // 2 + 1, whole_windows=True),
}

_PIECE = 1 << 18  # float64 elements that one thread works on: 2 MiB
_SHOWN_CHANGES = 10


@dataclass(frozen=True)
class _Batch:
    """Windows of equal length, run together: where the first begins, ids [windows, length], the first scored token."""

    start: int
    ids: NDArray[np.intp]
    first: int

    @property
    def targets(self) -> NDArray[np.intp]:
        """Scored tokens, one after another."""
        return self.ids[:, self.first :].reshape(-1)

    @property
    def positions(self) -> NDArray[np.intp]:
        """Of the tokens that predict them, in the whole text."""
        numbers = np.arange(self.ids.size).reshape(self.ids.shape)[:, self.first - 1 : -1]
        return (self.start + numbers).reshape(-1)

    def predictors(self, hidden: Floats) -> Floats:
        """The hidden states that predict them, [scored, hidden_size]."""
        part = hidden[:, self.first - 1 : -1]
        return part.reshape(-1, hidden.shape[-1])


def _batches(model: Model, ids: NDArray[np.intp], ctx: int, first: int) -> Iterator[_Batch]:
    """Windows in order; as many in a batch as the model takes at once."""
    whole = ids.size // ctx * ctx
    windows = ids[:whole].reshape(-1, ctx)
    step = max(1, model.block_positions // ctx)
    for start in range(0, windows.shape[0], step):
        yield _Batch(start * ctx, windows[start : start + step], first)
    if ids.size - whole > first:
        yield _Batch(whole, ids[None, whole:], first)


def _prepare(model: Model, ids: Ids, ctx: int, score: str) -> tuple[NDArray[np.intp], int]:
    if score not in SCORES:
        raise RecipeError(f"score is {score!r}; {' and '.join(SCORES)} are known")
    if ctx < 2:
        raise RecipeError(f"ctx is {ctx}; at least 2 tokens are needed to predict one")
    model.check_length(ctx, f"Give --ctx {model.config.max_length}, or less.")
    array = np.asarray(model.tokenizer.encode(ids) if isinstance(ids, str) else ids)
    first = SCORES[score].first(ctx)
    if first >= ctx:
        raise RecipeError(f"ctx is {ctx}; score {score} needs at least {ctx + 1}")
    needed = ctx if SCORES[score].whole_windows else first + 1
    if array.ndim != 1 or array.size < needed:
        raise RecipeError(
            f"the text has {array.size} tokens; at least {needed} are needed to score one (ctx {ctx}, score {score})"
        )
    if SCORES[score].whole_windows:
        array = array[: array.size // ctx * ctx]
    # the length of the whole text is no matter: windows are run, and ctx fits
    parts = [model.check_ids(array[i : i + ctx]) for i in range(0, array.size, ctx)]
    return np.concatenate(parts), first


def _log_probabilities(logits: Floats) -> Doubles:
    """float64 log-softmax of rows."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return wide


def perplexity(
    model: Model,
    ids: Ids,
    ctx: int = 512,
    score: str = "all",
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Perplexity over windows that do not overlap; see the module's docstring.

    Parameters
    ----------
    model : Model
    ids : str or sequence of int
        The text, or its token ids; a text is encoded without special tokens.
    ctx : int
        Window, in tokens.
    score : str
        ``all`` or ``second-half``.
    progress : Progress, optional

    Returns
    -------
    dict
        ``tokens`` scored, ``nll`` (mean, nats), ``ppl`` = exp(nll), ``ctx``, ``score``.

    Raises
    ------
    RecipeError
        If the text is too short, an id is outside the vocabulary, or ctx does not fit the model.
    CheckpointError
        If logits are not finite.
    """
    array, first = _prepare(model, ids, ctx, score)
    vocab = max(model.real_vocab_size, int(array.max()) + 1)
    progress = progress or Progress()
    progress.begin("perplexity", array.size, "tok")
    total, count = 0.0, 0
    with model.pool.session(), unwarned():
        for batch in _batches(model, array, ctx, first):
            hidden, targets = batch.predictors(model.hidden(batch.ids)), batch.targets
            losses = np.empty(targets.size, np.float64)

            def use(rows: slice, logits: Floats, targets: Any = targets, losses: Doubles = losses) -> None:
                wanted, into = targets[rows], losses[rows]

                def piece(part: slice) -> None:
                    block = logits[part, :vocab]
                    wide = block.astype(np.float64)
                    top = wide.max(axis=-1)
                    picked = wide[np.arange(wide.shape[0]), wanted[part]]
                    wide -= top[:, None]
                    np.exp(wide, out=wide)
                    into[part] = np.log(wide.sum(axis=-1)) + top - picked

                model.pool.blocks(piece, logits.shape[0], _PIECE // vocab)

            model.each_logits(hidden, use)
            check_losses(losses, model.source.path, batch.positions)
            total += float(losses.sum())
            count += targets.size
            progress.advance(batch.ids.size)
    progress.end()
    nll = total / count
    return {"tokens": count, "nll": nll, "ppl": float(np.exp(nll)), "ctx": ctx, "score": score}


def compare(
    a: Model,
    b: Model,
    ids: Ids,
    ctx: int = 512,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Teacher-forced distance of ``b`` from ``a``: both see the same text, token by token.

    Parameters
    ----------
    a, b : Model
        ``a`` is the reference. Vocabularies must have the same size.
    ids : str or sequence of int
        A text is encoded by ``a``'s tokenizer, or ``b``'s where ``a`` has none.
    ctx : int
    progress : Progress, optional

    Returns
    -------
    dict
        ``tokens``; ``kl_mean``, ``kl_max`` = KL(a || b) in nats; ``tv_mean``, ``tv_max`` = total variation;
        ``top1_agreement`` (share of positions with the same argmax); ``argmax_changes``, of them
        ``argmax_ties`` (``a`` itself rates both tokens alike); ``change_margin_mean``, ``change_margin_max``
        (logit margin of ``a``'s first over its second choice where the argmax changed); ``changes``, those
        with the largest margins; ``nll_a``, ``nll_b``, ``ppl_a``, ``ppl_b``; ``ctx``.
        Comparing a model with itself gives exactly 0, 0, 0, 0 and 1.

    Raises
    ------
    RecipeError
        See :func:`perplexity`; also if the vocabularies differ.
    CheckpointError
        If logits of either are not finite.
    """
    if isinstance(ids, str):
        ids = (b if a.source.tokenizer_file() is None else a).tokenizer.encode(ids)
    array, first = _prepare(a, ids, ctx, "all")
    _prepare(b, array, ctx, "all")
    vocab = a.real_vocab_size
    if b.real_vocab_size != vocab:
        raise RecipeError(
            f"the models have vocabularies of {vocab} and {b.real_vocab_size}; only equal ones can be compared"
        )
    progress = progress or Progress()
    progress.begin("compare", array.size, "tok")
    results: list[dict[str, NDArray[Any]]] = []
    with a.pool.session(), unwarned():
        for batch in _batches(a, array, ctx, first):
            hidden_a, hidden_b = (batch.predictors(m.hidden(batch.ids)) for m in (a, b))
            result: dict[str, NDArray[Any]] = {
                key: np.zeros(batch.targets.size, dtype) for key, dtype in _COLUMNS.items()
            }
            _compare_block(a, b, hidden_a, hidden_b, batch.targets, vocab, result)
            for model, losses in ((a, result["loss_a"]), (b, result["loss_b"])):
                check_losses(losses, model.source.path, batch.positions)
            results.append(result)
            progress.advance(batch.ids.size)
    progress.end()
    return {**_summary({key: np.concatenate([r[key] for r in results]) for key in _COLUMNS}), "ctx": ctx}


# Per scored position.
_COLUMNS: dict[str, type] = {
    "kl": np.float64,
    "tv": np.float64,
    "loss_a": np.float64,
    "loss_b": np.float64,
    "best_a": np.int64,
    "best_b": np.int64,
    "margin": np.float64,
    "tie": np.bool_,
}


def _compare_block(
    a: Model,
    b: Model,
    hidden_a: Floats,
    hidden_b: Floats,
    targets: NDArray[np.intp],
    vocab: int,
    result: dict[str, NDArray[Any]],
) -> None:
    def use(rows: slice, logits_a: Floats) -> None:
        logits_b = b.head_logits(hidden_b[rows])
        into = {key: column[rows] for key, column in result.items()}
        wanted = targets[rows]

        def piece(part: slice) -> None:
            la, lb = logits_a[part, :vocab], logits_b[part, :vocab]
            pa, pb = _log_probabilities(la), _log_probabilities(lb)
            every = np.arange(pa.shape[0])
            into["loss_a"][part], into["loss_b"][part] = -pa[every, wanted[part]], -pb[every, wanted[part]]
            difference = pa - pb
            np.exp(pa, out=pa)
            np.exp(pb, out=pb)
            into["kl"][part] = np.einsum("ij,ij->i", pa, difference)
            into["tv"][part] = 0.5 * np.abs(pa - pb).sum(axis=-1)
            best_a, best_b = la.argmax(axis=-1), lb.argmax(axis=-1)
            into["best_a"][part], into["best_b"][part] = best_a, best_b
            second = np.partition(la, -2, axis=-1)[:, -2]
            into["margin"][part] = la[every, best_a].astype(np.float64) - second
            into["tie"][part] = la[every, best_b] == la[every, best_a]

        a.pool.blocks(piece, logits_a.shape[0], _PIECE // vocab)

    a.each_logits(hidden_a, use)


def _summary(columns: dict[str, NDArray[Any]]) -> dict[str, Any]:
    changed = np.flatnonzero(columns["best_a"] != columns["best_b"])
    margins = columns["margin"][changed]
    largest = changed[np.argsort(-margins, kind="stable")[:_SHOWN_CHANGES]]
    nll_a, nll_b = float(columns["loss_a"].mean()), float(columns["loss_b"].mean())
    return {
        "tokens": int(columns["kl"].size),
        "kl_mean": float(columns["kl"].mean()),
        "kl_max": float(columns["kl"].max()),
        "tv_mean": float(columns["tv"].mean()),
        "tv_max": float(columns["tv"].max()),
        "top1_agreement": 1.0 - changed.size / columns["kl"].size,
        "argmax_changes": int(changed.size),
        "argmax_ties": int(columns["tie"][changed].sum()),
        "change_margin_mean": float(margins.mean()) if changed.size else 0.0,
        "change_margin_max": float(margins.max()) if changed.size else 0.0,
        "changes": [
            {
                "position": int(i),  # among the scored tokens
                "a": int(columns["best_a"][i]),
                "b": int(columns["best_b"][i]),
                "margin": float(columns["margin"][i]),
                "tie": bool(columns["tie"][i]),
            }
            for i in largest
        ],
        "nll_a": nll_a,
        "nll_b": nll_b,
        "ppl_a": float(np.exp(nll_a)),
        "ppl_b": float(np.exp(nll_b)),
    }
