"""Files of a machine, wherever they are: the running system, a recorded root folder, or a list of paths and values.

The probe asks a tree and never the file system, so that a recorded machine reads exactly like this one. Reads are
short and non-blocking; a file that is missing, unreadable or answers EINVAL (empty GID entries do) is None.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

_LIMIT = 1 << 18
_MISSING = "(missing)"
_LINK = "-> "
_MAX_HOPS = 40


class Tree(Protocol):
    """Absolute paths as on the machine itself ("/sys/class/net")."""

    def read(self, path: str) -> str | None:
        """The file's text without the last line end; None when it cannot be read."""
        ...

    def list(self, path: str) -> list[str]:
        """Names in a folder; empty when there is none."""
        ...

    def exists(self, path: str) -> bool: ...

    def real(self, path: str) -> str:
        """The path with all links followed, as far as they lead."""
        ...

    def may_open(self, path: str) -> bool | None:
        """Whether this process may read and write the file; None when the tree is only a recording."""
        ...


class FolderTree:
    """The files below `root`: "/" is this system."""

    def __init__(self, root: str | Path = "/") -> None:
        self.root = Path(root)
        self.live = self.root == Path("/")

    def _at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def read(self, path: str) -> str | None:
        try:
            fd = os.open(self._at(path), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            return os.read(fd, _LIMIT).decode(errors="replace").rstrip("\n")
        except OSError:
            return None
        finally:
            os.close(fd)

    def list(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self._at(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return self._at(path).exists()

    def real(self, path: str) -> str:
        resolved = self._at(path).resolve()
        base = self.root.resolve()
        return f"/{resolved.relative_to(base)}" if resolved.is_relative_to(base) else str(resolved)

    def may_open(self, path: str) -> bool | None:
        return os.access(self._at(path), os.R_OK | os.W_OK) if self.live else None


class ListTree:
    """Files of a `path<TAB>value` list. A value "-> target" is a link, "(missing)" says that the file is absent."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = {
            path: value for path, value in files.items() if not value.startswith(_LINK) and value != _MISSING
        }
        self._links = {path: value[len(_LINK) :] for path, value in files.items() if value.startswith(_LINK)}
        self._folders: dict[str, set[str]] = {}
        self._real: dict[str, str] = {}
        for path in (*self._files, *self._links):
            folder, _, name = path.rpartition("/")
            while name:
                self._folders.setdefault(folder or "/", set()).add(name)
                folder, _, name = folder.rpartition("/")

    @staticmethod
    def parse(text: str) -> ListTree:
        """Lines without a tab are left out; the reader of such lists warns about them."""
        pairs = (line.split("\t", 1) for line in text.splitlines() if "\t" in line)
        return ListTree({path.strip(): value.strip() for path, value in pairs if path.startswith("/")})

    def read(self, path: str) -> str | None:
        return self._files.get(self.real(path))

    def list(self, path: str) -> list[str]:
        return sorted(self._folders.get(self.real(path), ()))

    def exists(self, path: str) -> bool:
        real = self.real(path)
        return real in self._files or real in self._folders

    def real(self, path: str) -> str:
        if path in self._files:
            return path
        if path not in self._real:
            real = path
            for _ in range(_MAX_HOPS):
                followed = self._follow(real)
                if followed == real:
                    break
                real = followed
            self._real[path] = real
        return self._real[path]

    def _follow(self, path: str) -> str:
        end = path.find("/", 1)
        while self._links:
            head = path if end < 0 else path[:end]
            if head in self._links:
                return os.path.normpath(os.path.join(os.path.dirname(head), self._links[head], path[len(head) + 1 :]))
            if end < 0:
                break
            end = path.find("/", end + 1)
        return path

    def may_open(self, path: str) -> bool | None:
        return None
