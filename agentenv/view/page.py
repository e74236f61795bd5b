"""The shell of the page, its files in `dist/`, and the policies that a browser enforces on it."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from agentenv.errors import MissingDependency

DIST = Path(__file__).parent / "dist"
STATIC = {"viewer.js": "text/javascript; charset=utf-8", "viewer.css": "text/css; charset=utf-8"}
"""Files of the page and their types."""
_TRUSTED_TYPES = "require-trusted-types-for 'script'; trusted-types 'none'"
SERVER_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    f"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; {_TRUSTED_TYPES}"
)
"""Content-Security-Policy of every answer of the server: no script but the page's, and no other origin."""
HEADERS = {
    "content-security-policy": SERVER_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of every answer of the server."""
_HEAD = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n{policy}'
    '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    '<meta name="color-scheme" content="light dark">\n'
    '<link rel="icon" href="data:,">\n<title>agentenv view</title>\n{style}\n</head>\n'
)
_BODY = (
    '<body>\n<div id="app"></div>\n<noscript>This page needs JavaScript. '
    "`agentenv show RUN` shows the same episodes in a terminal.</noscript>\n"
)


def asset(name: str) -> str:
    """Return a file of `dist/`.

    Raises:
        MissingDependency: the page was not built.
    """
    try:
        return (DIST / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingDependency(
            f"agentenv view: expected {DIST / name}, got none. Build the page: make view."
        ) from None


def server_shell() -> str:
    """Return the page that the server sends: without data, so without a token."""
    head = _HEAD.format(policy="", style='<link rel="stylesheet" href="/static/viewer.css">')
    return f'{head}{_BODY}<script src="/static/viewer.js"></script>\n</body>\n</html>\n'


def file_shell() -> tuple[str, str]:
    """Return what comes before and after the data in a page that is one file.

    Its policy allows exactly this script and this style, and no connection at all.

    Raises:
        MissingDependency: as `asset`.
    """
    script, style = asset("viewer.js"), asset("viewer.css")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; img-src data:; "
        f"base-uri 'none'; form-action 'none'; {_TRUSTED_TYPES}"
    )
    tag = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
    head = _HEAD.format(policy=tag, style=f"<style>{style}</style>")
    return f"{head}{_BODY}<script>{script}</script>\n", "</body>\n</html>\n"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
