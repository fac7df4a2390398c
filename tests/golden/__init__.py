"""Checkpoints of every format version, and what reads them."""
