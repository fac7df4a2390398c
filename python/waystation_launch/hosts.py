"""The file that lists the hosts of a program, the same on every host.

It is the file that `waystation agent run --hosts` reads: a JSON list of objects with `name`, `address`
(host:port, where its agent listens) and, if hosts fail together, `domain`. The order counts: it numbers the
hosts.

Hosts can be emulated on one machine, each with an agent, an address and a failure domain of its own.
Everything of theirs is in one directory on tmpfs: this list, the secret of their agents, and a store for
each. It stays, with the agents, for the next launch. Invariants: the secret is made here, is nobody else's to
read, and is never told to the program; addresses are of this machine alone (127.0.0.0/8).
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from waystation._errors import from_os_error
from waystation._ports import free_port
from waystation.errors import InvalidInput

MOST_HOSTS = 64
HOSTS_FILE, SECRET_FILE = "hosts.json", "secret"
_SECRET_BYTES = 32
_MOST_BYTES = 4 << 20
_FORM = 'write it like [{"name": "a", "address": "10.0.0.1:7700"}, {"name": "b", "address": …}, …]'


@dataclass(frozen=True, slots=True)
class ListedHost:
    """One host of the list.

    Attributes:
        name: Its name.
        address: The address at which its agent listens, host:port.
        domain: The failure domain: hosts with the same domain fail together.
    """

    name: str
    address: str
    domain: str

    @property
    def machine(self) -> str:
        """The address without the port."""
        return self.address.rpartition(":")[0].strip("[]")


def read_hosts(path: Path) -> list[ListedHost]:
    """Reads a list of hosts.

    Raises:
        NotFound: There is no such file.
        InvalidInput: The file is not a list of hosts, or names a host twice.
    """
    try:
        entries = json.loads(_start_of(path))
        hosts = [
            ListedHost(entry["name"], entry["address"], entry.get("domain", entry["name"]))
            for entry in entries
        ]
    except OSError as error:
        raise from_os_error(error, "read the list of hosts", str(path)) from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InvalidInput(f"'{path}' is not a list of hosts: {error}; {_FORM}", path=str(path)) from error
    texts: list[object] = [text for host in hosts for text in (host.name, host.address, host.domain)]
    if not hosts or not all(isinstance(text, str) and text != "" for text in texts):
        raise InvalidInput(f"'{path}' is not a list of hosts; {_FORM}", path=str(path))
    if len({host.name for host in hosts}) < len(hosts):
        raise InvalidInput(f"'{path}' has two hosts of the same name; each needs its own", path=str(path))
    return hosts


def read_secret(path: Path) -> bytes:
    """Reads the secret that the agents of all hosts share, without the line ends after it, as agents do.

    Raises:
        NotFound: There is no such file.
        InvalidInput: The file cannot be read.
    """
    try:
        return _start_of(path).rstrip(b"\r\n")
    except OSError as error:
        raise from_os_error(error, "read the secret of the agents", str(path)) from error


def _start_of(path: Path) -> bytes:
    """The file, or so much of it that it can be neither a list nor a secret: a device may have no end."""
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


def index_of(hosts: Sequence[ListedHost], name: str, path: Path) -> int:
    """The number of a host in the list.

    Raises:
        InvalidInput: The list does not have the host.
    """
    names = [host.name for host in hosts]
    if name not in names:
        raise InvalidInput(f"'{name}' is no host of '{path}', which has: {', '.join(names)}", path=str(path))
    return names.index(name)


def emulated(directory: Path, count: int) -> list[ListedHost]:
    """The emulated hosts of a directory: those of its list, or new ones if it has none; writes nothing.

    Raises:
        InvalidInput: The number is out of range, or is not the number that the directory was made for.
    """
    if not 2 <= count <= MOST_HOSTS:
        raise InvalidInput(f"--hosts {count}: between 2 and {MOST_HOSTS} hosts can be emulated")
    path = directory / HOSTS_FILE
    hosts = read_hosts(path) if path.exists() else [_made(index) for index in range(count)]
    if len(hosts) != count:
        raise InvalidInput(
            f"'{directory}' is that of {len(hosts)} hosts; give --hosts {len(hosts)}, or another directory"
        )
    return hosts


def prepare(directory: Path, hosts: Sequence[ListedHost]) -> None:
    """Writes the list of emulated hosts and the secret of their agents, unless they are there.

    Raises:
        WaystationError: They cannot be written.
    """
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if not (directory / SECRET_FILE).exists():
            _write(directory / SECRET_FILE, secrets.token_hex(_SECRET_BYTES))
        if not (directory / HOSTS_FILE).exists():
            _write(directory / HOSTS_FILE, json.dumps([asdict(host) for host in hosts], indent=1))
    except OSError as error:
        raise from_os_error(error, "prepare the hosts in", str(directory)) from error


def _made(index: int) -> ListedHost:
    machine = f"127.0.0.{2 + index}"
    return ListedHost(f"host-{index}", f"{machine}:{free_port()}", f"domain-{index}")


def _write(path: Path, text: str) -> None:
    """Makes a private file, whole or not at all."""
    written = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    written.replace(path)
