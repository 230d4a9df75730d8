"""The page: one document with its style and script, and the content security policy that allows nothing else."""

from __future__ import annotations

import html
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Final


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


_STYLE = _read("page.css")
_SCRIPT = _read("page.js")
_DOCUMENT = _read("page.html").replace("/* style */", _STYLE).replace("/* script */", _SCRIPT)


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


#: Headers of every response. Only the page's own style and script have the two hashes: a browser runs no injected
#: code, and the page can connect only to the server that it came from.
HEADERS: Final[tuple[tuple[bytes, bytes], ...]] = tuple(
    (name, value.encode())
    for name, value in {
        b"content-security-policy": (
            f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
            "require-trusted-types-for 'script'; trusted-types 'none'"
        ),
        b"cache-control": "no-store",
        b"cross-origin-opener-policy": "same-origin",
        b"cross-origin-resource-policy": "same-origin",
        b"referrer-policy": "no-referrer",
        b"x-content-type-options": "nosniff",
        b"x-frame-options": "DENY",
    }.items()
)


def page(title: str) -> bytes:
    """Return the document with this title."""
    return _DOCUMENT.replace("{{ title }}", html.escape(title)).encode()
