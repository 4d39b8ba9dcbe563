#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the header of an exchange costs (docs/decisions/0044): two ranks over gloo, with it, without it, and without it
again as a control, in an order that rotates from round to round.

    PYTHONPATH=build/dev/python OMP_WAIT_POLICY=PASSIVE bench/header_cost.py [--rounds N]
"""
import argparse
import statistics
import tempfile
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from hoist.torch.ranks import channels


def run(rank, rounds, meeting_point):
    dist.init_process_group("gloo", init_method=f"file://{meeting_point}", rank=rank, world_size=2)
    ranks = channels.Ranks(timedelta(seconds=60), range(2), lambda: "forward() after step 3")
    ranks.meet()
    channel = channels.Channel(ranks, "ranks", range(2))

    def without_header(_, sends, receives):
        for _, work in channels._start_exchange(channel._group, sends, receives):
            work.wait(ranks.timeout)

    for size in (8, 4 << 10, 64 << 10, 1 << 20, 8 << 20):
        mine, theirs = torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
        seconds = {"with": [], "without": [], "control": []}
        legs = [("with", channel.exchange), ("without", without_header), ("control", without_header)]
        for turn in range(rounds):
            for name, exchange in legs[turn % len(legs):] + legs[:turn % len(legs)]:
                begin = time.perf_counter()
                exchange(f"all_gather of 'blocks.3' {size} bytes", [(1 - rank, mine)], [(1 - rank, theirs)])
                seconds[name].append(time.perf_counter() - begin)
        if rank == 0:
            medians = (f"{name} {1e6 * statistics.median(each):.0f} us" for name, each in seconds.items())
            print(f"{size:>8} bytes: {', '.join(medians)}")
    dist.barrier()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (parser.parse_args().rounds, f"{directory}/meet"), nprocs=2)
