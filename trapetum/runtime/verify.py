"""Is a quantized model whole, and does it say what its source says?

=================  ========================================================================================
check              what is compared
=================  ========================================================================================
integrity          every byte with its checksum (artifact, ``.cbk`` with a manifest); lengths and headers;
                   all floating-point values are finite; padding is zero
decoder            every matrix as the compiled kernels decode and multiply it, with the NumPy decode
reconstruction     every tensor with the source's: kept ones bit for bit, quantized ones by relative squared
                   error, which must be the recorded one
logits             the model's with the source's on a text: KL, top-1 agreement, both perplexities
=================  ========================================================================================

A fault in the model is a finding, never an exception; a fault in what the caller gave (no such path, a source that is
no model) is an exception.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError, RecipeError, TrapetumError, UnsupportedModelError, VerifyError
from trapetum.formats.artifact import Artifact
from trapetum.formats.cbk import CbkFile, padded_vocab
from trapetum.formats.source import TensorSource, open_source
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.architectures import Role, resolve, text_config
from trapetum.progress import Progress
from trapetum.runtime.matrix import build_matrix
from trapetum.tensors import DenseTensor, matrix_shape

if TYPE_CHECKING:
    from trapetum.runtime.model import Model

__all__ = ["Check", "VerifyReport", "verify_path"]

# Recomputed and recorded errors are float64 sums in another order.
_RECORD_TOLERANCE = 1e-5
# Without a record: 2-bit codebooks on Gaussian rows have 0.12; unrelated weights have 1 and more.
_ERROR_LIMIT = 0.5
# Dense records of a .cbk: float16 of a bfloat16 tensor adds less than 1e-6.
_DENSE_LIMIT = 1e-4
# Mean KL in nats. 2-bit codebooks stay below it; permuted heads or a shifted record give several nats.
_KL_LIMIT = 1.0
# float32 sums against float64, over the product of the norms.
_PRODUCT_TOLERANCE = 1e-5
_BLOCK_WEIGHTS = 2 << 20
_SHOWN = 8


@dataclass(frozen=True)
class Check:
    """One question and its answer.

    Parameters
    ----------
    name : str
        See the table of the module.
    ok : bool or None
        None: not asked, ``detail`` says why.
    figure : float or None
        The number behind the answer, named in ``detail``.
    detail : str
    """

    name: str
    ok: bool | None
    figure: float | None
    detail: str


@dataclass
class VerifyReport:
    """What was checked.

    Attributes
    ----------
    path : Path
    kind : str
        ``artifact``, ``cbk``, ``checkpoint``; empty if it could not be opened.
    checks : list of Check
    """

    path: Path
    kind: str
    checks: list[Check] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong and something was checked."""
        return any(c.ok for c in self.checks) and not any(c.ok is False for c in self.checks)

    def raise_if_wrong(self) -> None:
        """Raise ``VerifyError`` with the first finding."""
        for check in self.checks:
            if check.ok is False:
                raise VerifyError(f"{self.path}: {check.name}: {check.detail}")

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        checks = [asdict(check) for check in self.checks]
        return {"path": str(self.path), "kind": self.kind, "ok": self.ok, "checks": checks}


def verify_path(
    path: str | Path,
    *,
    source: str | Path | None = None,
    text: str | None = None,
    threads: int | None = None,
    ctx: int = 512,
    progress: Progress | None = None,
) -> VerifyReport:
    """Check an artifact, a ``.cbk`` or a model folder.

    Parameters
    ----------
    path : path
    source : path, optional
        The model that it was made from.
    text : str, optional
        For the logits; without it they are not compared.
    threads : int, optional
    ctx : int
        Window of the text, in tokens; cut to what the model allows.
    progress : Progress, optional

    Returns
    -------
    VerifyReport

    Raises
    ------
    FormatError
        If there is nothing at ``path``.
    TrapetumError
        If ``source`` cannot be read.
    RecipeError
        If the text is too short to score.
    """
    path, progress = Path(path), progress or Progress()
    if not path.exists():
        raise FormatError(f"{path}: there is no such file or folder")
    reference = None if source is None else open_source(source)
    try:
        packed = getattr(reference, "packed_format", lambda: None)()
        if packed is not None:
            raise UnsupportedModelError(
                f"{source}: is packed as {packed}, so its tensors cannot be compared with decoded ones"
            )
        return _verify(path, reference, text, Pool(threads), ctx, progress)
    finally:
        if reference is not None:
            reference.close()


def _verify(
    path: Path, source: TensorSource | None, text: str | None, pool: Pool, ctx: int, progress: Progress
) -> VerifyReport:
    try:
        opened = _open(path, source)
    except TrapetumError as error:
        return VerifyReport(path, "", [Check("integrity", False, None, error.message)])
    with opened:
        report = VerifyReport(path, opened.kind)
        stages: tuple[tuple[str, Callable[[], Check]], ...] = (
            ("integrity", lambda: _integrity(opened, progress)),
            ("decoder", lambda: _decoder(opened, pool, progress)),
            ("reconstruction", lambda: _reconstruction(opened, source, progress)),
            ("logits", lambda: _logits(opened, source, text, pool, ctx, progress)),
        )
        for name, stage in stages:
            try:
                report.checks.append(stage())
            except RecipeError:  # the caller's text or options, not the model
                raise
            except TrapetumError as error:
                report.checks.append(Check(name, False, None, error.message))
    return report


