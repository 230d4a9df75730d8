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


#: Only the page's own style and script have the two hashes: a browser runs no injected code, and the page can connect
#: only to the server that it came from.
_POLICY = (
    f"default-src 'none'; script-src {_hash(_SCRIPT)}; style-src {_hash(_STYLE)}; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
#: Headers of every response.
HEADERS: Final[tuple[tuple[bytes, bytes], ...]] = (
    (b"content-security-policy", _POLICY.encode()),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
)


def page(title: str) -> bytes:
    """Return the document with this title."""
    return _DOCUMENT.replace("{{ title }}", html.escape(title)).encode()
