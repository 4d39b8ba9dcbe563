# SPDX-License-Identifier: Apache-2.0
"""save_checkpoint() and load_checkpoint() as DeepSpeed's engine has them, over steps that the store keeps by name.

The model and its optimizer's states stay in the store: a tag is the name of a named checkpoint. The directory that the program
names gets the client state of the program, for each step that had the tag:

    DIRECTORY/latest                           the newest tag
    DIRECTORY/TAG/client_state-12.pt           rank 0's of step 12, by torch.save
    DIRECTORY/TAG/client_state-12-rank-1.pt    rank 1's, where each rank has its own: in stage 3, and with mesh=...

When the store gives up a step for a newer one, its files go too. The files are durable before the checkpoint is, and
`latest` is written after. A program that is killed between the two leaves a `latest` that names the step before, which the
store may have given up for the new one (with keep_steps 1 it has): then loading takes the newest step that the store keeps
and the directory has a client state of.
"""

from __future__ import annotations

import errno
import glob
import io
import logging
import os
import weakref
from collections.abc import Callable
from typing import IO, TYPE_CHECKING, Any, NoReturn

import torch

from hoist import _hoist, signal_handlers
from hoist.torch.deepspeed.files import line_of, refuse, shown
from hoist.torch.ranks import distributed

if TYPE_CHECKING:
    from hoist.torch.engine import Engine

_log = logging.getLogger("hoist")

_LATEST = "latest"  # the file with the newest tag
_PARTIAL = ".partial"  # ends the name of a file that is being written
_told_of_eviction: weakref.WeakSet[Engine] = weakref.WeakSet()


def save(engine: Engine, directory: str, tag: str | None, client_state: dict[str, Any], save_latest: bool) -> None:
    """[C] Returns when the checkpoint is durable."""
    if engine.config.keep_steps == 0:
        raise _hoist.UsageError(
            "save_checkpoint() keeps steps in the store, and this configuration reserves room for none: set "
            '"hoist": {"keep_steps": N} for the last N, 12 bytes a parameter each (and nvme_path or '
            "hoist.checkpoint_path, so that there is a store)")
    engine._passes.refuse_part_of_step("save_checkpoint()")
    step = engine.step_count
    tag = str(tag) if tag is not None else f"global_step{engine.global_steps}"
    if not _is_below(tag):
        raise _hoist.UsageError(f"save_checkpoint(tag={tag!r}): a tag is the name of a directory below the one that is given, "
                                f"beside the file `{_LATEST}`")
    if wrong := _hoist.checkpoint_name_problem(tag):
        raise _hoist.UsageError(f"save_checkpoint(tag={tag!r}): the store cannot keep a step of this name: {wrong}")
    folder = os.path.join(directory, tag)
    is_first = engine._is_first_of_job
    writers, rank = _writers(engine), _rank_of_job(engine)
    own = _client_file(folder, step, rank)
    # All write before one replaces its file: if a rank cannot, a step that had this tag before keeps all of its files.
    try:
        with distributed.work_of_one_rank(engine._unit_manager):
            if rank in writers:
                os.makedirs(folder, exist_ok=True)
                write_durably(own, lambda file: torch.save(client_state, file), replaces=False)
    except BaseException:
        if rank in writers:
            with signal_handlers.suppressing(OSError):
                os.unlink(own + _PARTIAL)
        raise
    with distributed.work_of_one_rank(engine._unit_manager):
        if rank in writers:
            replace_durably(own)
    before = engine.checkpoints()
    engine.settle()  # nobody else asks for the step's update: it would be waited for as long as for a slow program
    engine.save(tag).wait()
    after = engine.checkpoints()
    evictions = before.keys() - after.keys()
    with distributed.work_of_one_rank(engine._unit_manager):
        if not is_first:
            return
        if evictions and engine.config.setting("hoist.keep_steps") is None and engine not in _told_of_eviction:
            _told_of_eviction.add(engine)
            _log.warning("checkpoint '%s' made room for '%s': the last %d stay, beside the newest commit. \"hoist\": "
                         "{\"keep_steps\": N} keeps N, 12 bytes a parameter each", min(evictions, key=before.__getitem__), tag,
                         engine.config.keep_steps)
        for evicted in evictions:
            _forget(os.path.join(directory, evicted), before[evicted])
        present = {_client_file(folder, step, writer) for writer in writers}
        files = _client_file(glob.escape(folder), "*")
        for other in (*glob.glob(files), *glob.glob(files + _PARTIAL)):
            if other not in present:
                os.unlink(other)  # of a step that had this tag before, of more ranks, or of a program that was killed
        if save_latest:
            write_durably(os.path.join(directory, _LATEST), lambda file: file.write(tag.encode()))