def _open(path: Path, source: TensorSource | None) -> TensorSource:
    """Open; a .cbk that does not know its vocabulary takes the source's, if it fits."""
    opened = open_source(path)
    if source is None or not isinstance(opened, CbkFile) or opened.vocab_known:
        return opened
    vocab = text_config(source.config).get("vocab_size")
    if not isinstance(vocab, int) or padded_vocab(vocab) != opened.config["vocab_size"]:
        return opened
    opened.close()
    return CbkFile.open(path, vocab_size=vocab)


def _integrity(opened: TensorSource, progress: Progress) -> Check:
    faults: list[str] = []
    what = "headers, lengths and values"
    if isinstance(opened, CbkFile):
        progress.begin("checking bytes", opened.header.file_bytes())
        faults += [f"{name}: {fault}" for name, fault in opened.faults(progress.advance)]
        progress.end()
        if opened.manifest is not None:
            what += ", checksums of the manifest"
    else:
        if isinstance(opened, Artifact):
            faults += opened.check_sums(progress)
            what += ", all checksums"
        faults += _non_finite(opened, progress)
    if faults:
        return Check("integrity", False, float(len(faults)), _listed(faults))
    return Check("integrity", True, 0.0, f"{what} of {len(opened.names())} tensors")


def _non_finite(opened: TensorSource, progress: Progress) -> Iterator[str]:
    progress.begin("checking values", _weights(opened), "w")
    for name in opened.names():
        bad = 0
        for block in _blocks(opened.shape(name)):
            values = opened.load(name, block).dequantize()
            bad += int(np.count_nonzero(~np.isfinite(values)))
            progress.advance(values.size)
        opened.release(name)
        if bad:
            yield f"{name}: {bad} values are not finite"
    progress.end()


def _decoder(opened: TensorSource, pool: Pool, progress: Progress) -> Check:
    """Compiled decode == NumPy decode, bit for bit; compiled product close to the float64 one."""
    names = [n for n in opened.names() if opened.layout(n) != DenseTensor.layout]
    if not names:
        return Check("decoder", None, None, "nothing is quantized")
    rng = np.random.default_rng(0)
    faults, worst = [], 0.0
    progress.begin("checking decoders", sum(math.prod(opened.shape(n)) for n in names), "w")
    for name in names:
        for block in _blocks(opened.shape(name)):
            tensor = opened.load(name, block)
            matrix, expected = build_matrix(tensor, pool, expand=False), tensor.dequantize(slice(None))
            x = rng.standard_normal((1, matrix.in_features)).astype(np.float32)
            exact = x.astype(np.float64) @ expected.T.astype(np.float64)
            scale = np.linalg.norm(x) * np.linalg.norm(expected, axis=1) + np.finfo(np.float32).tiny
            deviation = float(np.max(np.abs(matrix(x) - exact) / scale, initial=0.0))
            worst = max(worst, deviation)
            if not np.array_equal(matrix.tile(slice(0, matrix.rows)), expected):
                faults.append(f"{name}: the compiled decode differs from the NumPy decode")
            elif not deviation <= _PRODUCT_TOLERANCE:
                faults.append(f"{name}: the compiled product differs by {deviation:.1e} of the norms")
            progress.advance(expected.size)
        opened.release(name)
    progress.end()
    if faults:
        return Check("decoder", False, worst, _listed(faults))
    return Check(
        "decoder",
        True,
        worst,
        f"{len(names)} matrices decode alike, products within {worst:.1e} of the norms",
    )


def _reconstruction(opened: TensorSource, source: TensorSource | None, progress: Progress) -> Check:
    if source is None:
        return Check("reconstruction", None, None, "no source was given")
    pairs, missing = _pairs(opened, source)
    faults, errors = [f"{name}: is not in the source" for name in missing], []
    progress.begin("comparing weights", sum(math.prod(opened.shape(a)) for a, _ in pairs), "w")
    for name, twin in pairs:
        if opened.shape(name) != source.shape(twin):
            faults.append(
                f"{name}: shape {list(opened.shape(name))}, the source has {list(source.shape(twin))}"
            )
            continue
        error = _relative_error(opened, name, source, twin, progress)
        if opened.layout(name) != DenseTensor.layout:
            errors.append(error)
        if fault := _judge(opened, name, error):
            faults.append(f"{name}: {fault}")
    progress.end()
    mean = float(np.mean(errors)) if errors else 0.0
    if faults:
        return Check("reconstruction", False, mean, _listed(faults))
    detail = f"{len(pairs)} tensors; relative error of {len(errors)} quantized ones: mean {mean:.3e}"
    return Check("reconstruction", True, mean, f"{detail}, largest {max(errors, default=0.0):.3e}")


