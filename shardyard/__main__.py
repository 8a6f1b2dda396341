"""``python -m shardyard`` is the ``shardyard`` command."""

from shardyard.cli import main

main()
