"""The model in vLLM, on the CPU: who brings its weights is all that differs.

vLLM makes the model first and copies what a loader hands it into the parameters, some of which hold several
tensors: whoever loads, the weights end in memory. Its own functions are what runs. A *drop-in* is one of them
with an import changed, to `waystation.compat`. The function for fastsafetensors names a CUDA device, whatever
the machine has; here the loader that it makes, of either library, is told to read onto the CPU.

Importing this imports neither vLLM nor a loader.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import startup_model
from benchmarks.startup_loaders import Clock, Loader, Start
from benchmarks.systems.base import DEFAULT

TEACHER = "safetensors"
OURS = "fastsafetensors through waystation.compat"
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine runs in the process that is timed
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CACHE_ROOT": "{cache}/vllm",
    "VLLM_CONFIG_ROOT": "{cache}/vllm",
}
"""What vLLM is told by the environment; `{cache}` is a directory that all processes share."""
OPTIONS = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "enforce_eager": True,  # to compile would take longer than all that is measured
    "max_model_len": 1024,
    "max_num_seqs": 1,
    "kv_cache_memory_bytes": 256 << 20,
    "enable_prefix_caching": False,
    "use_tqdm_on_load": False,
}
WAYS: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "prefetch": {"safetensors_load_strategy": "prefetch"},
    "threads": {"model_loader_extra_config": {"enable_multithread_load": True}},
}
"""The manners of vLLM's function for safetensors: options that it has."""
_LOADERS = "vllm.model_executor.model_loader"
_FUNCTIONS = f"{_LOADERS}.weight_utils"


@dataclass(slots=True)
class Served:
    """A model that vLLM runs.

    Attributes:
        engine: Takes requests, and is driven step by step.
        digest: Of the weights and buffers as they were loaded; then vLLM packs them for its kernels.
    """

    engine: Any = None
    digest: str = ""


def say(model: Served, tokens: int, on_token: Callable[[], None] = lambda: None) -> list[int]:
    """What the model says to the prompt, each time the likeliest token; `on_token` is called after each."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    model.engine.add_request("only", {"prompt_token_ids": list(startup_model.PROMPT)}, wanted)
    heard: list[int] = []
    while model.engine.has_unfinished_requests():
        for output in model.engine.step():
            for token in output.outputs[0].token_ids[len(heard) :]:
                heard.append(int(token))
                on_token()
    return heard


def digest(model: Served) -> str:
    """Of every weight and buffer: its name, dtype, shape and bytes."""
    return model.digest


# ---- starting ----------------------------------------------------------------------------------


def _loader(
    name: str,
    distribution: str,
    load_format: str,
    change: Callable[[str], None],
    ways: tuple[str, ...] = (DEFAULT,),
) -> Loader:
    """A loader of vLLM's; `change` is told the way, and changes imports."""

    def prepare(way: str) -> Start:
        change(way)
        from vllm import LLM

        def start(directory: Path, clock: Clock) -> Served:
            served = Served()
            _watch(load_format, served, clock)
            options = {**OPTIONS, **WAYS.get(way, {}), "load_format": load_format}
            served.engine = LLM(str(directory), **options).llm_engine
            return served

        return start

    return Loader(name, prepare, distribution, ways, is_ours=distribution == "waystation")


def _watch(load_format: str, served: Served, clock: Clock) -> None:
    """Marks when the model is made and when it has its weights, and takes their digest then."""
    loaders = importlib.import_module(_LOADERS)
    loader = type(loaders.get_model_loader(loaders.LoadConfig(load_format=load_format)))
    load_weights = loader.load_weights

    def watched(self: Any, model: Any, configuration: Any) -> None:
        clock.mark("skeleton")
        load_weights(self, model, configuration)
        clock.mark("loaded")
        with clock.standing():
            served.digest = startup_model.digest(model)

    loader.load_weights = watched


# ---- changed imports ---------------------------------------------------------------------------


def _change_nothing(way: str) -> None:
    del way


def _change_safetensors(way: str) -> None:
    """As if vLLM imported `safe_open` from `waystation.compat.safetensors`."""
    del way
    from waystation.compat.safetensors import safe_open

    vars(importlib.import_module(_FUNCTIONS))["safe_open"] = safe_open


def _choose_reads(way: str) -> None:
    os.environ["FASTSAFETENSORS_ODIRECT"] = "1" if way == "direct" else "0"
    _read_onto_cpu()


def _change_fastsafetensors(way: str) -> None:
    """As if vLLM imported `waystation.compat.fastsafetensors` where it imports `fastsafetensors`."""
    del way
    for module in ("", ".parallel_loader"):
        ours = importlib.import_module(f"waystation.compat.fastsafetensors{module}")
        sys.modules[f"fastsafetensors{module}"] = ours
    _read_onto_cpu()


class _Platform:
    """That of vLLM, with a number where it has none for the CPU: the function makes a name of a GPU of it."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def current_device(self) -> int:
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def _read_onto_cpu() -> None:
    module = importlib.import_module("fastsafetensors.parallel_loader")
    loader = module.ParallelLoader

    def on_cpu(**arguments: Any) -> Any:
        return loader(**{**arguments, "device": "cpu", "nogds": True})

    vars(module)["ParallelLoader"] = on_cpu
    functions = importlib.import_module(_FUNCTIONS)
    vars(functions)["current_platform"] = _Platform(functions.current_platform)


LOADERS = {
    loader.name: loader
    for loader in (
        _loader(TEACHER, "safetensors", "safetensors", _change_nothing, tuple(WAYS)),
        _loader("safetensors through waystation.compat", "waystation", "safetensors", _change_safetensors),
        _loader(
            "fastsafetensors", "fastsafetensors", "fastsafetensors", _choose_reads, ("direct", "buffered")
        ),
        _loader(OURS, "waystation", "fastsafetensors", _change_fastsafetensors),
        _loader("runai", "runai-model-streamer", "runai_streamer", _change_nothing),
    )
}
