"""The systems that are measured, by name. Importing this imports none of their libraries."""

from benchmarks.systems.base import System
from benchmarks.systems.limit import Limit
from benchmarks.systems.orbax import Orbax, OrbaxPlain
from benchmarks.systems.safetensors import SafetensorsJax, SafetensorsTorch
from benchmarks.systems.streamers import Fastsafetensors, RunaiStreamer
from benchmarks.systems.torch_dcp import TorchDcp
from benchmarks.systems.waystation import WaystationJax, WaystationTorch

SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (
        Limit,
        WaystationJax,
        WaystationTorch,
        Orbax,
        OrbaxPlain,
        TorchDcp,
        SafetensorsJax,
        SafetensorsTorch,
        Fastsafetensors,
        RunaiStreamer,
    )
}

__all__ = ["SYSTEMS", "System"]
