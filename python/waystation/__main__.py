"""`python -m waystation` is the command `waystation`, of the interpreter that runs it."""

from __future__ import annotations

from waystation.cli import main

if __name__ == "__main__":
    main()
