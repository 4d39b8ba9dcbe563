# SPDX-License-Identifier: Apache-2.0
"""A store on NVMe, read without the program that trained it.

    with hoist.store.open("/local_nvme") as stored:             # nvme_path, or its subdirectory hoist
        stored.step, list(stored)
        stored["blocks.0.up.weight"]                            # in the parameter's own type
        stored.read("blocks.0.up.weight", hoist.State.moment1)  # fp32

Tensors are put together from all ranks' parts, and every byte was verified. Nothing on disk is changed; a store that is being
trained from is refused, but for `steps` and `verify`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from hoist import _hoist
from hoist.commit_values import from_json, read_state
from hoist.optim.values import DTYPES

__all__ = ["Stored", "Steps", "open", "steps", "verify"]

_DTYPES = {here: there for there, here in DTYPES.items()}


class Steps(NamedTuple):
    """The steps that can be opened: `commits`, newest first, and `checkpoints`, the named ones, oldest first."""

    commits: list[int]
    checkpoints: dict[str, int]


def steps(directory: str | os.PathLike[str]) -> Steps:
    """Returns the steps in a store, which another process may be using. Errors: StoreError if the newest store of a run is
    incomplete, and an older one is not."""
    commits, checkpoints = _hoist.steps_in_store(_find(directory))
    return Steps([step for step, _ in commits], {name: step for step, name in checkpoints})


def verify(directory: str | os.PathLike[str], bytes_per_second: int = 0) -> list[str]:
    """Reads the newest commit and every named checkpoint, at `bytes_per_second` at most. Returns a line for each damage, none
    if all is sound. A named checkpoint that cannot be found is damage. If there is damage, lines for what could not be
    verified follow. Another process may use the store meanwhile and is not held up. Errors: StoreError if no damage was found,
    but a commit could not be verified."""
    return _hoist.verify_store(_find(directory), bytes_per_second)


def open(directory: str | os.PathLike[str], step: int | None = None, checkpoint: str = "") -> Stored:
    """The newest commit, that of a step, or a named checkpoint."""
    if step is not None and checkpoint:
        raise _hoist.UsageError(f"step={step} and checkpoint={checkpoint!r} may be two commits: give one of them")
    return Stored(_hoist.StoredModel(_find(directory), step, checkpoint))


class Stored(Mapping[str, torch.Tensor]):
    """Weights by name, each read when it is asked for."""

    def __init__(self, model: _hoist.StoredModel):
        self._model = model
        self.parameters: dict[str, _hoist.StoredParameter] = {p.name: p for p in model.parameters}
        self._index = {name: index for index, name in enumerate(self.parameters)}

    @property
    def step(self) -> int:
        return self._model.step

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return self._model.world_size

    @property
    def program_state(self) -> dict[str, Any]:
        """engine.state of hoist.torch, as it was committed; empty if another program made the commit."""
        program: dict[str, Any] = from_json(read_state(self._model.caller_state()).get("program", {}))
        return program

    def __iter__(self) -> Iterator[str]:
        return iter(self.parameters)

    def __len__(self) -> int:
        return len(self.parameters)

    def __getitem__(self, name: str) -> torch.Tensor:
        parameter = self.parameters[name]
        values = torch.empty(parameter.shape, dtype=_DTYPES[parameter.dtype], device="cpu")
        self._model.read_weights(self._index[name], 0, values.view(-1).view(torch.uint8).numpy())
        return values

    def read(self, name: str, state: _hoist.State = _hoist.State.master) -> torch.Tensor:
        """A parameter's master, or one of its moments, in fp32."""
        values = torch.empty(self.parameters[name].shape, dtype=torch.float32, device="cpu")
        self._model.read(self._index[name], state, 0, values.view(-1).numpy())
        return values

    def copy(self, to: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
             bytes_per_second: int = 0) -> None:
        """Makes a store of this commit below `to`, which a run can name as its nvme_path; with several directories its data is
        spread over them. Every byte is verified. After an interruption, call it again: what is finished is compared."""
        directories = [to] if isinstance(to, (str, os.PathLike)) else list(to)
        self._model.copy([os.path.join(os.fspath(directory), "hoist") for directory in directories], bytes_per_second)

    def close(self) -> None:
        """Gives the store back, so that it can be trained from."""
        self._model.close()

    def __enter__(self) -> Stored:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _find(directory: str | os.PathLike[str]) -> str:
    path = os.fspath(directory)
    below = os.path.join(path, "hoist")
    return below if not _hoist.has_store(path) and _hoist.has_store(below) else path
