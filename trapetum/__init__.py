"""trapetum: offline, torch-free quantization and export of language-model checkpoints.

::

    import trapetum

    report = trapetum.quantize_model("path/to/model", "out", bits=4)
    trapetum.export_artifact("out", "cbk", "model.cbk")
    art = trapetum.open_artifact("out")
    art["model.layers.0.self_attn.q_proj.weight"].dequantize()     # float32 [out_features, in_features]
    m = trapetum.load("out")
    m.logits([1, 2, 3])                                            # float32 [3, vocab]

Importing this module is cheap: numba, tokenizers and the rest load with the first call that needs them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from trapetum.formats.artifact import Artifact
    from trapetum.quantize.report import Report
    from trapetum.runtime.model import Model

__all__ = ["__version__", "export_artifact", "load", "open_artifact", "quantize_model"]

__version__ = "0.1.0"


def quantize_model(model: str | Path, out: str | Path, **options: Any) -> Report:
    """Quantize a checkpoint into an artifact folder; see :func:`trapetum.quantize.job.quantize_model`."""
    from trapetum.quantize.job import quantize_model as run

    return run(model, out, **options)


def export_artifact(artifact: str | Path, format: str, out: str | Path, **options: Any) -> Path:
    """Write an artifact in another format; see :func:`trapetum.export.export_artifact`."""
    from trapetum.export import export_artifact as run

    return run(artifact, format, out, **options)


def open_artifact(path: str | Path) -> Artifact:
    """Open an artifact folder lazily; see :class:`trapetum.formats.artifact.Artifact`."""
    from trapetum.formats.artifact import Artifact

    return Artifact.open(path)


def load(path: str | Path, device: str = "cpu", **options: Any) -> Model:
    """Load any supported model for inference; see :func:`trapetum.runtime.model.load`."""
    from trapetum.runtime.model import load as run

    return run(path, device=device, **options)
