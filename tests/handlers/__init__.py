"""Tests of checkpointables and their handlers."""
