import os
from pathlib import Path

import numpy as np
import pytest

from zero_core.data.cache import Cache

ARRAYS = {"ids": np.arange(100, dtype=np.int32), "mask": np.arange(100) % 2 == 0}


def test_an_entry_comes_back_as_it_was_and_mapped(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    assert cache.meta("a") is None
    cache.store("a", ARRAYS, {"x": [1]})
    assert cache.meta("a") == {"x": [1]}
    arrays, meta = cache.read("a")
    assert meta == {"x": [1]}
    assert arrays.keys() == ARRAYS.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name])
        assert array.dtype == ARRAYS[name].dtype
        assert isinstance(array.base, np.memmap)
        assert not array.flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("damage", ["changed", "short", "missing", "no sums", "not json"])
def test_a_damaged_entry_counts_as_none_and_is_replaced(tmp_path: Path, damage: str) -> None:
    cache = Cache(tmp_path)
    cache.store("a", ARRAYS, {})
    file, sums = tmp_path / "a" / "ids.npy", tmp_path / "a" / "entry.json"
    content = file.read_bytes()
    match damage:
        case "changed":
            file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        case "short":
            file.write_bytes(content[:-1])
        case "missing":
            file.unlink()
        case "no sums":
            sums.unlink()
        case "not json":
            sums.write_text("[")
    assert cache.meta("a") is None
    cache.store("a", ARRAYS, {})
    assert cache.meta("a") == {}


def test_who_reads_an_entry_keeps_it_when_it_is_replaced(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.store("a", ARRAYS, {})
    arrays, _ = cache.read("a")
    cache.store("a", {name: array[::-1] for name, array in ARRAYS.items()}, {})
    np.testing.assert_array_equal(arrays["ids"], ARRAYS["ids"])


def test_what_was_not_used_for_longest_makes_room(tmp_path: Path) -> None:
    cache = Cache(tmp_path, limit_bytes=2500)  # Two entries of about 1,000 bytes.
    for age, key in ((30, "old"), (20, "older but used")):
        cache.store(key, ARRAYS, {})
        os.utime(tmp_path / key, (age, age))
    assert cache.meta("older but used") == {}
    cache.store("new", ARRAYS, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "older but used"]
    Cache(tmp_path, limit_bytes=1).store("larger than all", ARRAYS, {})
    assert [path.name for path in tmp_path.iterdir()] == ["larger than all"]


def test_what_a_killed_process_left_goes_and_what_is_being_written_stays(tmp_path: Path) -> None:
    left, writing = tmp_path / ".aside-1", tmp_path / ".aside-2"
    left.mkdir()
    writing.mkdir()
    os.utime(left, (1, 1))
    Cache(tmp_path).store("a", ARRAYS, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".aside-2", "a"]


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        Cache(tmp_path).store("a", {"ids": np.array([{}], dtype=object)}, {})
    assert list(tmp_path.iterdir()) == []
