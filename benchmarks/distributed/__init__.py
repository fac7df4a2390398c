"""Benchmarks of programs of several processes and many devices: `python -m benchmarks.distributed`."""
