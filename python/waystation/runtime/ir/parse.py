"""Reads the text that `text.show` writes.

A recursive-descent parser over a handful of tokens. It refuses what is not such a text, with the line;
whether the program keeps the rules is for `verify` to say. Space between tokens does not count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NoReturn, TypeVar

from waystation.runtime.errors import InvalidProgram
from waystation.runtime.ir.program import (
    Arg,
    Compute,
    Free,
    HostCall,
    Node,
    Program,
    Reshard,
    Result,
    SliceShape,
    Value,
)
from waystation.runtime.ir.shardings import Sharding

T = TypeVar("T")

_TOKEN = re.compile(
    r"""\s*(?:(?P<string>"(?:[^"\\]|\\.)*") | (?P<number>\d+) | (?P<name>[A-Za-z_]\w*)"""
    r""" | (?P<mark>[][(){}=,:@\#%*+]) | (?P<end>\Z))""",
    re.VERBOSE | re.ASCII,
)


def parse(text: str) -> Program:
    """The program that a text describes.

    Raises:
        InvalidProgram: It is no text of a program; the message has the line.
    """
    return _Parser(text).program()


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._shardings: dict[int, Sharding] = {}
        self._advance()

    # ---- tokens --------------------------------------------------------------------------------

    def _advance(self) -> None:
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            self._begin = len(self._text) - len(self._text[self._at :].lstrip())
            self.fail("a token")
        self._kind = str(found.lastgroup)
        self._token = found.group(self._kind)
        self._begin, self._at = found.start(self._kind), found.end()

    def fail(self, expected: str) -> NoReturn:
        """Raises the error of the place at hand."""
        line = self._text.count("\n", 0, self._begin) + 1
        found = self._text[self._begin : self._begin + 20].split("\n")[0] or "the end"
        raise InvalidProgram(f"line {line} of the program has '{found}' where {expected} was expected")

    def at(self, token: str) -> bool:
        """Takes a word or mark if it is the next."""
        if self._kind in ("name", "mark") and self._token == token:
            self._advance()
            return True
        return False

    def need(self, *tokens: str) -> None:
        """Takes words or marks that must be the next."""
        for token in tokens:
            if not self.at(token):
                self.fail(f"'{token}'")

    def take(self, kind: str) -> str:
        """Takes a token of a kind."""
        if self._kind != kind:
            self.fail(f"a {kind}")
        token = self._token
        self._advance()
        return token

    def integer(self) -> int:
        """Takes a number."""
        return int(self.take("number"))

    def reference(self, mark: str) -> int:
        """Takes a number after a mark, as in `%3`."""
        self.need(mark)
        return self.integer()

    def string(self) -> str:
        """Takes text between quotation marks."""
        begin = self._begin
        token = self.take("string")
        try:
            return str(json.loads(token))
        except ValueError:
            self._begin = begin
            self.fail("a string")

    def listed(self, opening: str, item: Callable[[], T], closing: str) -> tuple[T, ...]:
        """Takes items between brackets, separated by commas."""
        self.need(opening)
        items: list[T] = []
        while not self.at(closing):
            if items:
                self.need(",")
            items.append(item())
        return tuple(items)

    # ---- programs ------------------------------------------------------------------------------

    def program(self) -> Program:
        """Takes a whole program."""
        self.need("program")
        name = self.string()
        self.need("{")
        slices = []
        while self.at("slice"):
            slices.append(SliceShape(self.reference("@"), self.listed("[", self.integer, "]")))
        while self.at("sharding"):
            number = self.reference("#")
            self.need("=")
            self._shardings[number] = self.sharding()
        nodes = []
        while not self.at("}"):
            nodes.append(self.node())
        if self._kind != "end":
            self.fail("the end")
        return Program(name, tuple(slices), tuple(nodes))

    def sharding(self) -> Sharding:
        """Takes the axes and the spec of a sharding."""
        axes = self.listed("[", self._axis, "]")
        return Sharding(axes, self.listed("(", self._part, ")"))

    def _axis(self) -> tuple[str, int]:
        name = self.take("name")
        self.need("=")
        return name, self.integer()

    def _part(self) -> tuple[str, ...]:
        if self.at("*"):
            return ()
        names = [self.take("name")]
        while self.at("+"):
            names.append(self.take("name"))
        return tuple(names)

    def node(self) -> Node:
        """Takes a node."""
        if self.at("free"):
            return Free(self.listed("(", self._value, ")"))
        if self.at("result"):
            return Result(self.listed("(", self._value, ")"))
        numbers: list[int] = []
        if self._token == "%":
            numbers.append(self._value())
            while self.at(","):
                numbers.append(self._value())
            self.need("=")
        if self.at("arg"):
            label, donated = self.string(), self.at("donated")
            return Arg(label, self._one(numbers), donated)
        if self.at("reshard"):
            operand = self._value()
            return Reshard(operand, self._one(numbers))
        kind = Compute if self.at("compute") else HostCall
        if kind is HostCall and not self.at("host_call"):
            self.fail("a node")
        return self._call(kind, numbers)

    def _call(self, kind: type[Compute] | type[HostCall], numbers: list[int]) -> Node:
        label, function, place = self.string(), self.string(), self.reference("@")
        pairs = self.listed("(", lambda: (self._value(), self._known_sharding()), ")")
        operands, shardings = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        donated = self.listed("(", self.integer, ")") if kind is Compute and self.at("donates") else ()
        dynamic = self.at("dynamic")
        results = self._made(numbers)
        if kind is Compute:
            return Compute(label, function, place, operands, shardings, results, donated, dynamic)
        return HostCall(label, function, place, operands, shardings, results, dynamic)

    def _value(self) -> int:
        return self.reference("%")

    def _known_sharding(self) -> Sharding:
        number = self.reference("#")
        if number not in self._shardings:
            self.fail(f"a use of sharding #{number}, once it is declared,")
        return self._shardings[number]

    def _one(self, numbers: list[int]) -> Value:
        made = self._made(numbers)
        if len(made) != 1:
            self.fail("a node of one result")
        return made[0]

    def _made(self, numbers: list[int]) -> tuple[Value, ...]:
        values: list[Value] = []
        for number in numbers:
            self.need("," if values else ":")
            dtype = self.take("name")
            shape = self.listed("[", self.integer, "]")
            values.append(Value(number, shape, dtype, self.reference("@"), self._known_sharding()))
        return tuple(values)
