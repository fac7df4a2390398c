"""A real server of the protocol of Azure Blob Storage on this machine: Azurite."""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import itertools
import os
import shutil
import time
import urllib.error
import urllib.request
from email.utils import formatdate
from pathlib import Path

import pytest
from tests.support.programs import HANG_S
from tests.support.servers import serve

import waystation

INSTALLED = Path(__file__).parents[2] / "target" / "azurite" / "node_modules" / ".bin"
PROGRAM = shutil.which(
    "azurite-blob", path=os.pathsep.join((os.fspath(INSTALLED), os.environ.get("PATH", os.defpath)))
)
# Azurite's own, which its documentation tells everybody.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
_numbers = itertools.count()


class Container:
    """A container of its own; skips the test where no server is installed.

    Attributes:
        location: `az://container`.
    """

    def __init__(self) -> None:
        self._endpoint = _server()
        name = f"container-{os.getpid()}-{next(_numbers)}"
        _make_container(self._endpoint, name)
        self.location = f"az://{name}"

    def context(self) -> waystation.Context:
        """Options by which it is reached."""
        made = waystation.Context()
        made.storage.deadline_s = HANG_S
        made.storage.settings = {
            "azure_storage_account_name": ACCOUNT,
            "azure_storage_account_key": KEY,
            "azure_endpoint": self._endpoint,
            "azure_allow_http": "true",
        }
        return made


@functools.cache
def _server() -> str:
    if PROGRAM is None:
        pytest.skip("Azurite is not installed; 'make azurite' does that where npm is")
    own = ["--silent", "--skipApiVersionCheck"]
    address, _ = serve(
        PROGRAM, lambda port, place: [*own, "--blobPort", str(port), "--location", os.fspath(place)]
    )
    return f"http://{address}/{ACCOUNT}"


def _make_container(endpoint: str, name: str) -> None:
    deadline = time.monotonic() + HANG_S
    while True:
        date, version = formatdate(usegmt=True), "2021-08-06"
        resource = f"/{ACCOUNT}/{ACCOUNT}/{name}"
        headers = f"x-ms-date:{date}\nx-ms-version:{version}"
        signed = "PUT" + 12 * "\n" + f"{headers}\n{resource}\nrestype:container"
        signature = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(f"{endpoint}/{name}?restype=container", method="PUT")
        request.add_header("x-ms-date", date)
        request.add_header("x-ms-version", version)
        request.add_header("Authorization", f"SharedKey {ACCOUNT}:{base64.b64encode(signature).decode()}")
        try:
            urllib.request.urlopen(request, timeout=HANG_S).close()
            return
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < deadline, "Azurite does not answer"
            time.sleep(0.1)
