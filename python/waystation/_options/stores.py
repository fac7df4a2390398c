"""Object stores: how they are reached."""

from __future__ import annotations

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


def _settings(value: Any) -> Any:
    is_text = isinstance(value, Mapping) and all(
        isinstance(text, str) for pair in value.items() for text in pair
    )
    # What is refused is shown, so it must not be the values.
    return StoreSettings(value) if is_text else type(value)


def _is_settings(value: Any) -> str | None:
    return None if isinstance(value, StoreSettings) else "a dict of strings by name"


def _seconds(value: Any) -> str | None:
    return None if checks.is_number(value) and 0 < value < 1e9 else "a positive number of seconds"


@dataclass(kw_only=True)
class ObjectStoreOptions(OptionGroup):
    """How object stores (`s3://`, `gs://`, `az://`), and files behind `https://`, are reached.

    Attributes:
        settings: Settings by the names that the Rust crate `object_store` has for them, such as
            `aws_endpoint`, `aws_region`, `google_service_account`. The environment (`AWS_…`, `GOOGLE_…`,
            `AZURE_…`) counts for those that are not given. `skip_signature` is `"true"` for what is public.
        deadline_s: Until when a request must have succeeded, with everything that is tried again; of a long
            answer each MiB.
        allow_unconditional: Whether to save to a store that cannot create an object on condition that there
            is none. Then nothing keeps two programs from overwriting what the other saves.
    """

    settings: Mapping[str, str] = field(default_factory=lambda: StoreSettings({}))
    deadline_s: float = 120.0
    allow_unconditional: bool = False
    _conversions: ClassVar = {"settings": _settings}
    _checks: ClassVar = {
        "settings": _is_settings,
        "deadline_s": _seconds,
        "allow_unconditional": checks.boolean,
    }
