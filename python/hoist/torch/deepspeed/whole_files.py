# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a checkpoint are whole, each rank's own, and the same for all ranks that begin with them.

torch.save writes zip archives, which hold a CRC-32 of each record. torch.load compares none of them where it maps a file.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Sequence

from hoist import _hoist
from hoist.torch.deepspeed.files import refuse
from hoist.torch.model.weight_files import can_be_mapped
from hoist.torch.ranks.channels import is_joined

_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_")
_PIECE_BYTES = 1 << 20


def refuse_copies(path: str) -> None:
    """Errors: StoreError for a rank's file that was copied from another rank's: an archive names its records as the file was
    named when it was written."""
    named = _OF_RANK.match(os.path.basename(path))
    records = _records(path)
    written = _OF_RANK.match(records[0].filename) if records else None
    if named and written and named[1] != written[1]:
        refuse(f"{path} was written as the file of rank {written[1]} ({records[0].filename.partition('/')[0]}.pt): copy rank "
               f"{named[1]}'s once more")


def check(paths: Sequence[str]) -> None:
    """Reads these files. Errors: StoreError, naming a file whose bytes are not those that were written. Files that were written
    without checksums (torch.serialization.set_crc32_options(False), or by PyTorch before 1.6) pass."""
    for path in paths:
        records = [record for record in _records(path) if record.CRC != 0]
        if not records:
            continue
        with zipfile.ZipFile(path) as archive:
            for record in records:
                try:
                    with archive.open(record) as stream:
                        while stream.read(_PIECE_BYTES):
                            pass
                except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
                    refuse(f"{path} is damaged: {error}. Copy it once more")


def check_together(paths: Sequence[str], unit_manager: _hoist.UnitManager) -> None:
    """[C] As check(); the ranks of a machine read the files between them. `paths` is empty on ranks that begin without a
    checkpoint. Errors: UsageError also if the ranks have different files."""
    if not unit_manager.same_on_all(repr([(os.path.basename(path), [(r.filename, r.CRC, r.file_size) for r in _records(path)])
                                          for path in paths])):
        raise _hoist.UsageError("deepspeed=...: the ranks have different checkpoints, or some of them none: each rank reads the "
                                "files of all, so copy the whole checkpoint to every machine")
    if not paths:
        return
    first, step = (int(os.environ.get(name, default)) for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    problem = ""
    try:
        check(paths[first::step] if is_joined() else paths)
    except _hoist.StoreError as error:
        problem = str(error)
    if problem := unit_manager.first_problem(problem):
        raise _hoist.StoreError(problem)


def _records(path: str) -> list[zipfile.ZipInfo]:
    if not os.path.isfile(path) or not can_be_mapped(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except (zipfile.BadZipFile, OSError) as error:
        refuse(f"{path} cannot be read as a file of torch.save: {error}. It may be cut short or damaged: copy it once more")
