"""Archives of an agent's files, in blocking style."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from perdure.archive import archives
from perdure.archive.limits import ArchiveLimits
from perdure.sync.mirror import Mirror, attribute, awaited

if TYPE_CHECKING:
    from perdure.archive.restore import ArchiveRestored
    from perdure.archive.save import ArchiveSaved, Progress
    from perdure.records.archives import Archive
    from perdure.sync.session import Session, SessionView


@final
class Archives(Mirror[archives.Archives]):
    """The files of an agent's home folder, kept with a session. As `perdure.archive.Archives`.

    Args:
        session: An open session; or one that was loaded, to look and to export.
        home: The home folder. Default: the agent's own, where the store keeps one for it.
        paths: ``persist_paths``: folders in it, among them hidden ones that are to be kept.
        whole: Whether everything visible is archived; else only these paths.
        limits: How large an archive may be.
        wait: Seconds to wait for another process that saves or restores the same home.

    Raises:
        ConfigError: A path is absolute, or leaves the home folder.

    """

    def __init__(
        self,
        session: Session | SessionView,
        home: str | os.PathLike[str] | None = None,
        *,
        paths: Sequence[str] = (),
        whole: bool = True,
        limits: ArchiveLimits = ArchiveLimits(),  # noqa: B008  # frozen
        wait: float = 60.0,
    ) -> None:
        inner = archives.Archives(
            session._inner, home, paths=paths, whole=whole, limits=limits, wait=wait
        )
        super().__init__(session._loop, inner)

    @property
    @attribute
    def home(self) -> str | None:
        """The home folder; None where none was given, and the store keeps none for the agent."""

    @awaited
    def all(self) -> list[Archive]:
        """Return the archives that are listed, newest first."""

    @awaited
    def latest(self) -> Archive | None:
        """Return the newest archive, None if there is none."""

    @awaited
    def find(self, name: str | None = None) -> Archive:
        """Return the archive with this id, or the newest with this label; None: the newest.

        Raises:
            ConfigError: There is no such archive.

        """

    @awaited
    def save(
        self, *, label: str = "", keep: int = archives.KEPT, progress: Progress = None
    ) -> ArchiveSaved:
        """Archive the home folder; what it returns is durable, and was read back.

        As `perdure.archive.Archives.save`. ``progress`` is called in the loop's thread.
        """

    @awaited
    def restore(
        self, name: str | None = None, *, force: bool = False, progress: Progress = None
    ) -> ArchiveRestored:
        """Make the home folder what it was. As `perdure.archive.Archives.restore`."""

    @awaited
    def resume(self, *, progress: Progress = None) -> ArchiveRestored:
        """Bring the newest archive back at a start. As `perdure.archive.Archives.resume`."""

    @awaited
    def verify(self, name: str | None = None) -> Archive:
        """Read all of an archive, and return which it was. As `perdure.archive.Archives.verify`."""

    @awaited
    def write(self, path: str | os.PathLike[str], name: str | None = None) -> int:
        """Write an archive into a new file. As `perdure.archive.Archives.write`."""

    @awaited
    def read(
        self, path: str | os.PathLike[str], *, force: bool = False, progress: Progress = None
    ) -> ArchiveRestored:
        """Make the home folder what a file holds. As `perdure.archive.Archives.read`."""
