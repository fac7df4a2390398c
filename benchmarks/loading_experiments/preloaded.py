"""What the server of `programs` has imported before the processes of a program are forked from it.

Imported by that server alone, and starts nothing: every process begins its own threads, connections and
backends. The garbage collector leaves alone what was there before the fork: looking through it would copy its
every page, in every process.
"""

import gc

import jax.numpy  # noqa: F401
import safetensors.numpy  # noqa: F401
import torch.distributed  # noqa: F401

import waystation.safetensors  # noqa: F401

gc.collect()
gc.freeze()
