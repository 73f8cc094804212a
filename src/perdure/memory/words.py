"""The words of a text, also in scripts that put no space between them. Pure.

Chinese, Japanese, Korean, Thai and their like are not taken apart by a dictionary, which would be
large and often wrong: each pair of neighboring characters counts as a word, as search engines do.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["spaced", "words_of"]

_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"  # Thai, Lao, Myanmar, Khmer
    "\u3041-\u30ff\u31f0-\u31ff\uff66-\uff9f"  # kana
    "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Han
    "\uac00-\ud7a3"  # Hangul, whose words carry particles
)
_RUN: Final = re.compile(rf"[{_UNSPACED}]+|[^\W{_UNSPACED}]+")
_CHARACTER: Final = re.compile(f"[{_UNSPACED}]")


def words_of(text: str) -> list[str]:
    """Return the words of a text, each once, in their order.

    >>> words_of("the boat, the berth")
    ['the', 'boat', 'berth']
    >>> words_of("我的船")
    ['我的', '的船']
    """
    found: list[str] = []
    for run in _RUN.findall(text):
        if _CHARACTER.match(run) and len(run) > 2:
            found += (run[at : at + 2] for at in range(len(run) - 1))
        else:
            found.append(run)
    return list(dict.fromkeys(found))


def spaced(text: str) -> str:
    """Return a text with spaces round each character of a script that has none.

    >>> spaced("我的boat").split()
    ['我', '的', 'boat']
    """
    return _CHARACTER.sub(r" \g<0> ", text)
