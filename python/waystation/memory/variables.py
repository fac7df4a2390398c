"""Variables of the environment by which `waystation launch` tells programs about the memory tier."""

DIRECTORY_VARIABLE = "WAYSTATION_AGENT_DIRECTORY"
"""The directory of the agent of this host."""
RECOVERY_VARIABLE = "WAYSTATION_RECOVERY"
"""A JSON object: `file`, and the moments of `Recovery` that only the launch has seen."""
