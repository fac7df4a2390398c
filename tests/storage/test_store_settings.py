"""Settings of object stores, as programs have them for other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.support import s3

import waystation
from waystation.errors import InvalidInput
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
