"""Which part of a home folder an archive has: what is visible, and what ``persist_paths`` name.

Left out: names that begin with a dot, and what a machine makes for itself. Naming such a folder in
``persist_paths`` takes it in, with all that is below it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

from perdure.archive.limits import ArchiveLimits, fault_of_path
from perdure.errors import ConfigError, InvalidArgumentError

MAX_PATHS: Final = 100


SYSTEM: Final = frozenset(
    {"$recycle.bin", "__pycache__", "lost+found", "node_modules", "snap"}
    | {"system volume information"}
)
"""Folders that a machine makes for itself, in lower case."""


Fate = Literal["taken", "entered", "hidden", "system", "unnamed"]
"""``entered``: only since something below is taken."""


class Selection(msgspec.Struct, frozen=True):
    """What of a home folder is archived."""

    paths: tuple[str, ...] = ()
    """Named on their own, without slashes at the end."""
    whole: bool = True
    """Whether everything visible belongs to it, named or not."""

    def fate(self, path: str) -> Fate:
        """Say what becomes of an entry.

        >>> selection_of([".config/"]).fate(".config/app/.x"), selection_of([]).fate(".bashrc")
        ('taken', 'hidden')
        """
        within = [selected for selected in self.paths if _covers(selected, path)]
        hidden = [step for step in path.split("/") if is_hidden(step)]
        is_selected = bool(within) or self.whole
        if is_selected and (
            not hidden or any(is_hidden(step) for selected in within for step in _steps(selected))
        ):
            return "taken"
        if self.leads_through(path):
            return "entered"
        if not is_selected:
            return "unnamed"
        return "hidden" if any(step.startswith(".") for step in hidden) else "system"

    def leads_through(self, path: str) -> bool:
        """Say whether a named path is this one, or below it."""
        return any(_covers(path, selected) for selected in self.paths)

    def hidden_beyond(self, other: Selection) -> list[str]:
        """Return the hidden paths that are named here, and that another selection leaves out.

        >>> selection_of([".config", "data"]).hidden_beyond(selection_of([]))
        ['.config']
        """
        hidden = (path for path in self.paths if any(map(is_hidden, _steps(path))))
        return [path for path in hidden if other.fate(path) != "taken"]

    def units(self, top: Iterable[str]) -> list[str]:
        """Return the paths that a restore replaces as a whole.

        Args:
            top: The names that are in the home folder, or are to be.

        """
        named = [path for path in self.paths if not self.whole or is_hidden(_steps(path)[0])]
        least = [path for path in named if not any(_covers(o, path) and o != path for o in named)]
        visible = [name for name in top if not is_hidden(name)] if self.whole else []
        return sorted({*least, *visible})


def is_hidden(step: str) -> bool:
    """Say whether a name is left out unless it is named."""
    return step.startswith(".") or step.casefold() in SYSTEM


def selection_of(paths: Sequence[str], *, whole: bool = True) -> Selection:
    """Return what these ``persist_paths`` select.

    Raises:
        InvalidArgumentError: A path is absolute, leaves the home folder, or cannot be a path; or
            there are more than 100.

    """
    if isinstance(paths, str):
        raise _config("give a list of paths, not one text", paths)
    if len(paths) > MAX_PATHS:
        raise _config(f"{len(paths)} of them are over the limit of {MAX_PATHS}", paths[0])
    selected: list[str] = []
    for given in paths:
        if not isinstance(given, str):
            raise _config("give paths as text", given)
        path = given.removeprefix("./")
        path = path if path == "/" else path.rstrip("/")
        fault = fault_of_path(path, ArchiveLimits())
        if fault is not None:
            raise _config(f"{fault}; name folders below the agent's home, such as data/", given)
        if path not in selected:
            selected.append(path)
    return Selection(tuple(selected), whole)


def _config(reason: str, value: object) -> ConfigError:
    message = f"persist_paths: invalid {value!r}: {reason}"
    return InvalidArgumentError(message, option="persist_paths", value=value)


def _steps(path: str) -> list[str]:
    return path.split("/")


def _covers(above: str, path: str) -> bool:
    return path == above or path.startswith(above + "/")
