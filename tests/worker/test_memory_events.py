"""The kernel's counters of processes killed for memory, in each of the places where they are."""

from pathlib import Path

from worker import memory_events
from worker.memory_events import oom_kills


def test_the_machine_says_how_often() -> None:
    assert oom_kills() >= 0


def test_a_counter_is_found_by_path_or_at_the_mount(tmp_path: Path) -> None:
    counter = memory_events._counter
    assert counter(tmp_path, "/pod/job", "memory.events") is None
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert counter(tmp_path, "/pod/job", "memory.events") == 2
    (tmp_path / "pod" / "job").mkdir(parents=True)
    (tmp_path / "pod" / "job" / "memory.events").write_text("oom_kill 5\n")
    assert counter(tmp_path, "/pod/job", "memory.events") == 5
