"""The header of a .cbk, and the checks that it allows before anything else is read.

The order of the checks matters: nothing is allocated from a size that the length of the file does not
support.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trapetum.errors import FormatError
from trapetum.formats.cbk_layouts import CBK_LAYOUTS
from trapetum.formats.cbk_records import CbkHeader
from trapetum.formats.mapped import MappedFile

__all__ = ["read_header"]


def read_header(path: Path, data: MappedFile) -> CbkHeader:
    """Read and check the header.

    Parameters
    ----------
    path : Path
        For messages.
    data : MappedFile

    Raises
    ------
    FormatError
        If the magic is unknown, a size breaks a rule, a float is not usable, or the file has another length than
        the header describes.
    """
    magic = bytes(data.read(0, min(4, data.size))).decode("latin-1")
    layout = CBK_LAYOUTS.get(magic)
    if layout is None:
        raise FormatError(f"{path}: begins with {magic!r}; known are {', '.join(CBK_LAYOUTS)}")
    fields_end = 4 + struct.calcsize(layout.format)
    if data.size < fields_end:
        raise FormatError(f"{path}: {data.size} bytes, shorter than a {magic} header of {fields_end}")
    fields = struct.unpack(layout.format, data.read(4, fields_end).tobytes())
    values = dict(zip([name for name, _ in layout.fields], fields))
    if broken := layout.violations(values):
        raise FormatError(f"{path}: the {magic} header is impossible: {'; '.join(broken)}")
    odd = [name for name, code in layout.fields if code == "f" and not np.isfinite(values[name])]
    if odd:
        raise FormatError(f"{path}: the {magic} header is impossible: {', '.join(odd)} out of range")
    count = layout.sizes(values)[layout.inv_freq]
    if not layout.stored_inv_freq:
        inv_freq = _computed_inv_freq(path, values)
    elif data.size < fields_end + 4 * count:
        raise FormatError(f"{path}: {data.size} bytes, shorter than its header of {fields_end + 4 * count}")
    else:
        inv_freq = data.read(fields_end, fields_end + 4 * count).view("<f4").copy()
    if not np.isfinite(inv_freq).all():
        raise FormatError(f"{path}: the rotary frequencies hold values that are not finite")
    header = CbkHeader(layout, values, inv_freq)
    if (expected := header.file_bytes(data.size)) != data.size:
        # counted as far as the file reaches: a garbage header may describe millions of records
        fault = "truncated" if data.size < expected else "bytes after the last record"
        least = "at least " if data.size < expected else ""
        raise FormatError(
            f"{path}: the file has {data.size:,} bytes, its header describes {least}{expected:,} ({fault})",
            hint="Copy or export the file again.",
        )
    return header


def _computed_inv_freq(path: Path, values: dict[str, Any]) -> NDArray[np.float32]:
    base, scale = values["rope_base"], values.get("rope_scale", 1.0)
    if base <= 0 or scale <= 0:
        raise FormatError(f"{path}: rope_base {base} and rope_scale {scale} must be positive")
    dim = values["head_dim"]
    frequencies = base ** (-np.arange(0, dim, 2, dtype=np.float64) / dim) / scale
    return np.asarray(frequencies, np.float32)
