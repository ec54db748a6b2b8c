"""Files that others read: models, and weights on their way to a server."""

from __future__ import annotations

from pathlib import Path


def share_as_folder(folder: Path) -> None:
    """Lets those read the files in `folder` who may read the folder itself, as the umask of this process has it.

    Safetensors writes files that only their owner can read.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def is_disk_fault(error: BaseException) -> bool:
    """Safetensors and tokenizers raise errors of their own, which tell the system's by its number."""
    return isinstance(error, OSError) or "(os error " in str(error)
