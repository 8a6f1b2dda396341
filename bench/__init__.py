"""Benchmarks of the engine beside its peers.

``python -m bench.zero`` measures on CPU ranks over gloo, ``python -m bench.gpu`` on the GPUs present; both
write to ``docs/benchmarks``. Every run is a set of processes of its own, and the engines take turns.
"""
