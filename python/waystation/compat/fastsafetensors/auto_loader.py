"""A loader that is made as a configuration file says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from waystation._errors import InvalidInput
from waystation.compat.fastsafetensors.config import LoaderConfig, load_config
from waystation.compat.fastsafetensors.loader import SafeTensorsFileLoader
from waystation.compat.fastsafetensors.parallel_loader import PipelineParallel

_BASE = "base"


class AutoLoader:
    """Loads files as `load_config` says.

    Args:
        pg: A process group of torch; a `SingleGroup` or None for this process alone.
        hf_weights_files: The files.
        device: Where tensors go.

    Raises:
        ValueError: The configuration names a loader that is not here, or its values do not go together.
        FileNotFoundError: There is no configuration where one was said to be.
    """

    def __init__(self, pg: Any, hf_weights_files: Sequence[str], device: Any = "cpu") -> None:
        self._config = load_config()
        if self._config.loader != _BASE:
            raise InvalidInput(
                f"the configuration asks for the loader {self._config.loader!r}; only {_BASE!r} is here"
            )
        section = self._config.get_extension_config(_BASE)
        parameters = SafeTensorsFileLoader.process_extension_config(
            section, hf_weights_files=hf_weights_files
        )
        loader = SafeTensorsFileLoader(
            pg,
            device,
            framework=self._config.framework,
            disable_cache=self._config.disable_cache,
            **parameters,
        )
        self._pipeline = PipelineParallel(
            pg, loader, hf_weights_files, **self._config.create_parallel_kwargs()
        )

    @property
    def config(self) -> LoaderConfig:
        """What the configuration says."""
        return self._config

    def iterate_weights(self) -> Iterator[tuple[str, Any]]:
        """Names and whole tensors, see `PipelineParallel.iterate_weights`."""
        return self._pipeline.iterate_weights()

    def close(self) -> None:
        """Closes the loader. Idempotent."""
        self._pipeline.close()
