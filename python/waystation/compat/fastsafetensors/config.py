"""The configuration of `AutoLoader`: a JSON file that an environment variable names.

Sections `parallel` and `debug` are read as if their entries stood at the top; other sections belong to the
loader of their name. What is not known is left out, as fastsafetensors does, so that one file serves both.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from waystation._errors import Corrupt, InvalidInput, NotFound, from_os_error

CONFIG_ENV_VAR = "FASTSAFETENSORS_CONFIG"
DEFAULT_CONFIG_PATH = "fastsafetensors.json"

_FLAT_SECTIONS = frozenset({"parallel", "debug"})
_COMMON = frozenset({"framework", "debug_log", "set_numa", "disable_cache"})

_log = logging.getLogger("waystation")


@dataclass
class LoaderConfig:
    """What to load with, and how. The attributes are parameters of the loaders.

    Attributes:
        loader: `"base"`.
        framework: As of `SafeTensorsFileLoader`, like the three after it.
        debug_log: …
        set_numa: …
        disable_cache: …
        use_pipeline: Whether batches are read ahead: `queue_size` counts only then.
        max_concurrent_producers: As of `PipelineParallel`, like the ones after it.
        queue_size: …
        use_tqdm_on_load: …
        max_batch_bytes: …
        use_chunk_budget_as_allocation_size: …
        device_memory_budget: …
    """

    loader: str = "base"
    framework: str = "pytorch"
    debug_log: bool = False
    set_numa: bool = True
    disable_cache: bool = True
    use_pipeline: bool = False
    max_concurrent_producers: int = 1
    queue_size: int = 0
    use_tqdm_on_load: bool = True
    max_batch_bytes: int | None = None
    use_chunk_budget_as_allocation_size: bool = False
    device_memory_budget: int | None = None
    _extensions: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_concurrent_producers != 1:
            raise InvalidInput(
                f"max_concurrent_producers must be 1, not {self.max_concurrent_producers}: "
                "batches come in one order"
            )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The configuration of a decoded file.

        Raises:
            ValueError: A value cannot be had.
        """
        known = {own.name for own in fields(cls)} - {"_extensions"}
        given: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        for key, value in data.items():
            if not isinstance(value, Mapping):
                given[key] = value
            elif key in _FLAT_SECTIONS:
                given.update(value)
            else:
                sections[key] = dict(value)
        unknown = sorted(given.keys() - known)
        if unknown:
            _log.debug("the configuration has entries that no loader knows: %s", ", ".join(unknown))
        return cls(**{key: value for key, value in given.items() if key in known}, _extensions=sections)

    @classmethod
    def from_file(cls, path: str) -> Self:
        """The configuration in a file.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is no JSON, or a value cannot be had.
        """
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
        except OSError as error:
            raise from_os_error(error, "read", path) from error
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"the configuration is no valid JSON: {error}", path=path) from error
        if not isinstance(content, dict):
            raise Corrupt("the configuration is no JSON object", path=path)
        return cls.from_dict(content)

    def get_extension_config(self, name: str) -> dict[str, Any]:
        """The section of a loader, without what all loaders have."""
        own = self._extensions.get(name, {})
        return {key: value for key, value in own.items() if key not in _COMMON}

    def create_parallel_kwargs(self) -> dict[str, Any]:
        """The parameters of `PipelineParallel`."""
        found: dict[str, Any] = {
            "queue_size": -1,
            "max_batch_bytes": self.max_batch_bytes,
            "use_chunk_budget_as_allocation_size": self.use_chunk_budget_as_allocation_size,
            "device_memory_budget": self.device_memory_budget,
        }
        if self.use_pipeline:
            found |= {
                "max_concurrent_producers": self.max_concurrent_producers,
                "queue_size": self.queue_size,
                "use_tqdm_on_load": self.use_tqdm_on_load,
            }
        return found


def load_config() -> LoaderConfig:
    """The configuration that `FASTSAFETENSORS_CONFIG` names; else that of `fastsafetensors.json` in the
    present directory; else the defaults.

    Raises:
        FileNotFoundError: The variable names no file.
    """
    path = os.environ.get(CONFIG_ENV_VAR)
    if path is not None and not os.path.isfile(path):
        raise NotFound(f"{CONFIG_ENV_VAR} names '{path}', which is no file", path=path)
    if path is None and os.path.isfile(DEFAULT_CONFIG_PATH):
        path = DEFAULT_CONFIG_PATH
    return LoaderConfig() if path is None else LoaderConfig.from_file(path)
