"""Tests of checkpoints: save, load, commit, metadata."""
