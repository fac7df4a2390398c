"""Errors and warnings of a sequence of checkpoints. The errors are `waystation.errors` like all others."""

from waystation._errors import StepAlreadyExistsError, StepNotFoundError


class DamagedCheckpointWarning(UserWarning):
    """Checkpoints were found to be damaged, and passed over for an older one."""


class RemoteWarning(UserWarning):
    """Something has failed at the remote of a `Checkpointer`. It is tried again."""


__all__ = [
    "DamagedCheckpointWarning",
    "RemoteWarning",
    "StepAlreadyExistsError",
    "StepNotFoundError",
]
