"""Configuration files, and the division of experts: read and made as fastsafetensors does."""

from __future__ import annotations

import json
from pathlib import Path

import fastsafetensors as genuine
import fastsafetensors.config
import fastsafetensors.ep_slice
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.compat.group_scenarios import digest

from waystation.compat import fastsafetensors as own
from waystation.compat.fastsafetensors import config, ep_slice

BOTH = [genuine, own]
CONFIGURATION = {
    "loader": "base",
    "debug": {"debug_log": False, "unknown": 1},
    "parallel": {"use_pipeline": True, "queue_size": 2, "max_batch_bytes": 200},
    "base": {"copier_type": "nogds", "bbuf_size_kb": 64, "framework": "not here"},
    "unknown": 7,
}


def test_configurations_are_read_as_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "configuration.json"
    path.write_text(json.dumps(CONFIGURATION))
    files = [str(tmp_path / f"{number}.safetensors") for number in range(3)]
    for number, file in enumerate(files):
        save_file({f"{number}.{size}": torch.full((size,), number) for size in (3, 9, 20)}, file)
    monkeypatch.setenv(config.CONFIG_ENV_VAR, str(path))
    found = []
    for module in BOTH:
        loader = module.AutoLoader(None, files, "cpu")
        read = loader.config
        tensors = [(name, digest(tensor)) for name, tensor in loader.iterate_weights()]
        loader.close()
        found.append((vars(read), read.get_extension_config("base"), read.create_parallel_kwargs(), tensors))
    assert found[1] == found[0]


def test_configurations_are_found_as_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(config.CONFIG_ENV_VAR, raising=False)
    assert vars(config.load_config()) == vars(fastsafetensors.config.load_config())
    Path(config.DEFAULT_CONFIG_PATH).write_text('{"queue_size": 5}')
    assert vars(config.load_config()) == vars(fastsafetensors.config.load_config())
    for module in (fastsafetensors.config, config):
        monkeypatch.setenv(module.CONFIG_ENV_VAR, str(tmp_path / "not there"))
        with pytest.raises(FileNotFoundError):
            module.load_config()
        for bad in ({"max_concurrent_producers": 2}, {"parallel": {"max_concurrent_producers": 2}}):
            with pytest.raises(ValueError, match="max_concurrent_producers"):
                module.LoaderConfig.from_dict(bad)


def test_a_loader_that_is_not_here_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "configuration.json"
    path.write_text('{"loader": "other"}')
    monkeypatch.setenv(config.CONFIG_ENV_VAR, str(path))
    for module in BOTH:
        with pytest.raises(ValueError, match="other"):
            module.AutoLoader(None, [])


@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_experts_are_divided_as_theirs(experts: int, size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    assert own.owned_expert_range(experts, size, rank) == genuine.owned_expert_range(experts, size, rank)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"FASTSAFETENSORS_EP_SLICE": "1"},
        {
            "FASTSAFETENSORS_EP_SLICE": "1",
            "FASTSAFETENSORS_EP_NUM_EXPERTS": "8",
            "WORLD_SIZE": "2",
            "RANK": "1",
        },
        {
            "FASTSAFETENSORS_EP_SLICE": "1",
            "FASTSAFETENSORS_EP_NUM_EXPERTS": "8",
            "FASTSAFETENSORS_EP_SIZE": "4",
            "FASTSAFETENSORS_EP_RANK": "2",
        },
    ],
    ids=str,
)
def test_experts_of_the_environment_are_theirs(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    names = ["bias", *(f"layer.experts.{expert}.w" for expert in range(8))]
    filters = [
        fastsafetensors.ep_slice.expert_parallel_filter_from_env(),
        ep_slice.expert_parallel_filter_from_env(),
    ]
    kept = [keep and [name for name in names if keep(name)] for keep in filters]
    assert kept[1] == kept[0]
