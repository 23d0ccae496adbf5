"""Is a quantized model whole, and does it say what its source says?

=================  ========================================================================================
check              what is compared
=================  ========================================================================================
integrity          every byte with its checksum (an artifact; a ``.cbk`` with a manifest, a GGUF or a folder with
                   its list of sums, as exports write them); lengths and headers; all floating-point values are
                   finite; padding is zero
decoder            every matrix as the compiled kernels decode and multiply it, in every form that they
                   hold it in, with the NumPy decode; the card's kernels, too, if that is the device
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
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from trapetum.errors import (
    FormatError,
    KernelUnavailable,
    RecipeError,
    TrapetumError,
    UnsupportedModelError,
    listed,
)
from trapetum.formats.artifact import Artifact
from trapetum.formats.cbk import CbkFile, padded_vocab
from trapetum.formats.checkpoint import Checkpoint
from trapetum.formats.checksums import check_files, gguf_sums
from trapetum.formats.gguf_checkpoint import GgufCheckpoint
from trapetum.formats.gguf_source import GgufSource
from trapetum.formats.manifest import SUMS
from trapetum.formats.source import TensorSource, open_source
from trapetum.formats.view import CheckpointView
from trapetum.kernels.cpu.pool import Pool
from trapetum.models.architectures import resolve, text_config
from trapetum.models.residual import RotatedCheckpoint
from trapetum.progress import Progress
from trapetum.runtime.agreement import deviations
from trapetum.runtime.checks import Check, VerifyReport, blocks
from trapetum.runtime.finite import unwarned
from trapetum.runtime.model import Model, check_device, model_of
from trapetum.runtime.reconstruction import reconstruction
from trapetum.tensors import DenseTensor, QuantizedTensor

__all__ = ["Check", "VerifyReport", "verify_path"]


def verify_path(
    path: str | Path,
    *,
    source: str | Path | None = None,
    text: str | None = None,
    threads: int | None = None,
    ctx: int = 512,
    device: str = "cpu",
    experts: str = "card",
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
    device : str
        Where the artifact's logits are computed, ``cpu`` or ``cuda``; the source's always on the CPU, as a reference.
        With ``cuda`` the card's kernels are compared as well, whatever the model.
    experts : str
        See :func:`~trapetum.runtime.model.load`.
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
    KernelUnavailable
        If there is no such device, or it cannot run this model.
    """
    path, progress = Path(path), progress or Progress()
    if not path.exists():
        raise FormatError(f"{path}: there is no such file or folder")
    check_device(device)
    reference = None if source is None else open_source(source)
    try:
        packed = getattr(reference, "packed_format", lambda: None)()
        if packed is not None:
            raise UnsupportedModelError(
                f"{source}: is packed as {packed}, so its tensors cannot be compared with decoded ones"
            )
        place = _Place(Pool(threads), device, experts)
        return _verify(path, reference, text, place, ctx, progress)
    finally:
        if reference is not None:
            reference.close()


@dataclass(frozen=True)
class _Place:
    """Where the model is run."""

    pool: Pool
    device: str
    experts: str

    def deviations(
        self,
    ) -> Callable[[QuantizedTensor, np.random.Generator], Iterator[tuple[str, float, float]]]:
        """What compares the kernels there with NumPy."""
        if self.device == "cpu":
            return lambda tensor, rng: deviations(tensor, self.pool, rng)
        from trapetum.kernels.cuda.workspace import Workspace
        from trapetum.runtime.cuda.agreement import card_deviations

        workspace = Workspace()
        return lambda tensor, rng: chain(
            deviations(tensor, self.pool, rng), card_deviations(tensor, workspace, rng)
        )


def _verify(
    path: Path,
    source: TensorSource | None,
    text: str | None,
    place: _Place,
    ctx: int,
    progress: Progress,
) -> VerifyReport:
    try:
        opened = _open(path, source)
    except TrapetumError as error:
        return VerifyReport(path, "", [Check("integrity", False, None, error.message)])
    with opened:
        report = VerifyReport(path, opened.kind)
        source = _in_its_basis(source, opened)
        stages: tuple[tuple[str, Callable[[], Check]], ...] = (
            ("integrity", lambda: _integrity(opened, progress)),
            ("decoder", lambda: _decoder(opened, place, progress)),
            ("reconstruction", lambda: reconstruction(opened, source, progress)),
            ("logits", lambda: _logits(opened, source, text, place, ctx, progress)),
        )
        for name, stage in stages:
            try:
                with unwarned():  # values that are not finite are named by the first stage
                    report.checks.append(stage())
            except (RecipeError, KernelUnavailable):  # the caller's text or options, not the model
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


