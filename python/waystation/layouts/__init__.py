"""Layouts: how checkpoints lie on disk."""
