import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.waiting import wait_until
from worker import sweep
from zero_core.training.parent_death import PARENT_VARIABLE

TAG = "ftjob-sweep-7"

FAMILY = """
import os, subprocess, sys
child = [sys.executable, "-c", "import signal; signal.pause()"]
subprocess.Popen(child, start_new_session=True, env=os.environ | {"RANK": "0"})
subprocess.Popen(child, start_new_session=True, env=os.environ | {"RANK": "1"})
print("up", flush=True)
import signal
signal.pause()
"""


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A launcher with two ranks, each in a session of its own."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", FAMILY], stdout=subprocess.PIPE, env=os.environ | {sweep.ATTEMPT_VARIABLE: TAG}
    )
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == b"up\n"
    yield launcher
    sweep.kill_all(TAG, 10)
    launcher.communicate()


def test_every_process_of_the_attempt_is_found_and_killed(family: subprocess.Popen[bytes]) -> None:
    wait_until(lambda: len(sweep.ranks(TAG)) == 2, "both ranks are up")
    found = sweep.processes(TAG)
    assert len(found) == 3
    assert family.pid in {process.pid for process in found}
    assert family.pid not in {process.pid for process in sweep.ranks(TAG)}
    assert sweep.kill_all(TAG, 10)
    assert all(process.gone() for process in found)
    assert sweep.processes(TAG) == []


def test_killing_what_is_gone_succeeds() -> None:
    assert sweep.kill_all("ftjob-none-1", 1)


def test_a_similar_tag_is_another_attempt(family: subprocess.Popen[bytes]) -> None:
    for other in ("ftjob-sweep-77", "ftjob-sweep-", "xftjob-sweep-7"):
        assert sweep.processes(other) == []
        assert sweep.kill_all(other, 1)
    assert family.poll() is None


def test_a_reused_process_id_is_another_process() -> None:
    me = sweep.this_process()
    assert not me.gone()
    stranger = sweep.ProcessIdentity(me.pid, me.start - 1)
    assert stranger.gone()
    # Would end this test if the start time were not compared.
    stranger.signal(signal.SIGKILL)


def test_a_zombie_is_gone() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    start = sweep.start_time(child.pid)
    assert start is not None
    process = sweep.ProcessIdentity(child.pid, start)
    wait_until(process.gone, "the child has ended, though nobody has waited for it", 10)
    child.wait()


def test_a_command_dies_with_its_parent(tmp_path: Path) -> None:
    """The parent is killed with SIGKILL: only the kernel can tell the child."""
    said = tmp_path / "said"
    told = f"import os, signal; print(os.getpid(), os.environ['{PARENT_VARIABLE}']); signal.pause()"
    start = (
        "import os, subprocess, sys\n"
        "command = [sys.executable, '-m', 'zero_core.training.parent_death', str(os.getpid())]\n"
        "subprocess.run([*command, *sys.argv[2:]], stdout=open(sys.argv[1], 'w'))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", start, str(said), sys.executable, "-u", "-c", told])
    pid, known_as = wait_until(lambda: said.exists() and said.read_text().split(), "the child is up", 20)
    assert pid == known_as
    start_time = sweep.start_time(int(pid))
    assert start_time is not None
    parent.kill()
    parent.wait()
    wait_until(sweep.ProcessIdentity(int(pid), start_time).gone, "the child has died", 5)


def test_a_command_whose_parent_is_gone_already_never_starts() -> None:
    command = [
        sys.executable,
        "-m",
        "zero_core.training.parent_death",
        "1",
        sys.executable,
        "-c",
        "print('started')",
    ]
    done = subprocess.run(command, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == b""
