"""What is in the directory when a `Checkpointer` opens or reloads it, as all processes see it.

The primary looks and tells the others. With local storage each process looks into its own, and a step counts
if all have their part of it; what a crash has left undecided is decided first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from waystation._options import Options
from waystation.checkpoint import local_storage
from waystation.coordination import Session
from waystation.storage import attempts
from waystation.training.catalogue import Listing, relocated
from waystation.training.place import Place


def take_stock(session: Session, place: Place, options: Options, *, with_records: bool) -> Listing:
    """Looks into the directory, together with the other processes."""

    def read() -> Listing:
        return Listing.read(place.root, place.name_format, with_records=with_records)

    if options.multiprocessing.primary_host is not None:
        return Listing.decode(session.broadcast(lambda: read().encode()))
    for name in _unsettled(session, place):
        local_storage.settle(session, os.path.join(place.root, name))
    own: list[Listing] = []

    def look() -> bytes:
        own.append(read())
        return own[0].encode()

    agreed = Listing.decode(session.round(look, _in_all))
    return Listing(
        [relocated(info, place.root) for info in agreed.committed],
        [relocated(info, place.root) for info in agreed.damaged],
    )


def _in_all(parts: Sequence[bytes]) -> bytes:
    """What the primary has found, as far as all the others have it too."""
    listings = [Listing.decode(part) for part in parts]
    damaged = {info.step for listing in listings for info in listing.damaged}
    everywhere = set.intersection(
        *({info.step for info in (*listing.committed, *listing.damaged)} for listing in listings)
    )
    infos = [info for info in (*listings[0].committed, *listings[0].damaged) if info.step in everywhere]
    return Listing(
        [info for info in infos if info.step not in damaged],
        [info for info in infos if info.step in damaged],
    ).encode()


def _unsettled(session: Session, place: Place) -> list[str]:
    """The checkpoints of which some process has an undecided part, or some have one and some have none."""

    def look() -> bytes:
        present = [
            info.path.name
            for info in Listing.read(place.root, place.name_format, with_records=False).committed
        ]
        undecided = [found.target for found in attempts.leftovers(place.root) if found.undecided]
        return json.dumps([present, undecided]).encode()

    def decide(parts: Sequence[bytes]) -> bytes:
        found = [json.loads(part) for part in parts]
        present = [set(names) for names, _ in found]
        undecided = {name for _, names in found for name in names}
        torn = set.union(*present) - set.intersection(*present)
        return json.dumps(sorted(undecided | torn)).encode()

    names: list[str] = json.loads(session.round(look, decide))
    return names
