"""What is tested lies beside the tests, whatever the environment has installed."""

import subprocess
import sys
from pathlib import Path

import waystation

ROOT = Path(__file__).parents[2]


def test_programs_that_tests_start_import_this_checkout(tmp_path: Path) -> None:
    code = "import tests.support, waystation; print(tests.support.__file__, waystation.__file__, sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    expected = [ROOT / "tests" / "support" / "__init__.py", ROOT / "python" / "waystation" / "__init__.py"]
    assert done.stdout.splitlines() == list(map(str, expected))
    assert waystation.__file__ == str(expected[1])
