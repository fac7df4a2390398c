"""What `safetensors` exports: `from waystation.compat.safetensors import safe_open`."""

from waystation.compat.errors import SafetensorError
from waystation.compat.opening import deserialize, safe_open
from waystation.compat.serializing import TensorSpec, serialize, serialize_file

__all__ = ["SafetensorError", "TensorSpec", "deserialize", "safe_open", "serialize", "serialize_file"]
