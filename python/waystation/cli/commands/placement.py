"""`waystation placement`: which hosts keep copies of whose shards, and what losses that survives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from waystation.cli import formatting
from waystation.cli.output import Output
from waystation.errors import InvalidInput
from waystation.memory import Odds, Placement, domain_recovery_odds, place, recovery_probability

# Lines for people; documents hold all.
_SHOWN_GROUPS = 20
_MOST_CHARACTERS = 4 << 20


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for."""

    hosts: int | None
    copies: int
    domains: Path | None
    hosts_per_domain: int | None


@dataclass(frozen=True, slots=True)
class _Hosts:
    """Their names, and the domain of each if any are known."""

    names: list[str]
    domains: list[str] | None


def run(output: Output, request: Request) -> None:
    """Plans, and prints the plan and its odds."""
    hosts = _hosts(request)
    placement = place(len(hosts.names), request.copies, hosts.domains)
    of_hosts = [
        (lost, Odds(recovery_probability(placement, lost), True)) for lost in _losses(placement, None)
    ]
    of_domains = []
    if hosts.domains is not None:
        count = len(set(hosts.domains))
        of_domains = [(lost, domain_recovery_odds(placement, lost)) for lost in _losses(placement, count)]
    if output.as_json:
        output.document(_document(hosts, placement, of_hosts, of_domains))
    else:
        _show(output, hosts, placement, of_hosts, of_domains)


def _losses(placement: Placement, domain_count: int | None) -> range:
    there = placement.host_count if domain_count is None else domain_count
    return range(1, min(there, 2 * placement.copies) + 1)


def _hosts(request: Request) -> _Hosts:
    if request.domains is not None:
        if request.hosts_per_domain is not None:
            raise InvalidInput(
                "give only one of --domains and --hosts-per-domain: each says which hosts share a domain"
            )
        hosts = _read_domains(request.domains)
        if request.hosts not in (None, len(hosts.names)):
            raise InvalidInput(
                f"'{request.domains}' names {len(hosts.names)} hosts, and --hosts says {request.hosts}; "
                "leave --hosts out"
            )
        return hosts
    if request.hosts is None:
        raise InvalidInput("say how many hosts there are with --hosts, or name them in a file with --domains")
    names = [str(host) for host in range(request.hosts)]
    if request.hosts_per_domain is None:
        return _Hosts(names, None)
    return _Hosts(names, [f"domain{host // request.hosts_per_domain}" for host in range(request.hosts)])


def _read_domains(path: Path) -> _Hosts:
    """Reads a file of lines `HOST DOMAIN`."""
    try:
        with path.open(encoding="utf-8") as file:
            lines = file.read(_MOST_CHARACTERS).splitlines()  # a device may have no end
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise InvalidInput(f"the domains cannot be read from '{path}': {reason}") from error
    found: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) != 2:
            raise InvalidInput(
                f"line {number} of '{path}' is not a host and its domain: {line.strip()[:60]!r}; "
                "write lines such as: host7 rack2"
            )
        if words[0] in found:
            raise InvalidInput(f"line {number} of '{path}' names the host '{words[0]}' again; name each once")
        found[words[0]] = words[1]
    if not found:
        raise InvalidInput(f"'{path}' names no host; write lines such as: host7 rack2")
    return _Hosts([*found], [*found.values()])


def _document(
    hosts: _Hosts,
    placement: Placement,
    of_hosts: list[tuple[int, Odds]],
    of_domains: list[tuple[int, Odds]],
) -> dict[str, Any]:
    return {
        "hosts": hosts.names,
        "domains": hosts.domains,
        "copies": placement.copies,
        "groups": [[hosts.names[host] for host in group] for group in placement.groups],
        "holders": {
            name: [hosts.names[holder] for holder in placement.holders(host)]
            for host, name in enumerate(hosts.names)
        },
        "least_domains": None if hosts.domains is None else placement.least_domains,
        "lost_hosts": [_odds_document(lost, odds) for lost, odds in of_hosts],
        "lost_domains": [_odds_document(lost, odds) for lost, odds in of_domains],
    }


def _odds_document(lost: int, odds: Odds) -> dict[str, Any]:
    return {"lost": lost, "recovered": float(odds.probability), "is_exact": odds.is_exact}


def _show(
    output: Output,
    hosts: _Hosts,
    placement: Placement,
    of_hosts: list[tuple[int, Odds]],
    of_domains: list[tuple[int, Odds]],
) -> None:
    for line in _summary(hosts, placement):
        output.line(line)
    output.line()
    _show_groups(output, hosts, placement)
    _show_odds(output, "hosts lost at once", of_hosts)
    if of_domains:
        _show_odds(output, "domains lost at once", of_domains)


def _summary(hosts: _Hosts, placement: Placement) -> Iterator[str]:
    parts = [
        formatting.count(len(hosts.names), "host"),
        formatting.count(placement.copies, "copy of each shard", "copies of each shard"),
    ]
    if hosts.domains is not None:
        parts.append(formatting.count(len(set(hosts.domains)), "failure domain"))
    yield ", ".join(parts)
    yield "in a group, every host keeps the shards of all its members"
    if placement.ring_count:
        others = formatting.count(placement.copies - 1, "member")
        yield f"in a ring, every host keeps its own shard and those of the {others} before it"
    if hosts.domains is not None:
        least, wanted = placement.least_domains, placement.copies
        yield f"the copies of every shard are in {'' if least == wanted else 'at least '}" + formatting.count(
            least, "domain"
        )


def _show_groups(output: Output, hosts: _Hosts, placement: Placement) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in ("group", "hosts", *(["domains"] if hosts.domains is not None else [])):
        table.add_column(heading)
    for number, group in enumerate(placement.groups[:_SHOWN_GROUPS]):
        cells = [f"{number}" if len(group) == placement.copies else f"{number} (ring)"]
        cells.append(formatting.plain(" ".join(hosts.names[host] for host in group)))
        if hosts.domains is not None:
            cells.append(formatting.plain(" ".join(hosts.domains[host] for host in group)))
        table.add_row(*map(_literal, cells))
    output.show(table)
    left = len(placement.groups) - _SHOWN_GROUPS
    if left > 0:
        output.line(f"and {formatting.count(left, 'more group')}; --json has all")


def _show_odds(output: Output, heading: str, rows: list[tuple[int, Odds]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column(heading)
    table.add_column("every shard has a copy left", justify="right")
    for lost, odds in rows:
        table.add_row(str(lost), _chance(odds))
    output.line()
    output.show(table)


def _chance(odds: Odds) -> str:
    """The probability, never rounded to certainty."""
    if odds.probability == 1:
        return "always"
    if odds.probability == 0 and odds.is_exact:
        return "never"
    shown = f"{float(odds.probability):.4%}"
    if shown == "100.0000%":
        shown = "> 99.9999%"
    elif shown == "0.0000%" and odds.probability:
        shown = "< 0.0001%"
    return shown if odds.is_exact else f"at least {_floor(odds.probability)}"


def _floor(probability: Fraction) -> str:
    """A bound is rounded towards what it promises."""
    return f"{int(probability * 1_000_000) / 10_000:.4f}%"


def _literal(text: str) -> Any:
    from rich.text import Text

    return Text(text)
