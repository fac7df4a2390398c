"""The release of Orbax whose interface this is."""

__version__ = "0.12.8"
