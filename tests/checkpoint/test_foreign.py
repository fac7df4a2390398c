"""Files of other programs given as a checkpoint: the error says what they are and what opens them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as distributed_checkpoint
from safetensors.numpy import save_file

import waystation
from waystation import errors, safetensors

LFS = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d7a' * 16}\nsize 12345\n"
SCRIPT = str(Path(sys.executable).parent / "waystation")


def write_distributed(path: Path) -> None:
    distributed_checkpoint.save({"a": torch.ones(3)}, checkpoint_id=path, no_dist=True)


def write_half_distributed(path: Path) -> None:
    write_distributed(path)
    (path / ".metadata").unlink()


def write_folder(name: str, write: Callable[[Path], None]) -> Callable[[Path], None]:
    def written(path: Path) -> None:
        path.mkdir()
        write(path / name)

    return written


def write_tensors(path: Path) -> None:
    save_file({"a": np.ones(3)}, path)


FOREIGN: list[tuple[str, Callable[[Path], object], str]] = [
    ("step_1", write_distributed, "torch.distributed.checkpoint.load"),
    ("step_2", write_half_distributed, "a save of torch.distributed.checkpoint that has not ended"),
    ("model.pt", lambda path: torch.save({"a": torch.ones(3)}, path), "'torch.load' opens it"),
    ("pytorch_model.bin", lambda path: torch.save([1], path), "'torch.load' opens it"),
    ("old.bin", lambda path: path.write_bytes(pickle.dumps({"a": 1})), "a pickle"),
    ("model.gguf", lambda path: path.write_bytes(b"GGUF\3" + bytes(99)), "a GGUF file"),
    ("model.npz", lambda path: np.savez(path, a=np.ones(3)), "'numpy.load' opens it"),
    ("model.npy", lambda path: np.save(path, np.ones(3)), "'numpy.load' opens it"),
    ("model.h5", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(99)), "an HDF5 file"),
    ("model.onnx", lambda path: path.write_bytes(bytes(99)), "an ONNX file"),
    ("model.safetensors", lambda path: path.write_text(LFS), "run 'git lfs pull'"),
]
FOLDERS: list[tuple[str, Callable[[Path], object], str]] = [
    ("model.safetensors", lambda path: path.write_text(LFS), "is a pointer of Git LFS"),
    ("pytorch_model.bin", lambda path: torch.save([1], path), "files of torch.save (pytorch_model.bin)"),
    ("model-q4.gguf", lambda path: path.write_bytes(b"GGUF"), "the GGUF file model-q4.gguf"),
    ("saved_model.pb", lambda path: path.write_bytes(b"x"), "a SavedModel of TensorFlow"),
    ("trainer_state.json", lambda path: path.write_text("{}"), "a checkpoint of the Trainer of transformers"),
    ("random_states_0.pkl", lambda path: path.write_bytes(b""), "saved by Accelerate"),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(("name", "write", "text"), FOREIGN, ids=[entry[0] for entry in FOREIGN])
def test_what_it_is_and_what_opens_it_is_said(
    tmp_path: Path, name: str, write: Callable[[Path], object], text: str
) -> None:
    path = tmp_path / name
    write(path)
    for read in (waystation.load, waystation.metadata):
        with pytest.raises(errors.InvalidLayoutError) as caught:
            read(path)
        assert f"'{path}' is not a checkpoint of Waystation or Orbax, but " in str(caught.value)
        assert text in str(caught.value)
    with pytest.raises((errors.Corrupt, errors.NotFound)) as refused:
        safetensors.load(path, framework="numpy")
    assert text in str(refused.value)


@pytest.mark.parametrize(("name", "write", "text"), FOLDERS, ids=[entry[0] for entry in FOLDERS])
def test_a_folder_is_told_by_what_it_holds(
    tmp_path: Path, name: str, write: Callable[[Path], None], text: str
) -> None:
    path = tmp_path / "model"
    write_folder(name, write)(path)
    with pytest.raises(errors.InvalidLayoutError) as caught:
        waystation.load(path)
    assert text in str(caught.value)


def test_published_models_have_a_load_of_their_own(tmp_path: Path) -> None:
    write_tensors(tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(errors.InvalidLayoutError, match=r"'waystation\.safetensors\.load' opens it"):
            waystation.metadata(path)


def test_the_name_of_a_model_on_a_hub_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.CheckpointNotFound, match=r"hf download meta-llama/Llama-3\.1-8B"):
        waystation.load("meta-llama/Llama-3.1-8B")
    with pytest.raises(errors.NotFound, match=r"hf download meta-llama/Llama-3\.1-8B"):
        safetensors.load("meta-llama/Llama-3.1-8B", framework="numpy")
    for path in ("run/step_100", "gpt2", "runs/100"):
        with pytest.raises(errors.CheckpointNotFound) as caught:
            waystation.load(path)
        assert "hub" not in str(caught.value)


def test_damage_and_unknown_files_are_not_taken_for_others(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_tensors(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(errors.Corrupt):
        safetensors.load(path, framework="numpy")
    path.write_text("hello, this is a text")
    with pytest.raises(errors.Corrupt, match="the header claims"):
        safetensors.load(path, framework="numpy")
    with pytest.raises(errors.InvalidLayoutError, match="is a file, not a checkpoint directory"):
        waystation.load(path)


@pytest.mark.parametrize(
    ("command", "url", "told"),
    [
        ("inspect", "ftp://host/run", "'ftp://host/run' is no location"),
        ("ls", "ftp://host/run", "'ftp://host/run' is no location"),
        ("verify", "ftp://host/run", "'ftp://host/run' is no location"),
        ("sum", "ftp://host/run", "'ftp://host/run' is no location"),
        ("doctor", "s3://bucket/run", "this is a URL"),
    ],
)
@pytest.mark.share(3)
def test_the_command_line_refuses_urls(tmp_path: Path, command: str, url: str, told: str) -> None:
    done = subprocess.run([SCRIPT, command, url], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert told in " ".join(done.stderr.split())
