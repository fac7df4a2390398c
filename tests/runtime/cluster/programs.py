"""Programs that tests run in processes of their own."""

from __future__ import annotations

import json
import sys

from waystation.runtime.cluster import connect


def main() -> None:
    """Connects to an address, or to a cluster of its own, says so, and waits to be killed."""
    address = sys.argv[1] if len(sys.argv) > 1 else None
    with connect(address, hosts=0) as cluster:
        status = cluster.status()
        hosts = [host.process_id for island in status.islands for host in island.hosts]
        said = {"address": status.address, "clients": status.clients, "hosts": hosts}
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        sys.stdin.read()  # until the test ends it


if __name__ == "__main__":
    main()
