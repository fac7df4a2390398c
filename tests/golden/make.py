"""Makes the golden checkpoint of the present format version: `python -m tests.golden.make`.

Run once per format version, by the release that introduces it. What it wrote is then kept for ever and
never made anew: readers of later releases must go on reading those very bytes.
"""

from pathlib import Path

from tests.golden.golden_state import CUSTOM_METADATA, state

import waystation

if __name__ == "__main__":
    waystation.save(Path(__file__).parent / "format-1", state(), custom_metadata=CUSTOM_METADATA)
