"""Measures the runtime's one controller against what it is to be as good as: multi-controller JAX, where
every host begins its computations by itself, and Ray's actors, called one by one (sections 5.1 to 5.3 of the
Pathways paper).
"""
