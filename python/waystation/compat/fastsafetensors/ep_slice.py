"""Which experts of a model a process needs, as a filter of tensor names.

Experts are divided into consecutive blocks, as even as possible, the first ones larger.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable

from waystation._errors import InvalidInput

# As in "model.layers.3.mlp.experts.42.w1.weight".
DEFAULT_EXPERT_PATTERN = re.compile(r"\.experts\.(\d+)\.")


def owned_expert_range(num_experts: int, ep_size: int, ep_rank: int) -> tuple[int, int]:
    """The first expert of a process, and the one after its last.

    Raises:
        ValueError: There is no such process.
    """
    if ep_size < 1 or not 0 <= ep_rank < ep_size:
        raise InvalidInput(f"there is no process {ep_rank} of {ep_size}")
    each, more = divmod(num_experts, ep_size)
    begin = ep_rank * each + min(ep_rank, more)
    return begin, begin + each + (ep_rank < more)


def expert_parallel_filter(
    num_experts: int, ep_size: int, ep_rank: int, pattern: re.Pattern[str] = DEFAULT_EXPERT_PATTERN
) -> Callable[[str], bool]:
    """What says yes to the names of tensors that a process needs: of its experts, and all that are of none.

    Args:
        num_experts: Of a layer.
        ep_size: The number of processes.
        ep_rank: Which of them.
        pattern: Finds the number of the expert in a name, as its first group.

    Raises:
        ValueError: There is no such process.
    """
    begin, end = owned_expert_range(num_experts, ep_size, ep_rank)

    def keep(name: str) -> bool:
        found = pattern.search(name)
        return found is None or begin <= int(found[1]) < end

    return keep


def expert_parallel_filter_from_env() -> Callable[[str], bool] | None:
    """The filter that the environment asks for; None if it asks for none.

    `FASTSAFETENSORS_EP_SLICE=1` does, with the number of experts in `FASTSAFETENSORS_EP_NUM_EXPERTS`. Which
    process this is of how many is in `FASTSAFETENSORS_EP_RANK` and `_EP_SIZE`; otherwise it is that of
    torch.distributed where that was set up, or what `RANK` and `WORLD_SIZE` say.
    """
    experts = int(os.environ.get("FASTSAFETENSORS_EP_NUM_EXPERTS", "0"))
    if os.environ.get("FASTSAFETENSORS_EP_SLICE") != "1" or experts < 1:
        return None
    size = int(os.environ.get("FASTSAFETENSORS_EP_SIZE", "0"))
    rank = int(os.environ.get("FASTSAFETENSORS_EP_RANK", "-1"))
    known_rank, known_size = _place_in_program()
    size = size if size > 0 else known_size
    rank = rank if rank >= 0 else known_rank
    return expert_parallel_filter(experts, size, rank) if size > 1 else None


def _place_in_program() -> tuple[int, int]:
    """Which process this is, and of how many."""
    if "torch" in sys.modules:
        from waystation.frameworks import torch_groups

        found = torch_groups.place_in_program()
        if found is not None:
            return found
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
