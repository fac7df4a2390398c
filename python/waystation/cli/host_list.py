"""The hosts whose agents keep a program's state together: the file that lists them, the same on every host.

It is what `waystation agent run --hosts` reads: a JSON list of objects with `name`, `address` (host:port,
where its agent listens) and, if hosts fail together, `domain`. The order counts: it numbers the hosts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from waystation._errors import from_os_error
from waystation.errors import InvalidInput

_FORM = 'it is to look like [{"name": "a", "address": "10.0.0.1:7700"}, {"name": "b", "address": …}, …]'


@dataclass(frozen=True, slots=True)
class ListedHost:
    """One of them.

    Attributes:
        name: What it is called.
        address: Where its agent listens, host:port.
        domain: What fails together with it.
    """

    name: str
    address: str
    domain: str

    @property
    def machine(self) -> str:
        """The address without the port."""
        return self.address.rpartition(":")[0].strip("[]")


def read_hosts(path: Path) -> list[ListedHost]:
    """Reads such a file.

    Raises:
        InvalidInput: It is none, or names a host twice.
    """
    try:
        entries = json.loads(path.read_bytes())
        hosts = [
            ListedHost(entry["name"], entry["address"], entry.get("domain", entry["name"]))
            for entry in entries
        ]
    except OSError as error:
        raise from_os_error(error, "read the list of hosts", str(path)) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(f"'{path}' is no list of hosts: {error}; {_FORM}", path=str(path)) from error
    texts: list[object] = [text for host in hosts for text in (host.name, host.address, host.domain)]
    if not hosts or not all(isinstance(text, str) and text != "" for text in texts):
        raise InvalidInput(f"'{path}' is no list of hosts; {_FORM}", path=str(path))
    if len({host.name for host in hosts}) < len(hosts):
        raise InvalidInput(f"'{path}' has two hosts of the same name; each needs its own", path=str(path))
    return hosts


def read_secret(path: Path) -> bytes:
    """Reads what the agents of all hosts know, as they do: without line ends after it.

    Raises:
        NotFound: There is no such file.
        InvalidInput: It cannot be read.
    """
    try:
        return path.read_bytes().rstrip(b"\r\n")
    except OSError as error:
        raise from_os_error(error, "read the secret of the agents", str(path)) from error


def index_of(hosts: Sequence[ListedHost], name: str, path: Path) -> int:
    """The number of a host.

    Raises:
        InvalidInput: It is not among them.
    """
    names = [host.name for host in hosts]
    if name not in names:
        raise InvalidInput(f"'{name}' is no host of '{path}', which has: {', '.join(names)}", path=str(path))
    return names.index(name)
