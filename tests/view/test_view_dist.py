"""The built page: it belongs to its sources, and is one script and one style that may stand in a file."""

import hashlib
import json
import re
from pathlib import Path

from agentenv.view.page import DIST, STATIC, asset

ROOT = Path(__file__).parents[2]
MANIFEST = json.loads((DIST / "manifest.json").read_text())


def digests(folder, names):
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def test_the_page_was_built_from_its_sources():
    paths = (path.relative_to(ROOT) for path in (ROOT / "view_src").rglob("*") if path.is_file())
    sources = [path.as_posix() for path in paths if "node_modules" not in path.parts]
    assert MANIFEST["sources"] == digests(ROOT, sources), "the page is not that of its sources: run `make view`"


def test_the_files_are_those_that_were_built():
    assert set(MANIFEST["outputs"]) == set(STATIC)
    assert MANIFEST["outputs"] == digests(DIST, STATIC)


def test_the_script_may_stand_in_a_file_and_makes_no_markup_of_data():
    script, style = asset("viewer.js"), asset("viewer.css")
    assert not re.search("</script|<!--", script, re.IGNORECASE)
    assert "</style" not in style.lower()
    assert not re.search(r"\beval\(|new Function|document\.write|insertAdjacentHTML|outerHTML|srcdoc", script)
    assert not re.search(r"@import|url\((?!['\"]?data:)", style)
    assert "sourceMappingURL" not in script


def test_the_sources_make_no_markup_of_data():
    words = (
        r"innerHTML|outerHTML|insertAdjacentHTML|dangerouslySetInnerHTML|srcdoc|document\.write|\beval\(|new Function"
    )
    sources = [path for path in (ROOT / "view_src" / "src").rglob("*") if path.suffix in (".ts", ".tsx")]
    assert sources
    assert not [path for path in sources if re.search(words, path.read_text())]
