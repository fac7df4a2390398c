"""Streams, progress bars and the small formats."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from waystation.cli import formatting, output
from waystation.cli.output import Output
from waystation.errors import InvalidInput


def bar_on(*, terminal: bool) -> tuple[output._Bar, io.StringIO]:
    stream = io.StringIO()
    return output._Bar(Console(file=stream, force_terminal=terminal, width=100), "verifying"), stream


def test_a_quick_operation_shows_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PROGRESS_DELAY_S", 3600.0)
    bar, stream = bar_on(terminal=True)
    bar.update(1, 3)
    bar.close()
    assert stream.getvalue() == ""


def test_a_long_operation_shows_a_bar_to_people_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PROGRESS_DELAY_S", 0.0)
    for terminal in (True, False):
        bar, stream = bar_on(terminal=terminal)
        bar.update(1 << 20, 3 << 20)
        bar.update(2 << 20, 3 << 20)
        bar.close()
        assert ("verifying" in stream.getvalue()) is terminal
        assert ("MiB" in stream.getvalue()) is terminal


def test_progress_never_reaches_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "PROGRESS_DELAY_S", 0.0)
    with Output(as_json=True).progress("x") as on_progress:
        on_progress(1, 2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"), (1 << 60, "1024.0 PiB")],
)
def test_sizes_are_binary(nbytes: int, text: str) -> None:
    assert formatting.size(nbytes) == text


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("5GiB", 5 << 30), ("1.5 MiB", 3 << 19), ("100", 100), ("7b", 7), ("2k", 2000)],
)
def test_sizes_are_read_in_both_units(text: str, nbytes: int) -> None:
    assert formatting.parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("1d", 86400), ("2w", 1209600)]
)
def test_ages(text: str, seconds: float) -> None:
    assert formatting.parse_age(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "5 parsecs", "-1d", "d", "1d1h"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(InvalidInput, match="12h"):
        formatting.parse_age(text)


@pytest.mark.parametrize("text", ["", "GB", "5 parsecs", "-5GB", "5ib", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(InvalidInput, match="5GB"):
        formatting.parse_size(text)


@given(st.text(st.characters()))
def test_any_text_becomes_printable(text: str) -> None:
    shown = formatting.plain(text)
    assert shown.isprintable()
    shown.encode()
    if text.isprintable():
        assert shown == text
