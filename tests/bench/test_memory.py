import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import torch
from bench import memory
cpu = torch.device("cpu")
before, peak_before = memory.in_use(cpu), memory.peak(cpu)
tensor = torch.ones(32 * 2**20)
during = memory.in_use(cpu)
del tensor
print(during - before, memory.in_use(cpu) - before, memory.peak(cpu) - peak_before)
"""


def test_memory_in_use_falls_again_and_its_peak_does_not() -> None:
    """128 MiB are taken and given back, in a process whose peak nothing else has raised."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    taken, kept, peak = (int(word) / 2**20 for word in done.stdout.split())
    assert 127 < taken < 140
    assert kept < 12
    assert 115 < peak < 140
