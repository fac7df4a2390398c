"""Guides of other libraries, run with Waystation."""
