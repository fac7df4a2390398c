"""How the directories of the steps of a `training.Checkpointer` are named."""

from waystation.training.step_names import NameFormat, composite_name_format, standard_name_format

__all__ = ["NameFormat", "composite_name_format", "standard_name_format"]
