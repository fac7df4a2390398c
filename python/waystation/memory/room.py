"""Whether the store of an agent has room for the versions that it is to keep.

Each shard takes a slot for every committed version that is kept, and one for the next, while that is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waystation._errors import MemoryTooSmall


def check_room(status: Mapping[str, Any], shards: int) -> None:
    """Checks it.

    Args:
        status: Of the agent, as `AgentClient.status` gives it.
        shards: How many shards the agent is to keep.

    Raises:
        MemoryTooSmall: There are too few slots.
    """
    versions, slot_bytes, found = status["versions_per_shard"], status["slot_bytes"], status["slot_count"]
    needed = shards * versions
    if needed <= found:
        return
    raise MemoryTooSmall(
        f"the agent in '{status['directory']}' is to keep {versions - 1} committed versions of {shards} "
        f"shards, and the next one while it is written: that takes {needed} slots, {needed * slot_bytes} "
        f"bytes, and it has {found}, {found * slot_bytes} bytes. Start it with --slots {needed} (launch: "
        "give more --agent-memory), or have fewer committed versions kept: --versions 1 (launch: "
        "--agent-versions 1) leaves nothing to fall back to",
        path=status["directory"],
        needed_bytes=needed * slot_bytes,
        found_bytes=found * slot_bytes,
    )
