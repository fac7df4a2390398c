"""What the memory tier says where others raise."""


class MemoryTierWarning(UserWarning):
    """The memory tier could not save or load something, and the program goes on without it: what was to be
    saved is not in memory, what was to be loaded comes from an older version or from the directory."""


_PLACES = {"memory": "memory", "directory": "the directory"}


class DoubtedStepWarning(MemoryTierWarning):
    """A step in memory was restored again and again, and nothing newer was saved: it may be what ends the
    program. It is kept, and loaded only if there is nothing else, or if it is asked for by number.

    Attributes:
        step: The step.
        restored_step: The step that is restored: its own number if there is nothing else.
        restored_tier: Where that comes from, "memory" or "directory".
    """

    step: int
    restored_step: int
    restored_tier: str

    def __init__(self, step: int, restored_step: int, restored_tier: str) -> None:
        instead = f"step {restored_step} is restored from {_PLACES[restored_tier]} instead"
        if (restored_step, restored_tier) == (step, "memory"):
            instead = "it is restored all the same, as there is nothing else"
        super().__init__(
            f"step {step} in memory is in doubt: programs began with it, and ended before they saved "
            f"anything newer; {instead}"
        )
        self.step, self.restored_step, self.restored_tier = step, restored_step, restored_tier


class LostStepWarning(MemoryTierWarning):
    """A step was committed in memory, and can be loaded no more: too many hosts were lost with its copies, or
    its only copy is damaged.

    Attributes:
        step: The step.
        whole_step: The newest step that is still whole.
        tiers: Where that is.
    """

    step: int
    whole_step: int
    tiers: tuple[str, ...]

    def __init__(self, step: int, whole_step: int, tiers: tuple[str, ...]) -> None:
        super().__init__(
            f"step {step} was committed in memory, and a part of it is whole in the memory of no host that "
            f"was heard any more; the newest step that is whole is {whole_step} (in {' and '.join(tiers)})"
        )
        self.step, self.whole_step, self.tiers = step, whole_step, tiers
