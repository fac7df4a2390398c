"""How to install what an optional part of the package needs.

Advice names the packages themselves, with the versions that the installed metadata asks for. They are on a
registry, whatever this package was installed from (a checkout, a wheel).
"""

from __future__ import annotations

import importlib.metadata
import re
import shlex

_DISTRIBUTION = "waystation"


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra, to be shown to a user.

    Args:
        extra: The name of the extra, as in `pyproject.toml`.
    """
    try:
        requirements = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:  # sources on PYTHONPATH
        requirements = []
    condition = re.compile(rf"""extra == ['"]{re.escape(extra)}['"]""")
    needed = [text.partition(";")[0].strip() for text in requirements if condition.search(text)]
    if not needed:
        return f"install the packages that waystation's pyproject.toml lists for '{extra}'"
    return f"pip install {shlex.join(needed)}"
