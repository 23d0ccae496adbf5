"""The strict safetensors reader on the machine: maps and pread, resident memory, threads, huge headers."""

from __future__ import annotations

import errno
import gc
import json
import mmap
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors_bytes import SAMPLE, entry, pack

from trapetum.errors import FormatError
from trapetum.formats.safetensors import SafetensorsFile


def big_file(tmp_path: Path, rows: int = 4096, columns: int = 4096) -> tuple[Path, NDArray[np.uint16]]:
    values = np.random.default_rng(0).integers(0, 1 << 16, (rows, columns), np.uint16)
    header = json.dumps({"w": entry("BF16", values.shape, [0, values.nbytes])}).encode()
    path = tmp_path / "big.safetensors"
    path.write_bytes(pack(header + b" " * (-len(header) % 8), values.tobytes()))
    return path, values


def test_mapped_rows_are_views(tmp_path: Path) -> None:
    path, _ = big_file(tmp_path, 64, 64)
    with SafetensorsFile.open(path) as file:
        assert np.shares_memory(file.read("w").view(np.uint16), file.read("w", slice(3, 5)).view(np.uint16))


def test_a_refused_map_falls_back_to_pread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> mmap.mmap:
        raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))

    monkeypatch.setattr("trapetum.formats.safetensors._mmap.mmap", refuse)
    path, values = big_file(tmp_path, 64, 64)
    with SafetensorsFile.open(path) as file:
        assert [os.strerror(errno.ENODEV) in note and "big.safetensors" in note for note in file.notes] == [
            True
        ]
        np.testing.assert_array_equal(file.read("w").view(np.uint16), values)
        np.testing.assert_array_equal(file.read("w", slice(5, 9)).view(np.uint16), values[5:9])
        file.release("w")


def test_pread_goes_on_after_short_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv

    def short(fd: int, views: list[memoryview], at: int) -> int:
        return whole(fd, [views[0][:1000]], at)

    monkeypatch.setattr("trapetum.formats.safetensors.os.preadv", short)
    path, values = big_file(tmp_path, 64, 64)
    with SafetensorsFile.open(path, mmap=False) as file:
        np.testing.assert_array_equal(file.read("w").view(np.uint16), values)


def test_a_file_that_shrinks_under_pread(tmp_path: Path) -> None:
    path, _ = big_file(tmp_path, 64, 64)
    with SafetensorsFile.open(path, mmap=False) as file:
        os.truncate(path, 4096)
        with pytest.raises(FormatError, match=r"big\.safetensors: ended at byte 4096 inside tensor 'w'"):
            file.read("w")


def test_arrays_outlive_the_file(tmp_path: Path) -> None:
    path, values = big_file(tmp_path, 64, 64)
    for mapped in (True, False):
        file = SafetensorsFile.open(path, mmap=mapped)
        rows = file.read("w", slice(0, 2))
        file.close()
        file.close()
        np.testing.assert_array_equal(rows.view(np.uint16), values[:2])
        with pytest.raises(ValueError, match="closed"):
            file.read("w")


def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.write_bytes(SAMPLE)
    bad.write_bytes(SAMPLE[:-1])
    gc.collect()  # files that other tests left are closed now, not while these are counted
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        for mapped in (True, False):
            SafetensorsFile.open(good, mmap=mapped).close()
            with pytest.raises(FormatError):
                SafetensorsFile.open(bad, mmap=mapped)
    assert len(os.listdir("/proc/self/fd")) == before


def resident() -> int:
    """Bytes of mapped file pages in this process; those of a file in a tmpfs count as shared memory."""
    with open("/proc/self/status", encoding="ascii") as status:
        pages = [int(line.split()[1]) for line in status if line.startswith(("RssFile", "RssShmem"))]
    return sum(pages) << 10


def test_release_bounds_the_resident_memory(tmp_path: Path) -> None:
    """32 MiB in blocks of 4 MiB: never more than about one block is resident."""
    path, values = big_file(tmp_path)
    with SafetensorsFile.open(path) as file:
        before, peak = resident(), 0
        for start in range(0, 4096, 512):
            rows = slice(start, start + 512)
            assert int(file.read("w", rows).view(np.uint16).max()) == int(values[rows].max())
            peak = max(peak, resident() - before)
            file.release("w", rows)
        assert 2 << 20 < peak < 12 << 20
        assert resident() - before < 2 << 20


@pytest.mark.parametrize("mapped", [True, False])
def test_threads_read_together(tmp_path: Path, mapped: bool) -> None:
    path, values = big_file(tmp_path, 1024, 512)

    def check(start: int) -> bool:
        rows = slice(start, start + 16)
        same = np.array_equal(file.read("w", rows).view(np.uint16), values[rows])
        file.release("w", rows)
        return same

    with SafetensorsFile.open(path, mmap=mapped) as file, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, [start for _ in range(4) for start in range(0, 1024, 16)]))


def test_a_header_of_200_000_tensors(tmp_path: Path) -> None:
    """Costs about as much as parsing its JSON: 1.1 s of CPU time on a shared Xeon core, json.loads 0.7."""
    count = 200_000
    one = '"buffers.%07d":{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
    raw = ("{" + ",".join(one % (i, 4 * i, 4 * i + 4) for i in range(count)) + "}").encode()
    path = tmp_path / "many.safetensors"
    path.write_bytes(pack(raw, bytes(4 * count)))
    ours, parser = [], []
    gc.collect()
    gc.freeze()  # what other tests left is no part of the cost
    for _ in range(2):
        begin = time.process_time()
        with SafetensorsFile.open(path) as file:
            ours.append(time.process_time() - begin)
            assert len(file.tensors) == count
            assert file.tensors["buffers.0199999"].end == path.stat().st_size
        begin = time.process_time()
        json.loads(raw)
        parser.append(time.process_time() - begin)
    gc.unfreeze()
    assert min(ours) < 4 * min(parser)
