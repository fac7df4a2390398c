"""A sequence of checkpoints, and the policies by which it saves and keeps them."""
