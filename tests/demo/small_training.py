"""The training of the demo with smaller batches, for tests that do not measure it."""

from __future__ import annotations

from waystation_demo import train

if __name__ == "__main__":
    train.BATCH = 4
    train.main()
