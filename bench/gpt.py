# SPDX-License-Identifier: Apache-2.0
"""One run of hoist-gpt, for the scripts beside this file."""
import json
import os
import subprocess
import sys

# Open MPI binds each of two ranks to a core of its own, unless it is told not to, and refuses more ranks than processors, and
# root (in a container).
_MPI = {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none",
        "OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def run(args, config, directory, *options, ranks=1):
    """Returns the program's report. `args`: the script's own, with gpt, text and steps, and mpirun for several ranks."""
    config_path, report_path = os.path.join(directory, "config.json"), os.path.join(directory, "report.json")
    with open(config_path, "w") as file:
        json.dump(config, file)
    command = [args.gpt, "--config", config_path, "--text", args.text, "--steps", str(args.steps), "--report", report_path,
               *map(str, options)]
    if ranks > 1:
        command = [args.mpirun, "-np", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | _MPI)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    with open(report_path) as file:
        return json.load(file)
