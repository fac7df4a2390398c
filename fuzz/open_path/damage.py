"""Damage: to the tokens of a text, to its bytes, and to the frame of a file.

Each function takes a source of numbers and what is to be damaged; tokens are changed where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from fuzz.open_path.documents import DTYPES, SHARDS

_NUMBERS = (
    *("0", "1", "2", "3", "4", "7", "8", "16", "255", "4096", "-1", "-0", "01", "1.0", "4.0", "1e3", "1E-1"),
    *(str(1 << bits) for bits in (16, 31, 32, 33, 53, 60, 61, 62, 63, 64, 65, 128)),
    *(str((1 << bits) - 1) for bits in (31, 32, 53, 63, 64)),
    *("100000001", "9" * 400, "0x10", "1_000", "+1", "NaN", "Infinity", ".5", "1.", "1e"),
)
_TEXTS = (
    *('""', '"\\u0000"', '"a\\u0000b"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\ud800"'),
    *('"\\x41"', '"\\u00e"', '"\\"', '"', '"a\nb"', '"\x00"', '"\x7f"', '"\\/"', '"w"', '"\\u0077"'),
    *('"__metadata__"', '"dtype"', '"shape"', '"data_offsets"', '"weight_map"', '"metadata"', '"codec"'),
    *('"../model.safetensors"', '"/etc/passwd"', '"a/b.safetensors"', '"..\\\\m.safetensors"', '"model.bin"'),
    *('".."', '"."', '".safetensors"', '"model-00003-of-00002.safetensors"', '"model.safetensors"'),
    *(f'"{shard}"' for shard in SHARDS),
    *(f'"{dtype}"' for dtype in DTYPES),
    *('"F128"', '"u8"', '"F6"', '"F4 "', '"BF16\\u0000"'),
)
_WORDS = (
    *("{", "}", "[", "]", ",", ":", "null", "true", "false", "{}", "[]", "[[]]", "{}{}", "//", "/**/", "'"),
    *(" ", "\t", "\r\n", "\x0b", "\x0c", "\x00", "\u00a0", "\u2028", "\ufeff", "[" * 50, '{"a":' * 50),
)
INTERESTING = (*_NUMBERS, *_TEXTS, *_WORDS)

_DEEP = (1_000, 20_000)
_LENGTHS = (0, 1, 2, 7, 100_000_000, 100_000_001, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1)


# ---- tokens ------------------------------------------------------------------------------------


def _replace(random: Random, tokens: list[str]) -> None:
    tokens[random.randrange(len(tokens))] = random.choice(INTERESTING)


def _replace_alike(random: Random, tokens: list[str]) -> None:
    """A text by a text, a number by a number: the result is JSON more often."""
    at = random.randrange(len(tokens))
    token = tokens[at]
    if token[0] == '"':
        tokens[at] = random.choice(_TEXTS)
    elif token[0].isdigit():
        tokens[at] = random.choice(_NUMBERS)


def _nudge(random: Random, tokens: list[str]) -> None:
    """A number by one near it."""
    places = [at for at, token in enumerate(tokens) if token.isdigit() and token.isascii()]
    if places:
        at = random.choice(places)
        value = int(tokens[at][:40])
        changed = random.choice((value + 1, value - 1, value * 2, value * 8, value // 2, value + (1 << 32)))
        tokens[at] = str(changed)


def _delete(random: Random, tokens: list[str]) -> None:
    if len(tokens) > 1:
        del tokens[random.randrange(len(tokens))]


def _insert(random: Random, tokens: list[str]) -> None:
    tokens.insert(random.randrange(len(tokens) + 1), random.choice(INTERESTING))


def _swap(random: Random, tokens: list[str]) -> None:
    one, other = random.randrange(len(tokens)), random.randrange(len(tokens))
    tokens[one], tokens[other] = tokens[other], tokens[one]


def _repeat_span(random: Random, tokens: list[str]) -> None:
    begin = random.randrange(len(tokens))
    end = min(len(tokens), begin + random.choice((1, 4, 12, 19, 30)))
    tokens[end:end] = [",", *tokens[begin:end]] if random.random() < 0.5 else tokens[begin:end]


def _delete_span(random: Random, tokens: list[str]) -> None:
    begin = random.randrange(len(tokens))
    del tokens[begin : begin + random.choice((2, 4, 12, 20))]
    tokens.append("}")


def _nest(random: Random, tokens: list[str]) -> None:
    """Deep values, seldom: they are long."""
    if random.random() < 0.02:
        tokens[random.randrange(len(tokens))] = random.choice(("[", '{"a":')) * random.choice(_DEEP)


_TOKEN_DAMAGE: tuple[Callable[[Random, list[str]], None], ...] = (
    *(_replace, _replace_alike, _replace_alike, _nudge, _nudge, _nudge, _delete, _insert, _swap),
    *(_repeat_span, _delete_span, _nest),
)
_TIMES = (0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 5)


def damaged_text(random: Random, tokens: list[str]) -> bytes:
    """The text of tokens, damaged or not."""
    tokens = tokens.copy()
    for _ in range(random.choice(_TIMES)):
        random.choice(_TOKEN_DAMAGE)(random, tokens)
    text = "".join(tokens).encode("utf-8", "surrogatepass")
    return _damaged_bytes(random, text) if random.random() < 0.1 else text


# ---- bytes -------------------------------------------------------------------------------------


def _damaged_bytes(random: Random, text: bytes) -> bytes:
    at = random.randrange(len(text) + 1)
    how = random.randrange(8)
    if how == 0:
        return text[:at] + random.choice((b"\xff", b"\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\0")) + text[at:]
    if how == 1:
        return b"\xef\xbb\xbf" + text
    if how == 2:
        return text.decode("utf-8", "replace").encode(random.choice(("utf-16", "utf-32", "utf-16-le")))
    if how == 3:
        return text[:at]
    if how == 4:
        return text + random.choice((b" ", b"\n", b"\0", b"{}", b"x", b" " * 70_000))
    if how == 5:
        return b" " * random.choice((1, 8, 70_000)) + text
    if how == 6 and text:
        at %= len(text)
        return text[:at] + bytes((text[at] ^ 1 << random.randrange(8),)) + text[at + 1 :]
    return text[:at] + random.randbytes(random.randrange(1, 5)) + text[at + random.randrange(3) :]


# ---- the frame ---------------------------------------------------------------------------------


def framed(random: Random, text: bytes, data: bytes) -> bytes:
    """A file of a header and data; of a length that lies, cut off, or with bytes appended, now and then."""
    length = len(text)
    how = random.randrange(40)
    if how == 0:
        length = max(0, length + random.choice((-9, -2, -1, 1, 2, 8)))
    elif how == 1:
        length = random.choice(_LENGTHS)
    elif how == 2:
        data = data[: random.randrange(len(data) + 1)]
    elif how == 3:
        data += random.choice((b"\0", b"PK\x03\x04", bytes(8), data or b"\1"))
    content = length.to_bytes(8, "little") + text + data
    if how == 4:
        return content[: random.randrange(len(content) + 1)]
    return content
