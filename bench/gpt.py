# SPDX-License-Identifier: Apache-2.0
"""Runs of hoist-gpt, for the scripts beside this file."""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys

from pairs import Pairs

# Open MPI binds each of two ranks to a core of its own, unless it is told not to, and refuses more ranks than processors, and
# root (in a container).
_MPI = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
_HELP = {"gpt": "the program", "text": "what to learn", "path": "a directory on the drive", "json": "write the figures to this"}


def parser(description, **defaults):
    """Has --gpt, --text, --json, and an option for each of `defaults`: a number where the default is one."""
    defaults = {"gpt": "build/release/bin/hoist-gpt", "text": "/usr/share/common-licenses/GPL-3", "json": None} | defaults
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        kind = type(default) if isinstance(default, (int, float)) else str
        options.add_argument("--" + name, type=kind, default=default, help=_HELP.get(name))
    return options


def on_nvme(config, directory):
    """Returns `config` with everything on NVMe. Its store in `directory` is empty."""
    store = os.path.join(directory, "store")
    shutil.rmtree(store, ignore_errors=True)
    place = {"device": "nvme", "nvme_path": store}
    return config | {"zero_optimization": config["zero_optimization"] | {"offload_param": place, "offload_optimizer": place}}


def command(args, config, directory, *options, steps=None):
    """Writes `config` into `directory`. `args`: the script's own; `steps`, if given, replaces theirs."""
    path = os.path.join(directory, "config.json")
    with open(path, "w") as file:
        json.dump(config, file)
    return [args.gpt, "--config", path, "--text", args.text, "--steps", str(steps or args.steps), *map(str, options)]


def run(args, config, directory, *options, ranks=1):
    """Returns the program's report. `args`: as in command(), and mpirun for several ranks."""
    report_path = os.path.join(directory, "report.json")
    line = [*command(args, config, directory, *options), "--report", report_path]
    if ranks > 1:
        line = [args.mpirun, "-np", str(ranks), *line]
    done = subprocess.run(line, capture_output=True, text=True, env=os.environ | _MPI)
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)} failed:\n{done.stderr}")
    with open(report_path) as file:
        return json.load(file)


def compare(count, first, second):
    """Pairs of the mean times of steps 3 to N in the reports of `first` and `second`, which is its own control. All runs must end
    in the same bits."""
    digests = set()

    def seconds(run):
        report = run()
        digests.add(json.dumps(report["digest"]))
        return statistics.fmean(step["seconds"] for step in report["steps"][2:])

    pairs = Pairs(count, lambda: seconds(first), lambda: seconds(second), control=lambda: seconds(second))
    if len(digests) != 1:
        sys.exit("the runs ended in different bits")
    return pairs
