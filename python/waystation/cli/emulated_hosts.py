"""Hosts that are emulated on this machine, each with an agent, an address and a failure domain of its own.

Everything is in one directory on tmpfs: the list of hosts, the secret of their agents, and a store for each.
It stays, with the agents, for the next launch. Invariants: the secret is made here, is nobody else's to read,
and is never told to the program; addresses are of this machine alone (127.0.0.0/8).
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from dataclasses import asdict
from pathlib import Path

from waystation._errors import from_os_error
from waystation.cli.host_list import ListedHost, read_hosts
from waystation.errors import InvalidInput

MOST_HOSTS = 64
HOSTS_FILE, SECRET_FILE = "hosts.json", "secret"
_SECRET_BYTES = 32


def prepare(directory: Path, count: int) -> list[ListedHost]:
    """The hosts of a directory, as they are listed there, or made now.

    Raises:
        InvalidInput: There are too few or too many, or other ones than the directory was made for.
    """
    if not 2 <= count <= MOST_HOSTS:
        raise InvalidInput(f"--hosts {count}: between 2 and {MOST_HOSTS} hosts can be emulated")
    path = directory / HOSTS_FILE
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        if not (directory / SECRET_FILE).exists():
            _write(directory / SECRET_FILE, secrets.token_hex(_SECRET_BYTES))
        if not path.exists():
            _write(path, json.dumps([asdict(_made(index)) for index in range(count)], indent=1))
    except OSError as error:
        raise from_os_error(error, "prepare the hosts in", str(directory)) from error
    hosts = read_hosts(path)
    if len(hosts) != count:
        raise InvalidInput(
            f"'{directory}' is that of {len(hosts)} hosts; give --hosts {len(hosts)}, or another directory"
        )
    return hosts


def _made(index: int) -> ListedHost:
    machine = f"127.0.0.{2 + index}"
    with socket.socket() as opened:
        opened.bind((machine, 0))
        return ListedHost(f"host-{index}", f"{machine}:{opened.getsockname()[1]}", f"domain-{index}")


def _write(path: Path, text: str) -> None:
    """Makes a private file, whole or not at all."""
    written = path.with_name(f"{path.name}.{os.getpid()}")
    with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    written.replace(path)
