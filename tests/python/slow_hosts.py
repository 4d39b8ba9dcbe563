# SPDX-License-Identifier: Apache-2.0
"""Jobs of several hosts: each is a network namespace with a host name and a drive of its own, which has the same path on all.

A host dies, its cable is cut, or it is lost with its drive. The others end with an error, and the job continues bit-exactly.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from ranks import free_port

HERE = pathlib.Path(__file__).parent
GPT = pathlib.Path(sys.modules["hoist"].__file__).parents[2] / "bin" / "hoist-gpt"
STEPS, RANKS_PER_HOST = 8, 2

# The program that torchrun starts on each host: a job that trains to step STEPS, or continues to it.
TRAIN = """
import json, os, sys, time
sys.path.insert(0, sys.argv[1])
import hoist.torch
import torch.distributed
from models import batches, loss_of
from training import digests, make
torch.distributed.init_process_group("gloo")
shared, config = sys.argv[2], json.loads(sys.argv[3])
engine = hoist.torch.wrap(make(), config, resume=True)
rank, size = engine.rank, engine.world_size
began = engine.step_count
for index, (inputs, targets) in enumerate(batches(STEPS * size)):
    if index // size >= began and index % size == rank:
        loss = loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        open(f"{shared}/step-{engine.step_count}-{rank}", "w").close()
        time.sleep(float(sys.argv[4]))
ends = [began, digests(engine), os.uname().nodename]
engine.close()
with open(f"{shared}/end-{rank}", "w") as file:
    json.dump(ends, file)
""".replace("STEPS", str(STEPS))


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class Host:
    def __init__(self, index, drive, mount_point):
        self.name, self.address = f"hoist-{os.getpid()}-{index}", f"10.213.0.{index + 1}"
        self.cable, self.drive, self.mount_point = f"hoist{os.getpid() % 100000}v{index}", drive, mount_point
        drive.mkdir(parents=True)
        run("ip", "netns", "add", self.name)

    def connect(self, bridge):
        run("ip", "link", "add", self.cable, "type", "veth", "peer", "name", "eth0", "netns", self.name)
        run("ip", "link", "set", self.cable, "master", bridge, "up")
        run("ip", "-n", self.name, "addr", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.name, "link", "set", "eth0", "up")
        run("ip", "-n", self.name, "link", "set", "lo", "up")

    def command(self, *words):
        prepare = f"hostname {self.name} && mount --bind {self.drive} {self.mount_point} && exec \"$@\""
        return ["ip", "netns", "exec", self.name, "unshare", "--uts", "--mount", "sh", "-c", prepare, "_", *map(str, words)]

    def cut_cable(self):
        run("ip", "link", "set", self.cable, "down")

    def mend_cable(self):
        run("ip", "link", "set", self.cable, "up")

    def processes(self):
        return [int(process) for process in run("ip", "netns", "pids", self.name).split()]

    def ranks(self):
        """Its processes of the job, without torchrun."""
        ranks = []
        for process in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                words = pathlib.Path(f"/proc/{process}/cmdline").read_bytes()
                if b"train.py" in words and b"torch.distributed.run" not in words:
                    ranks.append(process)
        return ranks

    def die(self):
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process, signal.SIGKILL)

    def lose_drive(self):
        shutil.rmtree(self.drive)
        self.drive.mkdir()


@pytest.fixture
def hosts(tmp_path):
    probe = f"hoist-{os.getpid()}-probe"
    try:
        run("ip", "netns", "add", probe)
        run("ip", "netns", "delete", probe)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("hosts are network namespaces, which need root and ip (Debian: iproute2)")
    mount_point = tmp_path / "drive"
    mount_point.mkdir()
    bridge = f"hoist{os.getpid() % 100000}b"
    run("ip", "link", "add", bridge, "type", "bridge")
    run("ip", "link", "set", bridge, "up")
    made = []
    try:
        for index in range(2):
            made.append(Host(index, tmp_path / f"host{index}", mount_point))
            made[-1].connect(bridge)
        yield made
    finally:
        for host in made:
            host.die()
            run("ip", "netns", "delete", host.name)
        run("ip", "link", "delete", bridge)


class Job:
    """Two ranks on each of the hosts, started by torchrun as on a cluster. Without hosts: all of them on this machine."""

    def __init__(self, settings, shared, path, hosts=(), pause=0.0, **changes):
        self.shared = shared
        shared.mkdir(exist_ok=True)
        for old in [*shared.glob("end-*"), *shared.glob("step-*")]:
            old.unlink()
        script = shared / "train.py"
        script.write_text(TRAIN)
        memories = {"device_memory": "6MiB", "pinned_memory": "32MiB", "comm_timeout_seconds": 5.0}
        config = settings(hoist=memories | changes)
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part]["nvme_path"] = str(path)
        count = max(1, len(hosts))
        address, port = (hosts[0].address, 29500) if hosts else ("127.0.0.1", free_port())
        self.size = 2 * RANKS_PER_HOST
        self.processes = []
        for index in range(count):
            words = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", f"--node-rank={index}",
                     f"--nproc-per-node={self.size // count}", f"--master-addr={address}", f"--master-port={port}", script, HERE,
                     shared, json.dumps(config), pause]
            log = (shared / f"host{index}.log").open("w")
            environment = os.environ | ({"GLOO_SOCKET_IFNAME": "eth0"} if hosts else {})
            command = hosts[index].command(*words) if hosts else list(map(str, words))
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))

    def ended(self):
        """[the step that the job continued from, digests], and the hosts' names in the order of ranks."""
        for index, process in enumerate(self.processes):
            assert process.wait(timeout=240) == 0, self.log(index)
        ends = [json.loads((self.shared / f"end-{rank}").read_text()) for rank in range(self.size)]
        assert all(end[:2] == ends[0][:2] for end in ends)
        return ends[0][:2], [end[2] for end in ends]

    def log(self, index):
        return (self.shared / f"host{index}.log").read_text()

    def reached(self, step):
        begin = time.monotonic()
        while not all((self.shared / f"step-{step}-{rank}").exists() for rank in range(self.size)):
            assert time.monotonic() - begin < 240 and all(p.poll() is None for p in self.processes), self.log(0) + self.log(1)
            time.sleep(0.02)

    def failed(self, index):
        """Returns the output of a host's ranks, which must have failed."""
        assert self.processes[index].wait(timeout=120) != 0
        return self.log(index)


