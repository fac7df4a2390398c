"""The boundary between the engine and Python."""
