"""The whole open path of published models, under files that are made by structure and then damaged.

`python -m fuzz.open_path --seconds 60`; see `fuzz/README.md`.
"""