@pytest.fixture
def undisturbed(settings, tmp_path):
    job = Job(settings, tmp_path / "alone", tmp_path / "alone" / "store")
    (began, bits), _ = job.ended()
    assert began == 0
    return bits


def test_two_hosts_end_in_the_bits_of_one_and_survive(settings, tmp_path, hosts, undisturbed):
    drive, shared = hosts[0].mount_point, tmp_path / "shared"

    job = Job(settings, shared, drive / "whole", hosts)
    (began, bits), names = job.ended()
    assert began == 0 and bits == undisturbed
    assert names == [host.name for host in hosts for _ in range(RANKS_PER_HOST)]
    ranks_of = [{int(n) for f in host.drive.rglob("*") for n in re.findall(r"rank-(\d+)", f.name)} for host in hosts]
    assert ranks_of == [{0, 1}, {2, 3}]

    for name, disturb, mend in (("killed", hosts[1].die, lambda: None), ("cut", hosts[1].cut_cable, hosts[1].mend_cable)):
        job = Job(settings, shared, drive / name, hosts, pause=0.1)
        job.reached(3)
        disturb()
        assert "CommError" in job.failed(0)
        begin = time.monotonic()
        while hosts[1].ranks():  # they end by themselves, though torchrun's key-value store is on the other host
            assert time.monotonic() - begin < 60, job.log(1)
            time.sleep(0.1)
        mend()
        hosts[1].die()
        job.failed(1)
        (began, bits), _ = Job(settings, shared, drive / name, hosts).ended()
        assert 2 <= began < STEPS and bits == undisturbed, (name, began)  # the commit of step 3 may still have been under way


def test_a_host_that_is_lost_with_its_drive(settings, tmp_path, hosts, undisturbed):
    drive, shared = hosts[0].mount_point, tmp_path / "shared"
    mirror = {"mirror": {"path": str(shared / "mirror"), "every": 1}}
    job = Job(settings, shared, drive / "store", hosts, pause=0.3, **mirror)
    job.reached(5)
    hosts[1].die()
    assert "CommError" in job.failed(0)
    hosts[1].lose_drive()
    job = Job(settings, shared, drive / "store", hosts, **mirror)
    (began, bits), _ = job.ended()
    assert 1 <= began <= 6 and bits == undisturbed, began
    assert "mirror" in job.log(0)


@pytest.mark.skipif(not shutil.which("mpirun") or not GPT.exists(), reason="needs mpirun and hoist-gpt")
def test_mpirun_over_two_hosts(tmp_path, hosts):
    """mpirun reaches a host by way of ssh, which is replaced by a program that enters the namespace."""
    agent = tmp_path / "agent"
    entries = "".join(f'{host.address}) set -- {" ".join(map(repr, host.command("sh", "-c")))} "$*" ;;\n' for host in hosts)
    agent.write_text(f'#!/bin/sh\nhost=$1; shift\ncase $host in\n{entries}*) exit 1 ;; esac\nexec "$@"\n')
    agent.chmod(0o755)
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "hoist": {"device": "host", "device_memory": "32MiB", "pinned_memory": "64MiB"},
    }

    def digests(words, directory):
        for part in ("offload_param", "offload_optimizer"):
            config["zero_optimization"][part] = {"device": "nvme", "nvme_path": str(directory)}
        (tmp_path / "config.json").write_text(json.dumps(config))
        program = [str(GPT), "--config", str(tmp_path / "config.json"), "--text", str(HERE / "models.py"), "--steps", "5",
                   "--layers", "2", "--width", "64", "--heads", "2", "--context", "32", "--threads", "1",
                   "--report", str(tmp_path / "report.json")]
        ended = subprocess.run([*words, *program], capture_output=True, text=True, check=False, timeout=240)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return json.loads((tmp_path / "report.json").read_text())

    always = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", "4"]
    alone = digests(["mpirun", *always], tmp_path / "alone")
    network = [word for key in ("btl_tcp_if_include", "oob_tcp_if_include") for word in ("--mca", key, "eth0")]
    launch = hosts[0].command("mpirun", *always, "--host", ",".join(f"{host.address}:2" for host in hosts),
                              "--mca", "plm_rsh_agent", agent, *network)
    several = digests(launch, hosts[0].mount_point / "store")
    assert several["digest"] == alone["digest"]
    assert all(any(host.drive.glob("store/*")) for host in hosts)
