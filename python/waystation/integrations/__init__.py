"""Waystation within other frameworks. Each module imports its framework, and nothing here imports them."""
