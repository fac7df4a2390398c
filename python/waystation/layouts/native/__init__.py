"""The native layout: every data file is a safetensors file."""
