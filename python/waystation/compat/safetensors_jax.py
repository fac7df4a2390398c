"""The functions of `safetensors_flax` under the name of what they load."""

from waystation.compat.safetensors_flax import load, load_file, save, save_file

__all__ = ["load", "load_file", "save", "save_file"]
