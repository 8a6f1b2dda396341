import os
from pathlib import Path

import pytest

from worker.hang import HangWatch
from worker.run_directory import RunDirectory


def test_a_rank_hangs_once_its_heartbeat_stands_still_whatever_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("worker.hang.time.monotonic", lambda: now)
    watch = HangWatch(RunDirectory(tmp_path), ranks=2, seconds=10)

    def hung_after(seconds: float, *beating: int) -> bool:
        nonlocal now
        now += seconds
        for rank in beating:
            path = tmp_path / f"heartbeat-{rank}"
            path.touch()
            # Clocks of file systems are coarse.
            os.utime(path, ns=(0, round(now * 1e9)))
        return watch.hung()

    # Files are prepared for longer than the limit, before any step.
    assert not any(hung_after(4, 0, 1) for _ in range(10))
    assert not hung_after(9, 0)
    assert hung_after(2, 0)
