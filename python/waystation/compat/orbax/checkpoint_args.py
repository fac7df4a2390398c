"""The registration of arguments with handlers, under the name of its module in Orbax."""

from waystation.compat.orbax.args import (
    CheckpointArgs,
    get_registered_args_cls,
    get_registered_handler_cls,
    has_registered_args,
    register_with_handler,
)

__all__ = [
    "CheckpointArgs",
    "get_registered_args_cls",
    "get_registered_handler_cls",
    "has_registered_args",
    "register_with_handler",
]
