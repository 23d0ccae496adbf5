"""Names of files and folders as text that may be written into a file.

Python hands out a file name that it cannot decode with lone surrogates in it, which no UTF-8 file can hold; under
``LC_ALL=C`` that is every name beyond ASCII, so what it decodes depends on the locale. What goes into an artifact does
not: names are decoded here, from their bytes.
"""

from __future__ import annotations

import os

__all__ = ["text_name"]


def text_name(name: str | os.PathLike[str]) -> str:
    """A name or path as text, the same in every locale; bytes that are not UTF-8 become U+FFFD.

    Examples
    --------
    >>> text_name("modèle"), text_name("bad\\udcff")
    ('modèle', 'bad\\ufffd')
    """
    text = os.fspath(name)
    try:
        return os.fsencode(text).decode("utf-8", "replace")
    except UnicodeEncodeError:  # text that never was a file name of this locale, such as a Hub id
        return text.encode("utf-8", "replace").decode("utf-8")