def _is_below(tag: str) -> bool:
    """Whether it names a directory below another one, beside the file `latest`."""
    parts = tag.split(os.sep)
    return parts[0] not in ("", _LATEST) and {os.curdir, os.pardir}.isdisjoint(parts)


def _writers(engine: Engine) -> range:
    """The ranks of the job that write and load client states of their own, as with DeepSpeed."""
    each = engine.zero_optimization_stage() == 3 or engine._is_part_of_job
    return range((engine.world_size if engine._sharding is None else engine._sharding.job_size) if each else 1)


def _rank_of_job(engine: Engine) -> int:
    return engine.rank if engine._sharding is None else torch.distributed.get_rank()


def _forget(folder: str, step: int) -> None:
    """Removes the client states of a step that the store has given up, and the folder if nothing else is in it."""
    try:
        own = _client_file(glob.escape(folder), f"{step}-rank-*")
        partial = _client_file(glob.escape(folder), "*") + _PARTIAL  # of ranks that were killed
        for other in (*glob.glob(own), *glob.glob(partial)):
            os.unlink(other)
        with signal_handlers.suppressing(FileNotFoundError):
            os.unlink(_client_file(folder, step))
        os.rmdir(folder)
    except OSError as error:
        if signal_handlers.raised(error):
            raise
        if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
            _log.warning("%s, of a checkpoint that is gone, stays: %s", folder, error.strerror)


def load(engine: Engine, directory: str, tag: str | None) -> tuple[str | None, dict[str, Any] | None]:
    """[C] (path, client state); (None, None) where no tag is given and nothing was saved. Client states are pickles, as
    DeepSpeed's are: load what you have saved yourself."""
    any_tag = tag is None
    if engine.is_asleep:
        raise _hoist.UsageError("load_checkpoint() of an engine that sleeps: call restore() before, which wakes it with the "
                                "newest commit, also where sleep() was interrupted")
    with distributed.work_of_one_rank(engine._unit_manager):
        tag = _latest_in(directory) if tag is None else str(tag)
    _refuse_others(engine, directory, tag)
    if tag is None:
        return None, None
    with distributed.work_of_one_rank(engine._unit_manager):
        folder = os.path.join(directory, tag)
        if glob.glob(os.path.join(glob.escape(folder), "*_states.pt")):
            refuse_deepspeeds(folder)
    known = dict(engine._unit_manager.find_checkpoints())  # engine.checkpoints() waits for a restore() after an interruption
    if any_tag and tag not in known:
        tag = _newest_saved(engine, known, directory, tag)
        _refuse_others(engine, directory, tag)
        folder = os.path.join(directory, tag)
    engine._unit_manager.require_commit(tag)
    step = dict(engine._unit_manager.find_checkpoints())[tag]  # it may have been under way before
    with distributed.work_of_one_rank(engine._unit_manager):
        client_state = _client_state_in(folder, tag, step, engine)
    engine.restore(tag)
    return folder, client_state


def _refuse_others(engine: Engine, directory: str, tag: str | None) -> None:
    """[C] The drives of ranks may differ, and what they do next must not."""
    if not engine._unit_manager.same_on_all(str(tag), of_job=True):
        found = "none" if tag is None else f"'{tag}'"
        raise _hoist.StoreError(f"the ranks find different checkpoints in {directory}, and this one {found}: every rank needs "
                                "the same files there")


def _latest_in(directory: str) -> str | None:
    latest = os.path.join(directory, _LATEST)
    if not os.path.isfile(latest) and os.path.isfile(os.path.join(directory, "latest_universal")):
        refuse_deepspeeds(directory)
    if not os.path.isfile(latest):
        _log.warning("there is no %s: nothing was loaded", latest)
        return None
    with open(latest, encoding="utf-8", errors="surrogateescape") as file:
        tag = file.read(4096).strip()
    if not _is_below(tag) or shown(tag) != tag:
        refuse(f"{latest} holds '{tag}', which is not the name of a checkpoint beside it: name one with tag=...")
    return tag


