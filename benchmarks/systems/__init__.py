"""The systems that are measured, by name. Importing this imports none of their libraries."""

from benchmarks.systems.base import System, UnavailableError
from benchmarks.systems.limit import Limit
from benchmarks.systems.orbax import Orbax, OrbaxPlain
from benchmarks.systems.orbax_readers import WaystationOfOrbax, WaystationOfOrbaxPlain
from benchmarks.systems.published import (
    Published,
    PublishedAligned,
    PublishedInFiles,
    PublishedOriginal,
    WaystationSafetensorsJax,
    WaystationSafetensorsTorch,
)
from benchmarks.systems.safetensors import SafetensorsJax, SafetensorsTorch
from benchmarks.systems.streamers import Fastsafetensors, InstantTensor, RunaiStreamer
from benchmarks.systems.torch_dcp import TorchDcp
from benchmarks.systems.torch_save import TorchSave
from benchmarks.systems.waystation import (
    WaystationFiles,
    WaystationJax,
    WaystationNumpy,
    WaystationOcdbt,
    WaystationOcdbtPlain,
    WaystationTorch,
)

SYSTEMS: dict[str, type[System]] = {
    system.name: system
    for system in (
        Limit,
        WaystationJax,
        WaystationNumpy,
        WaystationTorch,
        WaystationFiles,
        WaystationOcdbt,
        WaystationOcdbtPlain,
        WaystationSafetensorsJax,
        WaystationSafetensorsTorch,
        Orbax,
        OrbaxPlain,
        WaystationOfOrbax,
        WaystationOfOrbaxPlain,
        TorchDcp,
        TorchSave,
        SafetensorsJax,
        SafetensorsTorch,
        Fastsafetensors,
        RunaiStreamer,
        InstantTensor,
        Published,
        PublishedInFiles,
        PublishedAligned,
        PublishedOriginal,
    )
}

USUAL_SYSTEMS = [name for name, system in SYSTEMS.items() if system.is_usual]

__all__ = ["SYSTEMS", "USUAL_SYSTEMS", "System", "UnavailableError"]