def _in_its_basis(source: TensorSource | None, opened: TensorSource) -> TensorSource | None:
    """The source as the job read it: turned, where the artifact's recipe says so."""
    recipe = opened.manifest["recipe"] if isinstance(opened, Artifact) else {}
    if recipe.get("rotate") is None:
        return source
    if isinstance(source, GgufSource):
        source = GgufCheckpoint(source)
    if not isinstance(source, Checkpoint | CheckpointView | GgufCheckpoint):
        return source
    return RotatedCheckpoint(source, resolve(source.config), recipe["seed"])


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
        elif (sums := _sums(opened)).is_file():
            faults += check_files(sums)
            what += f", checksums of {sums.name}"
        if isinstance(opened, GgufSource):
            faults += opened.faults()
        faults += _non_finite(opened, progress)
    if faults:
        return Check("integrity", False, float(len(faults)), listed(faults))
    return Check("integrity", True, 0.0, f"{what} of {len(opened.names())} tensors")


def _sums(opened: TensorSource) -> Path:
    """Where the list of sums that an export wrote would lie."""
    if opened.kind == "gguf":
        return gguf_sums(opened.path)
    return (opened.path if opened.path.is_dir() else opened.path.parent) / SUMS


def _non_finite(opened: TensorSource, progress: Progress) -> Iterator[str]:
    progress.begin("checking values", _weights(opened), "w")
    for name in opened.names():
        bad = 0
        for block in blocks(opened.shape(name)):
            values = opened.load(name, block).dequantize()
            bad += int(np.count_nonzero(~np.isfinite(values)))
            progress.advance(values.size)
        opened.release(name)
        if bad:
            yield f"{name}: {bad} values are not finite"
    progress.end()


def _decoder(opened: TensorSource, place: _Place, progress: Progress) -> Check:
    """See ``runtime.agreement`` and ``runtime.cuda.agreement``."""
    names = [n for n in opened.names() if opened.layout(n) != DenseTensor.layout]
    if not names:
        return Check("decoder", None, None, "nothing is quantized")
    rng, compared = np.random.default_rng(0), place.deviations()
    faults: dict[str, str] = {}
    worst = {"product": 0.0, "fused product": 0.0}
    progress.begin("checking decoders", sum(math.prod(opened.shape(n)) for n in names), "w")
    for name in names:
        for block in blocks(opened.shape(name)):
            tensor = opened.load(name, block)
            for what, deviation, limit in compared(tensor, rng):
                kind = "fused product" if "fused" in what else "product"
                if "product" in what:
                    worst[kind] = max(worst[kind], deviation)
                if not deviation <= limit:
                    faults.setdefault(
                        name, f"{name}: {what} differs by {deviation:.1e}, more than {limit:.0e}"
                    )
            progress.advance(math.prod(tensor.shape))
        opened.release(name)
    progress.end()
    if faults:
        return Check("decoder", False, worst["product"], listed(list(faults.values())))
    where = ", on the card, too" if place.device == "cuda" else ""
    return Check(
        "decoder",
        True,
        worst["product"],
        f"{len(names)} matrices decode alike{where}, products within {worst['product']:.1e} of a row's, "
        f"fused ones within {worst['fused product']:.1e}",
    )


def _logits(
    opened: TensorSource,
    source: TensorSource | None,
    text: str | None,
    place: _Place,
    ctx: int,
    progress: Progress,
) -> Check:
    if text is None or source is None:
        return Check("logits", None, None, f"no {'text' if source is not None else 'source'} was given")
    from trapetum.runtime.evaluate import compare

    try:
        theirs = Model(source, place.pool)
    except UnsupportedModelError as error:
        return Check("logits", None, None, f"the source cannot be run here: {error.message}")
    mine = model_of(opened, place.pool, place.device, experts=place.experts)
    if mine.real_vocab_size != theirs.real_vocab_size:
        sizes = f"{mine.real_vocab_size} tokens, the source's {theirs.real_vocab_size}"
        return Check("logits", False, None, f"the vocabulary has {sizes}")
    found = compare(theirs, mine, text, ctx=_window(ctx, theirs, mine), progress=progress)
    kl, top1 = found["kl_mean"], found["top1_agreement"]
    detail = (
        f"KL {kl:.5f} nats in the mean, top-1 agreement {100 * top1:.2f} %, "
        f"perplexity {found['ppl_b']:.4f}, of the source {found['ppl_a']:.4f} ({found['tokens']} tokens)"
    )
    # No fixed KL tells a fault from few bits: on the 2 M parameter demo model 2-bit codebooks give 2.45 nats,
    # q and k of one layer exchanged 2.52. That is for the reconstruction to tell; here only a model fails that knows
    # nothing, and whose source (which may be untrained) knows something.
    if not (
        kl < math.inf and (found["ppl_b"] < mine.real_vocab_size or found["ppl_a"] >= mine.real_vocab_size)
    ):
        return Check("logits", False, kl, f"{detail}: no better than guessing")
    return Check("logits", True, kl, detail)


def _window(ctx: int, *models: Model) -> int:
    limits = [m.config.max_position_embeddings for m in models]
    return min([ctx, *(limit for limit in limits if limit is not None)])


def _weights(opened: TensorSource) -> int:
    return sum(math.prod(opened.shape(name)) for name in opened.names())
