"""The torture bench: faults of every kind, done to every way of saving and loading, and what came of each.

A *run* is a system, a fault and a seed, and is the same whenever it is made again. It prepares a committed
state, has a process of its own save, overwrite, collect or load while the fault is done to it, and then
judges what
is there from a clean process: `python -m torture --help`.

The bench knows nothing of how a system works. It knows one law, which it holds all of them to: what was
committed is loaded bit for bit, or an error says that it cannot be; a state that was never committed is
never seen.
"""
