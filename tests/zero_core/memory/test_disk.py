"""The scratch file: what is written comes back, or an error of a stable code says why not."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from zero_core.errors import ScratchDamaged, ScratchFailed, ScratchFull
from zero_core.memory import disk
from zero_core.memory.disk import ALIGNMENT, BLOCK, ScratchFile

SIZES = [1, ALIGNMENT - 1, ALIGNMENT, BLOCK, BLOCK + 1, 9 * BLOCK + 5]


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[ScratchFile]:
    file = ScratchFile(tmp_path)
    yield file
    file.close()


def random_bytes(numel: int, shift: int = 0) -> torch.Tensor:
    """At an address that is no multiple of anything if ``shift`` is odd."""
    return torch.randint(0, 256, (numel + shift,), dtype=torch.uint8)[shift:]


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_what_was_written_comes_back(tmp_path: Path, direct: bool, shift: int) -> None:
    with patch.object(os, "O_DIRECT", os.O_DIRECT if direct else 0):
        scratch = ScratchFile(tmp_path)
    assert scratch.direct <= direct
    extents = [(scratch.reserve(size), random_bytes(size, shift)) for size in SIZES]
    writes = [extent.write(0, values) for extent, values in extents]
    for extent, values in extents:
        back = random_bytes(values.numel(), shift)
        extent.read(0, back).wait()
        assert torch.equal(back, values)
    for write in writes:
        write.wait()
    scratch.close()


def test_parts_of_whole_blocks(scratch: ScratchFile) -> None:
    values = random_bytes(3 * BLOCK + 10)
    extent = scratch.reserve(values.numel())
    for begin in (2 * BLOCK, 0, BLOCK):
        end = values.numel() if begin == 2 * BLOCK else begin + BLOCK
        extent.write(begin, values[begin:end])
    back = torch.empty(BLOCK + 10, dtype=torch.uint8)
    extent.read(2 * BLOCK, back).wait()
    assert torch.equal(back, values[2 * BLOCK :])


def test_the_file_has_no_name(scratch: ScratchFile, tmp_path: Path) -> None:
    scratch.reserve(BLOCK).write(0, random_bytes(BLOCK)).wait()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_unnamed_files(tmp_path: Path) -> None:
    with patch.object(os, "O_TMPFILE", os.O_EXCL | os.O_CREAT):
        scratch = ScratchFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    scratch.close()


@pytest.mark.parametrize("at", [0, BLOCK - 1, 5 * BLOCK])
def test_a_flipped_bit_is_found(scratch: ScratchFile, at: int) -> None:
    values = random_bytes(6 * BLOCK)
    scratch.reserve(ALIGNMENT)
    extent = scratch.reserve(values.numel())
    extent.write(0, values).wait()
    path = next(
        path for path in Path("/proc/self/fd").iterdir() if str(scratch.directory) in os.readlink(path)
    )
    with path.open("r+b") as same_file:
        same_file.seek(ALIGNMENT + at)
        same_file.write(bytes([int(values[at]) ^ 0x10]))
    with pytest.raises(ScratchDamaged, match="gave back other bytes"):
        extent.read(0, torch.empty_like(values)).wait()


def test_no_room_is_told_before_anything_is_written(scratch: ScratchFile) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * BLOCK, hard))
    try:
        scratch.reserve(3 * BLOCK)
        with pytest.raises(ScratchFull, match="no room") as told:
            scratch.reserve(2 * BLOCK)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert told.value.code == "scratch_full"
    assert str(scratch.directory) in str(told.value)


def test_a_disk_that_refuses(scratch: ScratchFile) -> None:
    extent = scratch.reserve(BLOCK)
    values = random_bytes(BLOCK)
    with patch.object(disk.os, "pwritev", side_effect=OSError(5, "Input/output error")):
        write = extent.write(0, values)
        with pytest.raises(ScratchFailed, match="Input/output error"):
            write.wait()


def test_a_directory_that_can_not_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ScratchFailed, match="can't be opened"):
        ScratchFile(tmp_path / "file" / "below")
