"""The runtime at the scale of thousands of hosts: a model that runs its real scheduler and its real
lowering.
"""
