"""What the operating system refuses, in one line: which file, why, and what to do. It is no bug, so no traceback."""

import errno
import os
import pwd
import stat
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
_NO_FOLDER = (errno.ENOTDIR, errno.EEXIST)
_HINTS = {
    errno.ENOENT: "look whether the path is right, and whether something removes what is there",
    errno.EISDIR: "a file is needed there; move the folder away or name another path",
    errno.EROFS: "name another folder, or mount it so that it can be written to",
    errno.ELOOP: "look where these links lead, or name another path",
    errno.ENAMETOOLONG: "name another path",
    errno.EFBIG: "raise `ulimit -f`, or name a folder on another file system",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "raise `sysctl fs.file-max`",
    errno.EIO: "the disk or share fails; look into `dmesg`",
    errno.ESTALE: "the share went away; mount it again",
    errno.ENOTCONN: "the share went away; mount it again",
}


def in_words(error: OSError) -> str | None:
    """One line; None where a traceback says more: no file is named, or it is none of the usual refusals."""
    number, path = error.errno, _path(error.filename)
    if number in _FULL:  # a write to an open file names none, a copy the one that is copied as well
        named = _path(error.filename2) or path
        where = f"{named}: no" if named else "no"
        return f"{where} room left on the disk, or in your share of it; make room and try again"
    if path is None or number is None:
        return None
    if number in _FORBIDDEN:
        return f"{path}: {_who_may(path)}"
    if number in _NO_FOLDER:
        if (in_the_way := _no_folder(path)) is None:
            return None
        where = "it" if in_the_way == path else str(in_the_way)
        return f"{path}: {where} is there and no folder; move it away or name another path"
    if hint := _HINTS.get(number):
        return f"{path}: {os.strerror(number)}; {hint}"
    return None


def _path(named: object) -> Path | None:
    return Path(os.fsdecode(named)) if isinstance(named, str | bytes | os.PathLike) else None


def _no_folder(path: Path) -> Path | None:
    """What stands where a folder is needed."""
    known = ((each, _status(each)) for each in (path, *path.parents))
    return next((each for each, status in known if status and not stat.S_ISDIR(status.st_mode)), None)


def _who_may(path: Path) -> str:
    path = path.absolute()
    there = [each for each in (path, *path.parents) if _status(each)][:2]
    # Nobody but the folder's owner may add or remove what is in it, also where the file is one's own.
    forbids = next((each for each in there if not os.access(each, os.R_OK | os.W_OK)), path)
    status = _status(forbids)
    if status is None:
        return "no permission; run this as the user who owns the site"
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    which = "it" if forbids == path else str(forbids)
    mode = f"{stat.S_IMODE(status.st_mode):04o}"
    hint = f"run this as {owner}, change its owner or mode, or name another path"
    return f"no permission: {which} is {owner}'s, with mode {mode}; {hint}"


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
