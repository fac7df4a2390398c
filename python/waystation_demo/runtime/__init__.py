"""The demonstration of the runtime: two programs share two islands, a host is killed, training goes on.

`run` tells the story and checks it; `waystation demo --runtime` is its command. `train.py` is the program
that trains, meant to be read first and copied from; `rival.py` is the other one.
"""

from waystation_demo.runtime.story import Plan, run

__all__ = ["Plan", "run"]
