"""Shardings as people read them, from the descriptions that checkpoints hold."""

from __future__ import annotations

from typing import Any

_SHOWN_CHARACTERS = 60


def sharding_text(description: dict[str, Any] | None) -> str:
    """`P('data', None) of data=2, model=4 (8 cpu)` and the like; empty where nothing was said.

    Descriptions come from files: whatever they hold, some text comes back.
    """
    if not description:
        return ""
    try:
        return _text(description)
    except (KeyError, TypeError, ValueError):
        return _short(str(description))


def _text(description: dict[str, Any]) -> str:
    kind = description["kind"]
    if kind == "single":
        return f"on {description['platform']}:{description['device']}"
    if kind == "named":
        mesh = description["mesh"]
        axes = ", ".join(f"{name}={size}" for name, size in mesh["axes"])
        devices = f"{len(mesh['devices'])} {mesh['platform']}"
        return f"P({', '.join(map(_axis, description['spec']))}) of {axes} ({devices})"
    if kind == "dtensor":
        mesh = description["mesh"]
        names = mesh["axis_names"] or [f"axis {number}" for number in range(len(mesh["shape"]))]
        axes = ", ".join(f"{name}={size}" for name, size in zip(names, mesh["shape"], strict=True))
        parts = ", ".join(_placement(*placement) for placement in description["placements"])
        return f"[{parts}] of {axes} ({len(mesh['ranks'])} {mesh['device_type']})"
    return _short(str(description.get("text", kind)))


def _placement(name: str, *numbers: int) -> str:
    """A placement as torch spells it."""
    spelled = "".join(word.capitalize() for word in name.split("_"))
    return f"{spelled}({', '.join(map(str, numbers))})" if numbers else spelled


def _axis(part: Any) -> str:
    """One entry of a partition spec, as Python would write it."""
    return repr(tuple(part)) if isinstance(part, list) else repr(part)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
