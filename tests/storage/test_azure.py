"""Checkpoints in Azure Blob Storage, as Azurite has it (`tools/azurite` installs it, or its programs are on
the PATH)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.ports import claimed_ports
from tests.support.programs import HANG_S

import waystation
from waystation.errors import CheckpointNotFound, Conflict

INSTALLED = Path(__file__).parents[2] / "target" / "azurite" / "node_modules" / ".bin"
PROGRAM = shutil.which(
    "azurite-blob", path=os.pathsep.join((os.fspath(INSTALLED), os.environ.get("PATH", os.defpath)))
)
# Azurite's own, which its documentation tells everybody.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
CONTAINER = "tests"

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="Azurite is not installed; 'make azurite' does that where npm is"
)


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[waystation.Context]:
    """Options by which a server with one container is reached."""
    with claimed_ports(1) as (port,):
        folder: Path = tmp_path_factory.mktemp("azurite")
        assert PROGRAM is not None
        command = [
            PROGRAM,
            "--silent",
            "--skipApiVersionCheck",
            "--blobPort",
            str(port),
            "--location",
            str(folder),
        ]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
            _make_container(endpoint)
            context = waystation.Context()
            context.storage.settings = {
                "azure_storage_account_name": ACCOUNT,
                "azure_storage_account_key": KEY,
                "azure_endpoint": endpoint,
                "azure_allow_http": "true",
            }
            yield context
        finally:
            server.kill()
            server.wait()


def _make_container(endpoint: str) -> None:
    deadline = time.monotonic() + HANG_S
    while True:
        date, version = formatdate(usegmt=True), "2021-08-06"
        resource = f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}"
        headers = f"x-ms-date:{date}\nx-ms-version:{version}"
        signed = "PUT" + 12 * "\n" + f"{headers}\n{resource}\nrestype:container"
        signature = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        request = urllib.request.Request(f"{endpoint}/{CONTAINER}?restype=container", method="PUT")
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


def state_of(value: int) -> dict[str, Any]:
    """A state with an array that is uploaded in parts; all of it says which it is."""
    return {"large": np.full(5 << 20, value, np.float32), "step": value}


def test_a_state_is_saved_replaced_loaded_and_deleted(reached: waystation.Context) -> None:
    path = f"az://{CONTAINER}/run/ckpt"
    with reached:
        waystation.save(path, state_of(1))
        with pytest.raises(Conflict, match="overwrite=True"):
            waystation.save(path, state_of(2))
        waystation.save(path, state_of(2), overwrite=True)
        loaded = waystation.load(path)
        assert loaded["step"] == 2
        assert (loaded["large"] == 2).all()
        assert waystation.delete(path)
        with pytest.raises(CheckpointNotFound):
            waystation.load(path)


def test_a_run_keeps_what_its_policy_says(reached: waystation.Context) -> None:
    policy = waystation.training.preservation_policies.LatestN(2)
    with (
        reached,
        waystation.training.Checkpointer(f"az://{CONTAINER}/steps", preservation_policy=policy) as run,
    ):
        for step in range(4):
            run.save(step, state_of(step), metrics={"loss": 1 / (1 + step)})
        assert [each.step for each in run.checkpoints] == [2, 3]
        assert run.load()["step"] == 3
