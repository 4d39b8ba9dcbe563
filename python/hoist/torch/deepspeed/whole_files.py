# SPDX-License-Identifier: Apache-2.0
"""Whether the files of a checkpoint are whole, each rank's own, and the same for all ranks that begin with them.

torch.save writes zip archives, which hold a CRC-32 of each record. torch.load compares none of them where it maps a file.
"""

from __future__ import annotations

import os
import re
import zipfile
import zlib
from collections.abc import Sequence

import torch.distributed as dist

from hoist import _hoist
from hoist.torch.deepspeed.files import refuse
from hoist.torch.model.weight_files import can_be_mapped
from hoist.torch.ranks.channels import is_joined
from hoist.torch.ranks.distributed import work_of_one_rank

_OF_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_")
_PIECE_BYTES = 1 << 20
# What zipfile raises for changed bytes, which may also say "compressed" or "encrypted", and for drives that fail.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError)


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
                except _DAMAGE as error:
                    refuse(f"{path} is damaged ({record.filename}: {error}). Copy it once more")


def check_together(paths: Sequence[str], unit_manager: _hoist.UnitManager) -> None:
    """[C] As check(); the ranks of a machine that divide the state read the files between them. `paths` is empty on ranks that
    begin without a checkpoint. Errors: UsageError also if these ranks have different files."""
    with work_of_one_rank(unit_manager):
        listed = repr([(os.path.basename(path), [(record.filename, record.CRC, record.file_size) for record in _records(path)])
                       for path in paths])
    if not unit_manager.same_on_all(listed):
        raise _hoist.UsageError("deepspeed=...: the ranks have different checkpoints, or some of them none: each rank reads the "
                                "files of all, so copy the whole checkpoint to every machine")
    if not paths:
        return
    is_whole_job = is_joined() and unit_manager.world_size == dist.get_world_size()
    first, step = (int(os.environ.get(name, default)) if is_whole_job else default
                   for name, default in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)))
    with work_of_one_rank(unit_manager):
        check(paths[first::step])


def _records(path: str) -> list[zipfile.ZipInfo]:
    if not os.path.isfile(path) or not can_be_mapped(path):
        return []
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.infolist()
    except _DAMAGE as error:
        refuse(f"{path} cannot be read as a file of torch.save: {error}. It may be cut short or damaged: copy it once more")
