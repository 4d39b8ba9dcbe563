# SPDX-License-Identifier: Apache-2.0
"""Makes a directory that one program at a time writes into, and removes it again if that program fails."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import IO

from hoist import _hoist, signal_handlers
from hoist.torch.checkpoint.checkpoints import io_error, sync


@contextlib.contextmanager
def made_and_locked(directory: str, lock: str, call: str, advice: str = "wait until it has ended") -> Iterator[None]:
    """Makes a directory with its parents, and holds the lock of the file `lock` in it, which is there only meanwhile; one that a
    killed program left is taken over. If the block fails, all directories that were made go, unless something is in them.

    `call` and `advice` are for the error where another program holds the lock. Errors: UsageError for that; IoError.
    """
    made = _missing(directory)
    try:
        try:
            os.makedirs(directory, exist_ok=True)
            for path in made:  # durable before anything in them is
                sync(os.path.dirname(os.path.abspath(path)))
        except OSError as error:
            if signal_handlers.raised(error):
                raise
            raise _not_made(directory, error) from error
        with _locked(directory, lock, call, advice):
            yield
    except BaseException:
        for path in made:
            with signal_handlers.suppressing(OSError):
                os.rmdir(path)
        raise


def _missing(directory: str) -> list[str]:
    """The directory and its parents that are not there, the innermost first."""
    found, path = [], directory
    while path and not os.path.lexists(path):
        found.append(path)
        path = os.path.dirname(path)
    return found


def _not_made(directory: str, error: OSError) -> _hoist.IoError:
    is_in_the_way = error.errno in (errno.EEXIST, errno.ENOTDIR)
    hint = " (a file, or a link that leads nowhere, has this name or that of a parent); choose another directory"
    return io_error(error.errno or errno.EIO, directory,
                    f"making the directory {directory} failed: {error.strerror}{hint if is_in_the_way else ''}")


@contextlib.contextmanager
def _locked(directory: str, lock: str, call: str, advice: str) -> Iterator[None]:
    path = os.path.join(directory, lock)
    while True:
        with _open(path, call) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _hoist.UsageError(f"another {call} writes into {directory}: {advice}, or choose another "
                                        "directory") from None
            except OSError as error:  # a file system without locks, as Lustre and NFS may be mounted
                if signal_handlers.raised(error):
                    raise
                if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP):  # the file stays: another may hold it
                    raise io_error(error.errno or errno.EIO, path, f"locking {path} failed: {error.strerror}") from error
            try:
                is_there = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            except FileNotFoundError:
                is_there = False
            if not is_there:
                continue  # its holder has removed it meanwhile
            try:
                yield
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
            return


def _open(path: str, call: str) -> IO[bytes]:
    try:
        return open(path, "ab")
    except OSError as error:
        if signal_handlers.raised(error):
            raise
        others = isinstance(error, PermissionError) and os.path.exists(path)
        hint = f" (it is another user's: if no {call} runs, remove it)" if others else ""
        raise io_error(error.errno or errno.EIO, path, f"opening {path} failed: {error.strerror}{hint}") from error
