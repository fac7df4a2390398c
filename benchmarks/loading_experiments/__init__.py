"""Experiments with loads of published models: `python -m benchmarks.loading_experiments`.

Several processes, files in memory, other jobs beside the load, and what the machine does meanwhile. The
table of all loaders on one disk is `python -m benchmarks.loading`.
"""
