"""One line for what the operating system refuses: where, what, and what to do. It is no bug, so no traceback."""

import errno
import os

_NO_SPACE = "free disk space, and try again"
_NO_PERMISSION = "run this as its owner, change its owner or mode, or name another path"
_NO_FOLDER = "a folder is needed there; move the file away, or name another path"
_SHARE_LOST = "the share was disconnected; mount it again"
_HINTS = {
    errno.ENOSPC: _NO_SPACE,
    errno.EDQUOT: _NO_SPACE,
    errno.EACCES: _NO_PERMISSION,
    errno.EPERM: _NO_PERMISSION,
    errno.ENOTDIR: _NO_FOLDER,
    errno.EEXIST: _NO_FOLDER,
    errno.ENOENT: "check the path, and whether another program removes files there",
    errno.EISDIR: "a file is needed there; move the folder away, or name another path",
    errno.EROFS: "name another folder, or mount it so that it can be written to",
    errno.ELOOP: "check where these links lead, or name another path",
    errno.ENAMETOOLONG: "name another path",
    errno.EFBIG: "raise `ulimit -f`, or name a folder on another file system",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise `sysctl fs.file-max`",
    errno.EIO: "the disk or share fails; see `dmesg`",
    errno.ESTALE: _SHARE_LOST,
    errno.ENOTCONN: _SHARE_LOST,
}


def explain_os_error(error: OSError) -> str | None:
    """One line; None where a traceback says more: the error names no file, or is none of the usual ones."""
    # A copy names the file that it reads first. A write to an open file names none.
    named = error.filename2 or error.filename if _HINTS.get(error.errno or 0) == _NO_SPACE else error.filename
    hint = _HINTS.get(error.errno or 0)
    if hint is None or (named is None and hint != _NO_SPACE) or isinstance(named, int):
        return None
    where = f"{os.fsdecode(named)}: " if named else ""
    return f"{where}{os.strerror(error.errno or 0)}; {hint}"
