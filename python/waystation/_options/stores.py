"""Object stores: how they are reached."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from waystation._errors import InvalidInput
from waystation._options import checks
from waystation._options.base import OptionGroup


class StoreSettings(Mapping[str, str]):
    """Settings of a store by name. They may be credentials, so nothing shows their values."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = dict(sorted(settings.items()))

    def __getitem__(self, name: str) -> str:
        return self._settings[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)

    def __hash__(self) -> int:
        return hash(tuple(self._settings.items()))

    def __repr__(self) -> str:
        return f"<settings: {', '.join(self)}>" if self else "{}"


# What `s3fs` calls settings.
_OF_S3FS = {
    "key": "aws_access_key_id",
    "secret": "aws_secret_access_key",
    "token": "aws_session_token",
    "endpoint_url": "aws_endpoint",
    "region_name": "aws_region",
}


def settings_of_s3fs(storage_options: Mapping[str, Any]) -> StoreSettings:
    """Settings from the `storage_options` that fsspec and its users pass to `s3fs`.

    Example:
        ```python
        options = {"key": "me", "secret": "…", "client_kwargs": {"region_name": "eu-west-1"}}
        context.storage.settings = waystation.options.settings_of_s3fs(options)
        ```

    Args:
        storage_options: Of these `key`, `secret`, `token`, `endpoint_url`, `anon`, `use_ssl`, and in
            `client_kwargs` `endpoint_url` and `region_name`.

    Raises:
        InvalidInput: There are others, or one has a value of another type.
    """
    if not isinstance(storage_options, Mapping):
        raise InvalidInput(f"storage_options must be a dict by name, not a {type(storage_options).__name__}")
    given = dict(storage_options)
    inner = given.pop("client_kwargs", None) or {}
    if not isinstance(inner, Mapping):
        raise InvalidInput("the storage option 'client_kwargs' must be a dict by name")
    flags = {name: given.pop(name, default) for name, default in (("anon", False), ("use_ssl", True))}
    known = {name: _OF_S3FS[name] for name in ("key", "secret", "token", "endpoint_url")}
    known_inside = {name: _OF_S3FS[name] for name in ("endpoint_url", "region_name")}
    unknown = [*(given.keys() - known), *(f"client_kwargs.{name}" for name in inner.keys() - known_inside)]
    if unknown:
        raise InvalidInput(
            f"there is no setting for these storage options: {', '.join(sorted(map(str, unknown)))}; leave "
            "them out, and give what they stand for as Context.storage.settings"
        )
    found = {known[name]: value for name, value in given.items() if value is not None}
    found |= {known_inside[name]: value for name, value in inner.items() if value is not None}
    wrong = [name for name, value in found.items() if not isinstance(value, str)]
    wrong += [name for name, value in flags.items() if not isinstance(value, bool)]
    if wrong:
        raise InvalidInput(f"storage options are text, True or False; these are not: {', '.join(wrong)}")
    if flags["anon"]:
        found["aws_skip_signature"] = "true"
    if not flags["use_ssl"] or found.get("aws_endpoint", "").startswith("http://"):
        found["aws_allow_http"] = "true"
    return StoreSettings(found)


class _Wrong:
    """What stands for settings that are none, in messages: values may be credentials."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def __repr__(self) -> str:
        return self._shown


def _settings(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return _Wrong(f"a {type(value).__name__}")
    texts = {}
    for name, setting in value.items():
        if not isinstance(name, str):
            return _Wrong(f"one with a {type(name).__name__} as a name")
        if isinstance(setting, bool):
            texts[name] = "true" if setting else "false"
        elif isinstance(setting, str | int):
            texts[name] = str(setting)
        else:
            return _Wrong(f"one with a {type(setting).__name__} as '{name}'")
    return StoreSettings(texts)


def _is_settings(value: Any) -> str | None:
    is_meant = isinstance(value, StoreSettings)
    return None if is_meant else "a dict of text, True or False, and whole numbers by name"


def _is_directory_here(value: Any) -> str | None:
    wrong = checks.path_or_none(value)
    if wrong is None and isinstance(value, str) and "://" in value:
        return "a directory of this machine or None"
    return wrong


def _path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _seconds(value: Any) -> str | None:
    return None if checks.is_number(value) and 0 < value < 1e9 else "a positive number of seconds"


@dataclass(kw_only=True)
class ObjectStoreOptions(OptionGroup):
    """How object stores (`s3://`, `gs://`, `az://`), and files behind `https://`, are reached.

    Attributes:
        settings: Settings by the names that the Rust crate `object_store` has for them, such as
            `aws_endpoint`, `aws_region`, `google_service_account`. The environment (`AWS_…`, `GOOGLE_…`,
            `AZURE_…`) counts for those that are not given. A value is text, True or False, or a whole
            number; `skip_signature` is True for what is public.
        deadline_s: Until when a request must have succeeded, with everything that is tried again; of a long
            answer each MiB.
        allow_unconditional: Whether to save to a store that cannot create an object on condition that there
            is none. Then nothing keeps two programs from overwriting what the other saves.
        cache_directory: A directory of this machine in which loads keep what they have read of stores, so
            that the next load of the same, in any process, reads it from there; None for none. Only who may
            read all that is loaded should be able to read it, and only who is trusted to write to it.
        cache_bytes: How many bytes the cache may have. What was not used for the longest time goes first.
    """

    settings: Mapping[str, str | bool | int] = field(default_factory=lambda: StoreSettings({}))
    deadline_s: float = 120.0
    allow_unconditional: bool = False
    cache_directory: str | None = None
    cache_bytes: int = 16 << 30
    _conversions: ClassVar = {"settings": _settings, "cache_directory": _path}
    _checks: ClassVar = {
        "settings": _is_settings,
        "deadline_s": _seconds,
        "allow_unconditional": checks.boolean,
        "cache_directory": _is_directory_here,
        "cache_bytes": checks.positive,
    }
