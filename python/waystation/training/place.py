"""Where a sequence of checkpoints is, and what all parts of a `Checkpointer` share about it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from waystation import storage
from waystation._options import Options
from waystation._options.in_effect import current_options, in_block
from waystation.checkpoint.context import Context
from waystation.checkpoint.sessions import open_session
from waystation.coordination import Session
from waystation.storage.leases import Leases
from waystation.storage.store_leases import StoreLeases
from waystation.training.catalogue import Catalogue
from waystation.training.step_names import NameFormat


@dataclass
class Place:
    """One directory of checkpoints.

    Attributes:
        root: Its location in its storage: an absolute path, or a location in an object store.
        name_format: How its steps are named.
        context: The options of calls that come from no context's block.
        removed_to: The directory in `root` to which steps are moved instead of being removed; None removes.
        catalogue: Which steps are there.
        leases: Which of them somebody reads.
    """

    root: str
    name_format: NameFormat
    context: Context
    removed_to: str | None = None
    catalogue: Catalogue = field(default_factory=Catalogue)
    leases: Leases | StoreLeases = field(init=False)

    def __post_init__(self) -> None:
        self.leases = StoreLeases(self.root) if storage.is_in_store(self.root) else Leases(self.root)

    @contextlib.contextmanager
    def options(self) -> Iterator[Options]:
        """The options in effect within the block: those of the context around the call, else its own."""
        if in_block():
            yield current_options()
            return
        with self.context:
            yield current_options()

    def path_of(self, step: int) -> storage.AnyPath:
        """The directory of a step: the one that it has, or else the one that it is to have."""
        found = self.catalogue.find(step)
        if found is not None:
            return found.path
        return storage.as_path(os.path.join(self.root, self.name_format.build_name(step)))

    def session(self, what: str, options: Options) -> Session:
        """Opens a session of all processes."""
        where = "" if options.multiprocessing.primary_host is None else f" in '{self.root}'"
        return open_session(f"{what}{where}", options)
