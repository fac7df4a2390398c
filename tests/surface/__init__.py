"""Our names beside those of Orbax."""
