"""What `safetensors.torch` exports: tensors and whole modules from and to safetensors files.

A file holds every tensor whole, so tensors that share memory are refused, except in modules: there one name
of those that share is saved, and loading gives all of them the values. Invariant: which name that is does not
depend on the order of the module's tensors.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

from typing_extensions import Buffer

from waystation import storage
from waystation._errors import InvalidInput
from waystation.compat.errors import NoData, NotLoaded, SharedMemory, translated
from waystation.compat.opening import Backend, load_bytes, load_whole
from waystation.compat.serializing import TensorSpec, failures_of_save, save_described, serialize
from waystation.safetensors.making import codec_of
from waystation.safetensors.sources import PathLike

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model"]


# ---- tensors -----------------------------------------------------------------------------------


def save(tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes of a safetensors file of tensors, by name, and text for people.

    Raises:
        ValueError: Something is no contiguous, dense tensor.
        RuntimeError: Tensors share memory.
        SafetensorError: The format has no dtype for a tensor.
    """
    held, specs = _described(tensors)
    data = serialize(specs, metadata)
    del held  # until here the addresses are in use
    return data


def save_file(
    tensors: Mapping[str, Any], filename: PathLike, metadata: Mapping[str, str] | None = None
) -> None:
    """Saves tensors, by name, and text for people, durably; an earlier file of the name stays until then.

    Raises:
        ValueError: Something is no contiguous, dense tensor.
        RuntimeError: Tensors share memory.
        SafetensorError: The format has no dtype for a tensor, or the file cannot be written.
    """
    save_described(lambda: _described(tensors), filename, metadata, time.monotonic())


def load(data: Buffer) -> dict[str, Any]:
    """The tensors in the bytes of a safetensors file, on the CPU.

    Raises:
        SafetensorError: They are not those of one.
    """
    return load_bytes(data, "torch")


def load_file(filename: PathLike, device: Any = "cpu", *, backend: Backend = "mmap") -> dict[str, Any]:
    """The tensors of a safetensors file.

    Args:
        filename: The file.
        device: Where they go: a device, its name, or the number of a GPU.
        backend: `"mmap"` has tensors on the CPU alias the mapped file, which must not change while they live;
            `"pread"` reads it.

    Raises:
        FileNotFoundError: There is no such file.
        SafetensorError: It is damaged.
    """
    return load_whole(filename, "pt", device, backend=backend)


def _described(tensors: Mapping[str, Any]) -> tuple[list[Any], dict[str, TensorSpec]]:
    """Tensors as they are written: what has their bytes, and what says where these are."""
    torch_sharing = _torch_sharing()
    with translated():
        if not isinstance(tensors, Mapping):
            raise InvalidInput(f"tensors must be a dict by name, not a {type(tensors).__name__}")
        for name, tensor in tensors.items():
            torch_sharing.check_strided(name, tensor)
            if tensor.is_meta:
                raise NoData("the tensor is on the meta device; load it first", tensor=name)
        shared = torch_sharing.sharing(tensors)
        if shared:
            raise SharedMemory(
                f"these tensors share memory, and the file would hold it more than once: {shared[0]}; save "
                "one of them, or the module by save_model"
            )
        held, specs = [], {}
        for name, tensor in tensors.items():
            if not tensor.is_contiguous():
                raise InvalidInput(
                    "the elements of the tensor do not follow one another; save its contiguous()", tensor=name
                )
            address, nbytes, owner = torch_sharing.host_bytes(tensor)
            held.append(owner)
            specs[name] = TensorSpec(
                dtype=torch_sharing.dtype_name(tensor),
                shape=tensor.shape,
                data_ptr=address,
                data_len=nbytes,
            )
    return held, specs


# ---- modules -----------------------------------------------------------------------------------


def save_model(
    model: Any, filename: PathLike, metadata: Mapping[str, str] | None = None, force_contiguous: bool = True
) -> None:
    """Saves the tensors of a module. Of those that share memory one is saved; the metadata name it by the
    names of the others.

    Args:
        model: A `torch.nn.Module`.
        filename: The file.
        metadata: Text for people; what it says of a name stays.
        force_contiguous: Save tensors of any strides, by the order of their elements.

    Raises:
        RuntimeError: Tensors share memory of which none has all.
        ValueError, SafetensorError: As `save_file`.
    """
    begun_s = time.monotonic()
    with failures_of_save(filename, begun_s):
        state = model.state_dict()
        text = dict(metadata or {})
        for kept, others in _redundant(state).items():
            for other in others:
                text.setdefault(other, kept)
                del state[other]
        if force_contiguous:
            state = {name: tensor.contiguous() for name, tensor in state.items()}
    save_described(lambda: _described(state), filename, text or metadata, begun_s)


def load_model(
    model: Any,
    filename: PathLike,
    strict: bool = True,
    device: Any = "cpu",
    *,
    backend: Backend = "mmap",
) -> tuple[set[str], list[str]]:
    """Loads a module, whose tensors keep their memory.

    Args:
        model: A `torch.nn.Module`.
        filename: The file.
        strict: Raise if the file lacks a tensor of the module, or has others.
        device: By way of which tensors come.
        backend: As in `load_file`.

    Returns:
        The names that the file lacks, and those that the module does not have.

    Raises:
        RuntimeError: Names or shapes differ.
    """
    loaded = load_file(filename, device=device, backend=backend)
    redundant = _redundant(model.state_dict(), preferred=loaded.keys())
    missing, unexpected = model.load_state_dict(loaded, strict=False)
    lacking = set(missing)
    for others in redundant.values():
        # One name of several for one memory is enough; a second one in the file says too much.
        unexpected += [name for name in others if name not in lacking]
        lacking.difference_update(others)
    if strict and (lacking or unexpected):
        with translated():
            raise NotLoaded(
                f"{type(model).__name__} and '{storage.located(filename)}' do not have the same tensors; "
                f"missing in the file: {sorted(lacking) or 'none'}, unknown to the module: "
                f"{sorted(unexpected) or 'none'}; give "
                "strict=False to load what they have in common"
            )
    return lacking, unexpected


def _redundant(state: Mapping[str, Any], preferred: Collection[str] = ()) -> dict[str, list[str]]:
    """The names that need not be saved, by the name that stands for them."""
    torch_sharing = _torch_sharing()
    found: dict[str, list[str]] = {}
    for group in torch_sharing.sharing(state):
        whole = sorted(name for name in group if torch_sharing.is_whole_storage(state[name]))
        if not whole:
            with translated():
                raise SharedMemory(
                    f"these tensors share memory, and none of them has all of it: {sorted(group)}; clone "
                    "them before saving"
                )
        kept = next((name for name in whole if name in preferred), whole[0])
        found[kept] = sorted(name for name in group if name != kept)
    return found


def _torch_sharing() -> Any:
    """What knows torch; the import of it comes last, so that its absence has an error of ours."""
    with translated():
        codec_of("torch")
    from waystation.frameworks import torch_sharing

    return torch_sharing
