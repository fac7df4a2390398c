"""The training of the demo of a smaller model on smaller batches, for tests that do not measure it."""

from __future__ import annotations

from dataclasses import replace

from waystation_demo import train

if __name__ == "__main__":
    train.SHAPE = replace(train.SHAPE, width=32, context=16)
    train.BATCH = 4
    train.main()
