"""Tokens, by which a Ray cluster knows its programs: what `ray.init` and `ray start` do for clusters of their
own.

Ray takes these decisions when it is imported or when it starts a cluster itself; a program that joins one has
to take them before, and there is no public way to.
"""

from __future__ import annotations


def use_token(*, make: bool) -> None:
    """Has this process, and those that it starts, show the user's token (`~/.ray/auth_token`).

    What `RAY_AUTH_MODE` says in the environment comes first.

    Args:
        make: Make a token if there is none; else clusters are joined without.
    """
    from ray._private.authentication import authentication_token_setup as setup

    if make:
        setup.enable_token_auth_by_default()
        setup.ensure_token_if_auth_enabled()
    else:
        setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
