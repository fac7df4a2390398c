"""Object stores: how they are reached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
    """How object stores (`s3://`, `gs://`, `az://`) are reached.

    Attributes:
        settings: Settings by the names that the Rust crate `object_store` has for them, such as
            `aws_endpoint`, `aws_region`, `google_service_account`. The environment (`AWS_…`, `GOOGLE_…`,
            `AZURE_…`) counts for those that are not given.
        deadline_s: Until when a request must have succeeded, with everything that is tried again.
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
