"""How arrays are written: natively, and in the layouts of Orbax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from waystation._errors import InvalidInput
from waystation._options import checks
from waystation._options.base import Alias, OptionGroup


def dtype_name(value: Any) -> Any:
    """The name of anything that stands for a dtype; names and None stay as they are."""
    if value is None or isinstance(value, str):
        return value
    import numpy as np

    try:
        return np.dtype(value).name
    except TypeError as error:
        raise InvalidInput(
            f"option 'dtype' must be a dtype, its name, or None, not {value!r}: {error}"
        ) from None


def _axes(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@dataclass(kw_only=True)
class StorageOptions(OptionGroup):
    """How an array is stored.

    Attributes:
        dtype: Cast to this dtype while saving: a logical name, such as `bfloat16`, or anything that NumPy
            accepts as a dtype. None keeps the dtype of the array. Set for all arrays, it applies to arrays of
            its kind only: a dtype of floats to floats, of integers to integers.
        chunk_bytes: Cut the part of an array that a process writes into chunks of at most this size, so that
            a load with another sharding reads few unneeded bytes. None does not cut, or cuts into 32 MiB if
            `chunk_axes` is given.
        chunk_axes: Cut along these axes only; negative ones count from the last. None cuts first along axes
            that are already sharded, then along the longest.
        chunk_byte_size: Orbax's name of `chunk_bytes`.
        shard_axes: Orbax's name of `chunk_axes`.
    """

    dtype: Any = None
    chunk_bytes: int | None = None
    chunk_axes: tuple[int, ...] | None = None
    chunk_byte_size: Alias[int | None] = Alias("chunk_bytes", None)
    shard_axes: Alias[tuple[int, ...] | None] = Alias("chunk_axes", None)
    _conversions: ClassVar = {"dtype": dtype_name, "chunk_axes": _axes}
    _checks: ClassVar = {
        "dtype": checks.dtype_name_or_none,
        "chunk_bytes": checks.positive_or_none,
        "chunk_axes": checks.axes_or_none,
    }


class ScopedStorageOptionsCreator(Protocol):
    """Says how one leaf is stored."""

    def __call__(self, key: tuple[Any, ...], value: Any) -> StorageOptions | None:
        """Returns the options of a leaf.

        Args:
            key: Its key path: JAX's keys where the program uses JAX.
            value: The leaf.
        """
        ...


_Storage = StorageOptions
_ScopedCreator = ScopedStorageOptionsCreator


class ArrayMetadataStore:
    """Stands for the files `array_metadatas/process_…` of Orbax's layouts; there is one instance."""

    def __repr__(self) -> str:
        return "ARRAY_METADATA_STORE"


ARRAY_METADATA_STORE = ArrayMetadataStore()


@dataclass(kw_only=True)
class ArraySavingOptions(OptionGroup):
    """How arrays are written.

    Attributes:
        storage_options: How every array is stored.
        storage_options_for: Function that is called with the key path of an array (`params.w`) and its
            description (`shape`, `dtype`). It returns the options of that array, or None. Options that are
            None there are those of `storage_options`. It must return the same in every process.
        scoped_storage_options_creator: The same in Orbax's form: called with the key path as a tuple of keys
            and the leaf itself. Set only one of the two.
        allow_lossy_casts: Store values that the dtype of `storage_options` cannot represent, as
            `array.loading.allow_lossy_casts` describes. Otherwise the save raises `LossyCast`.
        use_ocdbt: The layout to write. None: the native one. True: Orbax's OCDBT. False: Orbax's zarr files.
        use_zarr3: In Orbax's layouts: write version 3 of zarr, else version 2.
        use_compression: In Orbax's layouts: compress chunks with zstd.
        use_crc32c: In Orbax's layouts with zarr 3: write the CRC-32C of each chunk after it, which every
            reader of zarr 3 verifies, including Orbax.
        ocdbt_target_data_file_size: In OCDBT: start a new data file near this size. None means 2 GiB, 0
            never.
        enable_pinned_host_transfer: Accepted for compatibility with Orbax, and without effect: device memory
            always passes through a few pinned blocks.
        enable_post_merge_validation: Accepted for compatibility with Orbax, and without effect: loads verify
            what they read.
        use_replica_parallel: Divide the writing of replicas among the processes that hold them. None means
            True.
        min_slice_bytes_for_replica_parallel: Cut replicas into slices of at least this size. A smaller part
            is written whole by one of its holders. None and 0 mean 1 MiB.
        max_replicas_for_replica_parallel: Cut replicas into at most this number of slices. None means the
            number of holders.
        enable_replica_parallel_separate_folder: In OCDBT: write shared replicas to a separate directory.
        enable_write_sharding_file: In Orbax's layouts: write the file `_sharding`, which loads without an
            abstract state need.
        array_metadata_store: In Orbax's layouts: None omits `array_metadatas`, which stores the kind of PRNG
            keys.
        on_statistics: Function that is called with the `SaveStatistics` of every save, once it is committed,
            in the thread that saves. If it raises, the save raises the same error, with a note that the
            checkpoint is whole.
    """

    StorageOptions = _Storage
    ScopedStorageOptionsCreator = _ScopedCreator

    storage_options: _Storage = field(default_factory=_Storage)
    storage_options_for: Callable[[str, Any], _Storage | None] | None = None
    scoped_storage_options_creator: _ScopedCreator | None = None
    allow_lossy_casts: bool = False
    use_ocdbt: bool | None = None
    use_zarr3: bool = True
    use_compression: bool = True
    use_crc32c: bool = True
    ocdbt_target_data_file_size: int | None = None
    enable_pinned_host_transfer: bool | None = None
    enable_post_merge_validation: bool = True
    use_replica_parallel: bool | None = None
    min_slice_bytes_for_replica_parallel: int | None = None
    max_replicas_for_replica_parallel: int | None = None
    enable_replica_parallel_separate_folder: bool = False
    enable_write_sharding_file: bool = True
    array_metadata_store: ArrayMetadataStore | None = ARRAY_METADATA_STORE
    on_statistics: Callable[[Any], object] | None = None
    _checks: ClassVar = {
        "storage_options_for": checks.callable_or_none,
        "scoped_storage_options_creator": checks.callable_or_none,
        "allow_lossy_casts": checks.boolean,
        "use_ocdbt": checks.boolean_or_none,
        "use_zarr3": checks.boolean,
        "use_compression": checks.boolean,
        "use_crc32c": checks.boolean,
        "ocdbt_target_data_file_size": checks.bytes_or_none,
        "enable_pinned_host_transfer": checks.boolean_or_none,
        "enable_post_merge_validation": checks.boolean,
        "use_replica_parallel": checks.boolean_or_none,
        "min_slice_bytes_for_replica_parallel": checks.bytes_or_none,
        "max_replicas_for_replica_parallel": checks.positive_or_none,
        "enable_replica_parallel_separate_folder": checks.boolean,
        "enable_write_sharding_file": checks.boolean,
        "array_metadata_store": checks.only(
            ARRAY_METADATA_STORE, None, because="array metadata go to no store of the program's own"
        ),
        "on_statistics": checks.callable_or_none,
    }
