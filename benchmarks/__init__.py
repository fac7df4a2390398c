"""Benchmarks of Waystation against other libraries and against the disk itself.

`python -m benchmarks` measures, `python -m benchmarks.orbax_table` repeats a published table at the size
of one machine, `python -m benchmarks.worker` is the fresh process in which one operation is measured.
`benchmarks/README.md` says what every figure means.
"""
