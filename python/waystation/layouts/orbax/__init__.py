"""Orbax's layouts: a directory of metadata in JSON, and arrays as zarr, with or without OCDBT around them."""