def _judge(opened: TensorSource, name: str, error: float) -> str | None:
    """What is wrong with a tensor whose relative error is ``error``."""
    if isinstance(opened, Artifact):
        recorded = opened.records[name].relative_error
        if recorded is None:
            return (
                None if error == 0 else f"is kept, but differs from the source (relative error {error:.3e})"
            )
        if not abs(error - recorded) <= _RECORD_TOLERANCE * max(recorded, 1e-12):
            return f"relative error {error:.6e}, recorded is {recorded:.6e}"
        return None
    dense = opened.kind == "cbk" and opened.layout(name) == DenseTensor.layout
    limit = _DENSE_LIMIT if dense else _ERROR_LIMIT
    if not error <= limit:
        return f"relative error {error:.3e} is above {limit}: these are not the source's weights"
    return None


def _pairs(opened: TensorSource, source: TensorSource) -> tuple[list[tuple[str, str]], list[str]]:
    """Names that mean the same tensor, by role where the architecture is known, else by name."""
    arch = resolve(opened.config, any_architecture=True)
    theirs = set(source.names())
    roles = resolve(source.config, any_architecture=True).index(theirs)
    pairs, missing = [], []
    for name in opened.names():
        role = arch.role(name)
        twin = roles.get(role) if role.part else None
        if twin is None and role.kind == "head" and text_config(source.config).get("tie_word_embeddings"):
            twin = next((n for r, n in roles.items() if r.kind == "embed"), None)
        if twin is None and name in theirs:
            twin = name
        if twin is not None:
            pairs.append((name, twin))
        elif not _is_zero_bias(opened, name, role):
            missing.append(name)
    return pairs, missing


def _is_zero_bias(opened: TensorSource, name: str, role: Role) -> bool:
    """A .cbk stores q, k and v biases together: those that the model lacks are zero."""
    return opened.kind == "cbk" and role.kind == "bias" and not opened.load(name).dequantize().any()


def _relative_error(
    opened: TensorSource, name: str, source: TensorSource, twin: str, progress: Progress
) -> float:
    """``||decoded - W||^2 / ||W||^2`` in float64; infinite where W is zero and the decoded tensor is not."""
    error = norm = 0.0
    for block in _blocks(opened.shape(name)):
        mine, theirs = opened.load(name, block), source.load(twin, block)
        if (
            isinstance(mine, DenseTensor)
            and isinstance(theirs, DenseTensor)
            and _same(mine.values, theirs.values)
        ):
            progress.advance(mine.values.size)
            norm += 1.0
            continue
        expected = theirs.dequantize().astype(np.float64)
        error += float(np.sum(np.square(mine.dequantize() - expected)))
        norm += float(np.sum(np.square(expected)))
        progress.advance(expected.size)
    opened.release(name)
    source.release(twin)
    if norm:
        return error / norm
    return math.inf if error else 0.0


def _same(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def _logits(
    opened: TensorSource,
    source: TensorSource | None,
    text: str | None,
    pool: Pool,
    ctx: int,
    progress: Progress,
) -> Check:
    if text is None or source is None:
        return Check("logits", None, None, f"no {'text' if source is not None else 'source'} was given")
    from trapetum.runtime.evaluate import compare
    from trapetum.runtime.model import Model

    try:
        theirs = Model(source, pool)
    except UnsupportedModelError as error:
        return Check("logits", None, None, f"the source cannot be run here: {error.message}")
    mine = Model(opened, pool)
    if mine.real_vocab_size != theirs.real_vocab_size:
        sizes = f"{mine.real_vocab_size} tokens, the source's {theirs.real_vocab_size}"
        return Check("logits", False, None, f"the vocabulary has {sizes}")
    found = compare(theirs, mine, text, ctx=_window(ctx, theirs, mine), progress=progress)
    kl, top1 = found["kl_mean"], found["top1_agreement"]
    detail = (
        f"KL {kl:.5f} nats in the mean, top-1 agreement {100 * top1:.2f} %, "
        f"perplexity {found['ppl_b']:.4f}, of the source {found['ppl_a']:.4f} ({found['tokens']} tokens)"
    )
    if not kl <= _KL_LIMIT:
        return Check("logits", False, kl, f"{detail}: above {_KL_LIMIT} nats the model is not its source")
    return Check("logits", True, kl, detail)


def _window(ctx: int, *models: Model) -> int:
    limits = [m.config.max_position_embeddings for m in models]
    return min([ctx, *(limit for limit in limits if limit is not None)])


def _weights(opened: TensorSource) -> int:
    return sum(math.prod(opened.shape(name)) for name in opened.names())


def _blocks(shape: tuple[int, ...]) -> list[slice]:
    rows, width = matrix_shape(shape)
    step = max(1, _BLOCK_WEIGHTS // max(width, 1))
    return [slice(r, min(r + step, rows)) for r in range(0, rows, step)]


def _listed(faults: list[str]) -> str:
    more = f"; and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return "; ".join(faults[:_SHOWN]) + more
