"""Drop-ins for other libraries: the same functions and classes under another import, on this engine."""
