"""Settings of object stores, as programs have them for other libraries."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support import s3

import waystation
from waystation import storage
from waystation.errors import InvalidInput, PermissionDenied, WaystationError
from waystation.options import settings_of_s3fs

SECRET = "1c9e-not-to-be-seen"


def test_what_s3fs_takes_reaches_a_store() -> None:
    own = s3.bucket()
    context = waystation.Context()
    context.storage.settings = settings_of_s3fs(
        {
            "key": s3.ACCESS_KEY,
            "secret": s3.SECRET_KEY,
            "token": None,
            "anon": False,
            "client_kwargs": {"endpoint_url": own.endpoint, "region_name": "us-east-1"},
        }
    )
    with context:
        waystation.save(f"{own.location}/ckpt", {"a": np.arange(3)})
        assert waystation.load(f"{own.location}/ckpt")["a"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {}),
        ({"anon": True}, {"aws_skip_signature": "true"}),
        ({"use_ssl": False}, {"aws_allow_http": "true"}),
        ({"endpoint_url": "https://it"}, {"aws_endpoint": "https://it"}),
        ({"token": "it", "client_kwargs": {}}, {"aws_session_token": "it"}),
    ],
)
def test_each_option_is_a_setting(given: dict[str, Any], expected: dict[str, str]) -> None:
    assert dict(settings_of_s3fs(given)) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"secret": SECRET, "profile": SECRET}, "profile"),
        ({"client_kwargs": {"verify": SECRET}}, "client_kwargs.verify"),
        ({"secret": SECRET, "client_kwargs": SECRET}, "client_kwargs"),
        ({"secret": [SECRET]}, "aws_secret_access_key"),
        ({"anon": SECRET}, "anon"),
        (SECRET, "a dict"),
    ],
)
def test_what_is_no_setting_is_named_and_its_value_is_not(given: Any, named: str) -> None:
    with pytest.raises(InvalidInput, match=named) as caught:
        settings_of_s3fs(given)
    assert SECRET not in str(caught.value)


# ---- values and what is missing ----------------------------------------------------------------


def test_values_are_text_flags_and_numbers() -> None:
    options = waystation.options.ObjectStoreOptions()
    options.settings = {"aws_allow_http": True, "aws_skip_signature": False, "pool_max_idle_per_host": 3}
    assert dict(options.settings) == {
        "aws_allow_http": "true",
        "aws_skip_signature": "false",
        "pool_max_idle_per_host": "3",
    }
    for wrong, named in (
        ({"aws_region": [SECRET]}, "a list as 'aws_region'"),
        ({3: SECRET}, "a int as a name"),
    ):
        with pytest.raises(InvalidInput, match="True or False") as caught:
            options.settings = wrong
        assert named in str(caught.value)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "settings", "expected"),
    [
        (
            "s3://bucket/a",
            {"proxy_url": f"not a url {SECRET}"},
            "'proxy_url' cannot be used: it must be a URL",
        ),
        ("s3://bucket/a", {"timeout": SECRET}, "'timeout' cannot be used: it must be a duration"),
        (
            "s3://bucket/a",
            {"aws_skip_signature": SECRET},
            "'aws_skip_signature' cannot be used: it must be 'true'",
        ),
        ("s3://bucket/a", {"aws_secret_access_key": SECRET}, "'aws_access_key_id' is missing"),
        ("s3://bucket/a", {"aws_access_key_id": "me"}, "'aws_secret_access_key' is missing"),
        ("s3://bucket/a", {"aws_reguon": SECRET}, "no option 'aws_reguon'"),
        ("az://box/a", {"azure_storage_account_key": "c2VjcmV0"}, "'azure_storage_account_name' is missing"),
        (
            "az://box/a",
            {"azure_storage_account_name": "me", "azure_storage_account_key": f"!{SECRET}"},
            "'azure_storage_account_key' cannot be used: it must be the key of the account, as base64",
        ),
        (
            "gs://bucket/a",
            {"google_service_account": f"/nowhere/{SECRET}"},
            "'google_service_account' cannot be used: it must be the path",
        ),
        ("https://host/a", {"proxy_url": f"not a url {SECRET}"}, "'proxy_url' cannot be used"),
    ],
)
def test_the_setting_that_is_missing_or_wrong_is_named(
    location: str, settings: dict[str, Any], expected: str
) -> None:
    context = waystation.Context()
    context.storage.settings = settings
    context.storage.deadline_s = 5
    with context, pytest.raises(InvalidInput) as caught:
        waystation.load(location)
    assert expected in str(caught.value)
    assert SECRET not in str(caught.value) + repr(caught.value)


def test_a_variable_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ALLOW_HTTP", SECRET)
    monkeypatch.setenv("AWS_CONNECT_TIMEOUT", "5s")
    with pytest.raises(
        InvalidInput, match="the variable AWS_ALLOW_HTTP of the environment cannot be used"
    ) as caught:
        waystation.load("s3://bucket/a")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("location", "expected"),
    [("s3://bucket/a", "aws_access_key_id"), ("gs://bucket/a", "google_service_account")],
)
def test_missing_credentials_are_told_and_what_to_set(
    location: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("AWS_", "GOOGLE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", "/nowhere")
    context = waystation.Context()
    context.storage.deadline_s = 60
    # In the place of the service that machines of clouds have: nothing listens there.
    context.storage.settings = {"proxy_url": "http://127.0.0.1:1", "connect_timeout": "1s"}
    begun = time.monotonic()
    with context, pytest.raises(PermissionDenied, match=expected) as caught:
        waystation.load(location)
    assert "skip_signature" in str(caught.value)
    assert time.monotonic() - begun < 30


def test_another_region_is_told() -> None:
    place = s3.bucket()
    context = place.context(aws_region="eu-central-1")
    for call in (waystation.load, storage.status):
        with context, pytest.raises(WaystationError, match="aws_region") as caught:
            call(f"{place.location}/a")
        assert "AWS_REGION" in str(caught.value)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_a_certificate_that_is_not_trusted_is_told_at_once(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*request, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    encryption = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    encryption.load_cert_chain(certificate, key)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    accepted, _ = listening.accept()
                    with accepted, contextlib.suppress(OSError):
                        encryption.wrap_socket(accepted, server_side=True).close()

        threading.Thread(target=answer, daemon=True).start()
        begun = time.monotonic()
        endpoint = f"https://127.0.0.1:{listening.getsockname()[1]}"
        with s3.context(endpoint, deadline_s=60), pytest.raises(InvalidInput, match="SSL_CERT_FILE"):
            waystation.load("s3://bucket/a")
        assert time.monotonic() - begun < 30
