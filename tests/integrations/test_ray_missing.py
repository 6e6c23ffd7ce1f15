"""Without Ray the module is imported all the same, and the first use says what to install."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("use", ["start(StalenessRule(1), directory='buffer')", "connect('buffer')"])
def test_the_first_use_names_the_extra(tmp_path, use):
    code = (
        "import sys\n"
        "sys.modules['ray'] = None\n"
        "from pystale import StalenessRule\n"
        "from pystale.integrations.ray import RayReplayBuffer\n"
        "try:\n"
        f"    RayReplayBuffer.{use}\n"
        "except ImportError as error:\n"
        "    assert 'install pystale[ray]' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no ImportError')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
