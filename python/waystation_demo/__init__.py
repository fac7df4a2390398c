"""The demonstration: a real training program that is killed, resumed elsewhere and proven unharmed.

`run` tells the story and checks it; `waystation demo` is its command. `train.py` is the program that trains
and saves, meant to be read first and copied from. Of Waystation only its command line imports this package.
"""

from waystation_demo.proof import DemoFailed
from waystation_demo.story import run

__all__ = ["DemoFailed", "run"]
