"""Makes the golden checkpoints of the present format version that are not there yet.

Run as `python -m tests.golden.make`. What it wrote is kept for ever and never made anew: readers of later
releases must go on reading those very bytes.
"""

from pathlib import Path

from tests.golden.golden_state import CUSTOM_METADATA, checkpointables, state, with_handlers

import waystation

if __name__ == "__main__":
    here = Path(__file__).parent
    if not (here / "format-1").exists():
        waystation.save(here / "format-1", state(), custom_metadata=CUSTOM_METADATA)
    # `format-1-files` has the files of handlers where earlier saves put them.
    if not (here / "format-1-handled").exists():
        with with_handlers():
            waystation.save_checkpointables(here / "format-1-handled", checkpointables())