def _client_state_in(folder: str, tag: str, step: int, engine: Engine) -> dict[str, Any]:
    """This rank's own, or rank 0's if it has none."""
    first, rank, writers = _client_file(folder, step), _rank_of_job(engine), _writers(engine)
    own = _client_file(folder, step, rank)
    client_file = own if rank in writers and os.path.isfile(own) else first
    without = f"restore('{tag}') continues from that step without the program's state"
    of_step = [first, *glob.glob(_client_file(glob.escape(folder), f"{step}-rank-*"))]
    if not os.path.isfile(client_file):
        others = set(glob.glob(_client_file(glob.escape(folder), "*"))).difference(of_step)
        refuse(f"the step that {engine.config.store_directory} keeps as '{tag}' is number {step}, and "
               + (f"{folder} is of another one" if others else f"{client_file} is missing") + f"; {without}")
    if len(of_step) != len(writers) and engine._is_first_of_job:
        _log.warning("%s has client states of %d rank(s), and %s", folder, len(of_step),
                     f"{len(writers)} ranks of this run load their own: a rank without one loads rank 0's" if len(writers) > 1
                     else "all ranks of this run load rank 0's")
    try:
        client_state: dict[str, Any] = torch.load(client_file, map_location="cpu", weights_only=False)
        return client_state
    except Exception as error:  # pickles raise any
        if signal_handlers.raised(error):
            raise
        raise _hoist.StoreError(shown(f"{client_file} cannot be loaded ({type(error).__name__}: {line_of(error)}). If it is "
                                      f"damaged, {without}")) from error


def refuse_deepspeeds(folder: str) -> NoReturn:
    raise _hoist.UsageError(shown(
        f"{folder} was written by DeepSpeed. Begin with it, moments and all: wrap(..., deepspeed={folder!r}) or "
        "initialize(..., deepspeed=...), in a store that holds no run yet"))


def _newest_saved(engine: Engine, known: dict[str, int], directory: str, latest: str) -> str:
    """Instead of a `latest` that the store lacks: the newest tag that it has, and was saved in the directory; else `latest`."""
    for tag, step in reversed(known.items()):
        if os.path.isfile(_client_file(os.path.join(directory, tag), step)):
            _log.warning("%s names '%s', which %s does not keep any more: '%s', step %d, is the newest that was saved here",
                         os.path.join(directory, _LATEST), latest, engine.config.store_directory, tag, step)
            return tag
    return latest


def _client_file(folder: str, step: int | str, rank: int = 0) -> str:
    return os.path.join(folder, f"client_state-{step}-rank-{rank}.pt" if rank else f"client_state-{step}.pt")


class _File(io.FileIO):
    """Keeps the first error that comes in its writes, which torch.save() may hide behind one of its own."""

    error: BaseException | None = None

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BaseException as error:
            self.error = self.error or error
            raise


def replace_durably(path: str) -> None:
    """Gives what write_durably(replaces=False) has written its name. Errors: IoError, and what a signal's handler raises."""
    try:
        os.replace(path + _PARTIAL, path)
        sync(os.path.dirname(path) or ".")
    except OSError as error:
        if signal_handlers.raised(error):
            raise
        raise io_error(error.errno or errno.EIO, path, f"writing {path} failed: {error.strerror or error}") from error


def write_durably(path: str, write: Callable[[IO[bytes]], object], replaces: bool = True) -> None:
    """`replaces`: or else the file stays beside `path`, which replace_durably() replaces with it.

    Errors: IoError for the file's, also where `write` hides it; those of `write`, and what a signal's handler raises."""
    partial, raw = path + _PARTIAL, None
    own: Exception | None = None  # an error of `write` that is not the file's
    failure: BaseException | None = None
    try:
        with io.BufferedWriter(raw := _File(partial, "wb")) as file:
            try:
                write(file)
            except Exception as error:
                own = None if raw.error else error
                raise
            file.flush()
            os.fsync(file.fileno())
        if replaces:
            os.replace(partial, path)
            sync(os.path.dirname(path) or ".")
    except BaseException as error:
        with signal_handlers.suppressing(OSError):
            os.unlink(partial)
        failure = error if raw is None or raw.error is None or signal_handlers.raised(error) else raw.error
        if signal_handlers.raised(failure):
            raise failure from failure.__cause__
        if failure is own or not isinstance(failure, OSError):
            raise
        raise io_error(failure.errno or errno.EIO, path, f"writing {path} failed: {failure.strerror or failure}") from error
    finally:
        failure = own = None  # else they keep this frame, and it keeps them
        if raw is not None:
            raw.error = None


def io_error(code: int, path: str, problem: str) -> _hoist.IoError:
    """As the extension makes them."""
    remedy = _hoist.usual_remedy(code)
    error = _hoist.IoError(f"{problem}; {remedy}" if remedy else problem)
    error.errno, error.filename = code, path
    return error


def sync(*paths: str) -> None:
    """Makes files, or the names in directories, durable."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # mounts of object stores cannot flush a directory
            if signal_handlers.raised(error) or not os.path.isdir(path):
                raise
            if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
                raise
        finally:
            os.close(descriptor)
