"""What `fastsafetensors` exports: safetensors files onto devices, by one process or by several together."""

from waystation.compat.fastsafetensors.allocation import live_allocation_bytes
from waystation.compat.fastsafetensors.auto_loader import AutoLoader
from waystation.compat.fastsafetensors.common import (
    SafeTensorsMetadata,
    SingleGroup,
    TensorFrame,
    get_device_numa_node,
)
from waystation.compat.fastsafetensors.config import LoaderConfig, load_config
from waystation.compat.fastsafetensors.ep_slice import (
    expert_parallel_filter,
    expert_parallel_filter_from_env,
    owned_expert_range,
)
from waystation.compat.fastsafetensors.file_buffer import FilesBufferOnDevice
from waystation.compat.fastsafetensors.loader import SafeTensorsFileLoader, fastsafe_open
from waystation.compat.fastsafetensors.parallel_loader import ParallelLoader, PipelineParallel
from waystation.compat.fastsafetensors.planning import BudgetInfeasibleError
from waystation.compat.fastsafetensors.saver import ParallelSaver

__all__ = [
    "AutoLoader",
    "BudgetInfeasibleError",
    "FilesBufferOnDevice",
    "LoaderConfig",
    "ParallelLoader",
    "ParallelSaver",
    "PipelineParallel",
    "SafeTensorsFileLoader",
    "SafeTensorsMetadata",
    "SingleGroup",
    "TensorFrame",
    "expert_parallel_filter",
    "expert_parallel_filter_from_env",
    "fastsafe_open",
    "get_device_numa_node",
    "live_allocation_bytes",
    "load_config",
    "owned_expert_range",
]
