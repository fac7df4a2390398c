"""What the memory tier says where others raise."""


class MemoryTierWarning(UserWarning):
    """The memory tier could not save or load something, and the program goes on without it: what was to be
    saved is not in memory, what was to be loaded comes from an older version or from the directory."""
