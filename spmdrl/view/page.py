"""Puts the page together: as it is served, or with all that it needs in one file.

Its scripts are plain modules under static/, which an import map names. The page that stands alone
has them as data in that map, so that neither of the two forms is built.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
MODULES = (
    "dom", "source", "colours", "curves", "conversation", "samples", "compare", "history",
    "timeline", "config", "main",
)  # fmt: skip
SCRIPTS = ("vendor/uPlot.iife.min.js", "vendor/diff.min.js")  # they define uPlot and Diff
STYLES = ("vendor/uPlot.min.css", "view.css")
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css"}

HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>spmdrl</title>
<link rel="icon" href="data:,">
{styles}
{policy}<script{nonce} type="importmap">{imports}</script>
{scripts}
</head>
<body>
<noscript>This page needs JavaScript.</noscript>
{data}
<script{nonce} type="module">import "view/main";</script>
</body>
</html>
"""


# nothing is loaded from elsewhere, whatever a sample says
ALONE = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:;
 style-src 'unsafe-inline'; script-src 'unsafe-inline' data:">
"""


def served_page(nonce: str) -> str:
    """The page whose parts are files of the server. nonce: of the policy for its scripts."""
    return HTML.format(
        policy="",
        nonce=f' nonce="{nonce}"',
        styles="\n".join(f'<link rel="stylesheet" href="/static/{name}">' for name in STYLES),
        imports=json.dumps({"imports": {f"view/{m}": f"/static/{m}.js" for m in MODULES}}),
        scripts="\n".join(f'<script src="/static/{name}"></script>' for name in SCRIPTS),
        data="",
    )


def whole_page(data: dict[str, Any]) -> str:
    """The page as one file. data: what it shows."""
    return HTML.format(
        policy=ALONE,
        nonce="",
        styles="\n".join(f"<style>\n{read(name)}</style>" for name in STYLES),
        imports=json.dumps({"imports": {f"view/{m}": as_data(read(f"{m}.js")) for m in MODULES}}),
        scripts="\n".join(f"<script>\n{read(name)}</script>" for name in SCRIPTS),
        data=f'<script type="application/json" id="data">{embedded(data)}</script>',
    )


def read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


def as_data(script: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(script.encode()).decode()


def embedded(data: dict[str, Any]) -> str:
    """JSON in which nothing ends the element that it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
