"""Waystation within programs and libraries of other frameworks."""
