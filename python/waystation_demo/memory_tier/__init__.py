"""The demonstration of the memory tier: a host is lost in the middle of training, with all that it had in
memory.

`run` tells the story and checks it; `waystation demo --memory` is its command. `train.py` is the program that
trains, meant to be read first and copied from.
"""

from waystation_demo.memory_tier.runs import Plan
from waystation_demo.memory_tier.story import run

__all__ = ["Plan", "run"]
