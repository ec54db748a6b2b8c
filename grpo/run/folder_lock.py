"""One run in a folder at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from pathlib import Path

LOCK_FILE = "run.lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
PATIENCE_S = 0.5
"""A look at the lock (`holder`) holds it for a moment."""


class Taken(Exception):
    """Another process holds the folder; the text says which."""


class FolderLock:
    """Holds a folder for this process, from before anything is in it, until it is released or the process ends, in
    whatever way: the lock is the system's (flock), the file only tells who has it.

    On network file systems: NFS locks hold between machines (but not mounted with nolock or local_lock), Lustre needs
    the option flock; where the system knows no locks, `take` says so.
    """

    def __init__(self, folder: Path):
        self.folder, self.file = folder, folder / LOCK_FILE
        self._stream = None
        self._made: list[Path] = []

    def take(self) -> bool:
        """Makes the folder where it is missing; False where the file system knows no locks.

        Raises Taken where another process holds it, OSError where the folder cannot be written.
        """
        end = time.monotonic() + PATIENCE_S
        while True:
            self._made += [path for path in (self.folder, *self.folder.parents) if not path.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                stream = self.file.open("a+", encoding="utf-8")
            except FileNotFoundError:  # its last holder has just removed the folder
                continue
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                stream.seek(0)
                holder = stream.read().strip()
                stream.close()
                if time.monotonic() < end:
                    time.sleep(PATIENCE_S / 10)
                    continue
                raise Taken(holder or "another process") from None
            except OSError as error:
                stream.close()
                if error.errno not in NO_LOCKS:
                    raise
                self.file.unlink(missing_ok=True)
                return False
            if self._is_in_place(stream.fileno()):
                break
            stream.close()  # its last holder has just removed it
        self._stream = stream
        stream.truncate(0)
        stream.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        stream.flush()
        return True

    def _is_in_place(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self.file.stat())
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Gives the folder up, and removes what `take` made of it where nothing was put in.

        Does nothing where it is not held.
        """
        if self._stream:
            self.file.unlink(missing_ok=True)
            self._stream.close()
            self._stream = None
        for path in self._made:
            try:
                path.rmdir()
            except OSError:  # something is in it
                break
        self._made = []

    def holder(self) -> str | None:
        """Who holds it, looked at from outside; None where nobody does."""
        try:
            with self.file.open(encoding="utf-8") as stream:
                try:
                    fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return stream.read().strip() or "another process"
        except OSError:  # no such file, or no locks
            pass
        return None
