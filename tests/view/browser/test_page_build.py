"""The committed page is what its sources build, byte by byte, where Node and the packages of view_src are."""

import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.view.page import DIST

pytestmark = pytest.mark.slow
SOURCES = Path(__file__).parents[3] / "view_src"


@pytest.mark.skipif(
    not shutil.which("node") or not (SOURCES / "node_modules").is_dir(),
    reason="`make view` installs what builds the page",
)
def test_the_sources_have_no_type_error_and_build_the_committed_page(tmp_path):
    subprocess.run(["npm", "run", "--silent", "check"], cwd=SOURCES, check=True)
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=SOURCES, check=True)
    for name in ("viewer.js", "viewer.css", "manifest.json"):
        assert (tmp_path / name).read_bytes() == (DIST / name).read_bytes()
