"""A sequence of checkpoints: `Checkpointer`, and the policies by which it saves and keeps them."""

from waystation.training import errors, preservation_policies, save_decision_policies
from waystation.training.checkpointer import Checkpointer
from waystation.training.mirror import MirrorStatistics, mirror
from waystation.training.preemption import SigtermHandler, handle_sigterm
from waystation.training.remote import Remote, RemoteStatistics
from waystation.training.step_metadata import CheckpointMetadata, RootMetadata

__all__ = [
    "CheckpointMetadata",
    "Checkpointer",
    "MirrorStatistics",
    "Remote",
    "RemoteStatistics",
    "RootMetadata",
    "SigtermHandler",
    "errors",
    "handle_sigterm",
    "mirror",
    "preservation_policies",
    "save_decision_policies",
]
