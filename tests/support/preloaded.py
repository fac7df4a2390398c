"""What the server of `programs` has imported before the processes of tests are forked from it.

Imported by that server alone, and starts nothing. What processes would each import when they first use it is
here already, and their garbage collector leaves alone what was there before them: looking through it would
copy its every page, in every process.
"""

import gc

import hypothesis.strategies  # noqa: F401
import jax  # noqa: F401
import torch._dynamo
import torch.distributed.tensor  # noqa: F401  (it needs the one before at its first use: two seconds)
from tests.support import at_exit

import waystation.checkpoint
import waystation.cli.application
import waystation.frameworks.jax_arrays
import waystation.frameworks.torch_distributed  # noqa: F401

at_exit.end()

gc.collect()
gc.freeze()
