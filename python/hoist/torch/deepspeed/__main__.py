# SPDX-License-Identifier: Apache-2.0
"""python -m hoist.torch.deepspeed: shows what a DeepSpeed checkpoint holds; writes a store as a universal checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from hoist.torch.commands import run_command
from hoist.torch.deepspeed import Checkpoint, export, open
from hoist.torch.deepspeed.files import shown
from hoist.torch.deepspeed.whole_files import check


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hoist.torch.deepspeed", description=(
        "Checkpoints of DeepSpeed. A program continues from one with hoist.torch.wrap(model, config, deepspeed=DIR)."))
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds, or why it cannot be continued from")
    inspect.add_argument("directory", help="the directory with the file `latest`, or a tag's own")
    inspect.add_argument("--tag", help="instead of the newest")
    out = commands.add_parser("export", help="write a store's commit as a universal checkpoint")
    out.add_argument("store", help="nvme_path of the run, or its subdirectory hoist")
    out.add_argument("--to", required=True, metavar="DIR", help="made if it is missing; gets TAG/ and latest_universal")
    out.add_argument("--config", required=True, metavar="FILE", help="the JSON that DeepSpeed will continue with")
    which = out.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="a commit's step; by default the newest")
    which.add_argument("--checkpoint", default="", metavar="NAME", help="a named checkpoint")
    out.add_argument("--stage", type=int, choices=(1, 2, 3), help="ZeRO stage, if the configuration does not say")
    out.add_argument("--tag", help="by default global_stepN")
    return parser


def _lines(checkpoint: Checkpoint) -> list[str]:
    trained = sum(shape.numel() for shape in checkpoint.parameters.values())
    frozen = sum(shape.numel() for shape in checkpoint.frozen.values())
    by = f"written by {checkpoint.ranks} rank{'s' if checkpoint.ranks > 1 else ''}" if checkpoint.ranks else "universal"
    lines = [
        f"{checkpoint.path}: ZeRO stage {checkpoint.stage}, {by}",
        f"{checkpoint.step} optimizer steps ({checkpoint.global_steps} with skipped ones)",
        f"{len(checkpoint.parameters)} trained parameters of {trained} elements, {len(checkpoint.frozen)} frozen of {frozen}, "
        f"{len(checkpoint.groups)} groups, {len(checkpoint.buffers)} buffers",
    ]
    if checkpoint.loss_scale is not None:
        lines.append(f"loss scale {checkpoint.loss_scale[0]:g}, {checkpoint.loss_scale[1]} steps after its last overflow")
    if checkpoint.client_state:
        lines.append(f"client state: {', '.join(sorted(checkpoint.client_state))}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)

    def work() -> None:
        if given.command == "inspect":
            checkpoint = open(given.directory, given.tag)
            check(checkpoint.files)
            print(shown("\n".join(_lines(checkpoint))))
        else:
            written = export(given.store, given.to, given.config, step=given.step, checkpoint=given.checkpoint, stage=given.stage,
                             tag=given.tag)
            print(shown(f"wrote {written}\nDeepSpeed continues it with \"checkpoint\": {{\"load_universal\": true}} and "
                        f"engine.load_checkpoint({given.to!r})"))
    return run_command(given.command, work)


if __name__ == "__main__":
    sys.exit(main())
