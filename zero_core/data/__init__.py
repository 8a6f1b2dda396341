"""From a JSONL file to the batches of a step. ``examples``, ``lines`` and ``formats`` load no torch."""
