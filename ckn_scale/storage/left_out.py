"""What a listing never yields, in one place and for every store.

* names that begin with a dot, files and folders: thumbnails, trash, the shadow files of other systems;
* run folders, whose tables hold thumbnails and patches that are no images of the user;
* what is not a regular file: a FIFO or a device would be waited for (`InputFile.is_special`).

Judged is what lies below the folder that was named. What a user or a list names itself is taken.
"""

from __future__ import annotations

from ckn_scale.errors import InputError
from ckn_scale.storage.filesystems import is_local_url
from ckn_scale.storage.image_refs import extension
from ckn_scale.storage.run_folder import holds_run

_FOLDERS_KNOWN = 100_000  # a few megabytes of names


def is_hidden(path: str) -> bool:
    """Whether a relative path has a name that begins with a dot; `.` and `..` are none."""
    return any(part.startswith(".") and part not in (".", "..") for part in path.split("/"))


def check_no_run(folder: str) -> None:
    """InputError for a run folder that was given for one of images."""
    if holds_run(folder):
        raise InputError(f"{folder} is a run folder, not one of images: name the folder that has the images")


class RunFolders:
    """Which folders below `root` are runs or lie in one; remembered, as neighbours share them."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._is_local = is_local_url(root)
        self._known: dict[str, bool] = {}

    def hold_folder(self, folder: str) -> bool:
        if len(folder) <= len(self.root):
            return False
        if folder not in self._known:
            if len(self._known) >= _FOLDERS_KNOWN:
                self._known.clear()
            self._known[folder] = self.hold_folder(folder.rpartition("/")[0]) or holds_run(folder)
        return self._known[folder]

    def hold_file(self, url: str) -> bool:
        # To ask a store about every folder would be as many requests as there are folders. Of what a run
        # writes only tables would be taken for images, so there only their folders are asked about.
        if not self._is_local and extension(url) not in ("parquet", "pq"):
            return False
        return self.hold_folder(url.rpartition("/")[0])
