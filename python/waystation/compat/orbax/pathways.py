"""`orbax.checkpoint.pathways`: what programs that also run on Pathways name anywhere, such as tunix."""

from typing import Any, NoReturn

from waystation._errors import Unsupported
from waystation._options import CheckpointingImpl

__all__ = ["CheckpointingImpl", "register_type_handlers"]


def register_type_handlers(
    use_single_replica_array_handler: bool = False, checkpointing_impl: Any = None, **kwargs: Any
) -> NoReturn:
    """Would have the processes of Pathways save arrays.

    Raises:
        Unsupported: Always.
    """
    del use_single_replica_array_handler, checkpointing_impl, kwargs
    raise Unsupported(
        "programs on Pathways are not served by this version; without Pathways leave out "
        "pathways.register_type_handlers(), since each process saves what its devices hold"
    )
