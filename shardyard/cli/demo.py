"""``shardyard demo``: the main job on real input, from nothing."""

from shardyard.address import data_dir
from shardyard.cli.up import DataDir
from shardyard.demo.run import run_demo


def demo(data: DataDir = None) -> None:
    """Fine-tune a small real model on this machine, and show what came of it."""
    run_demo(data or data_dir())
