# SPDX-License-Identifier: Apache-2.0
import contextlib
import copy
import os
import shutil
import tarfile

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"  # tests ask nothing of the network

torch = pytest.importorskip("torch", reason="PyTorch is not installed (pip install torch)")
hoist_torch = pytest.importorskip("hoist.torch", reason="the module _hoist is not built (HOIST_WITH_PYTHON)")

if os.environ.get("HOIST_TEST_ACCELERATOR"):  # tests/python/accelerator: models and batches on a device of their own
    import accelerator

    accelerator.use()


def pytest_collection_modifyitems(items):
    for item in items if os.environ.get("HOIST_TEST_ACCELERATOR") else []:
        for marker in item.iter_markers("cpu_tensors"):
            item.add_marker(pytest.mark.skip(reason=f"not on the test accelerator: {marker.args[0]}"))
        for marker in item.iter_markers("host_device") if accelerator.ON_GPU else []:
            item.add_marker(pytest.mark.skip(reason=f"not on a GPU: {marker.args[0]}"))


@pytest.fixture
def cpu_by_default():
    """On a GPU, for data loaders of PyTorch's: they draw with the CPU's generator, which fails under another default device. The
    test accelerator's models must be made on it: to(device) would untie their weights, which are of another type there."""
    on_gpu = os.environ.get("HOIST_TEST_ACCELERATOR") == "cuda"
    with torch.device("cpu") if on_gpu else contextlib.nullcontext():
        yield


@pytest.fixture
def settings(tmp_path):
    """A configuration in DeepSpeed's form, everything on NVMe, with budgets that hold a few layers of a tiny model."""

    def make(store="store", **changes):
        nvme = {"device": "nvme", "nvme_path": str(tmp_path / store)}
        config = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "AdamW",
                          "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
            "zero_optimization": {"stage": 3, "offload_param": dict(nvme), "offload_optimizer": dict(nvme)},
            "hoist": {"device_memory": "240KiB", "pinned_memory": "32MiB"},
        }
        config.update(copy.deepcopy(changes))
        config["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)  # all of a tiny model would stay up
        return config

    return make


@pytest.fixture
def wrap(settings):
    """For the models of small_models.py, with the optimizer that they are compared with there."""
    from small_models import RATE

    def make(model, memory="1MiB", **changes):
        changes.setdefault("optimizer", {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.1}})
        changes.setdefault("hoist", {"device_memory": memory, "pinned_memory": "32MiB"})
        return hoist_torch.wrap(model, settings(**changes))

    return make


@pytest.fixture
def wrapped(settings):
    """Engines of two_layers.py, each with a store of its own."""
    from two_layers import model_of

    count = iter(range(100))

    def make(model=None, **changes):
        config = settings(f"store-{next(count)}",
                          **{"hoist": {"device_memory": "1MiB", "pinned_memory": "32MiB"}, **changes})
        return hoist_torch.wrap(model or model_of(), config)

    return make


@pytest.fixture
def small_units(monkeypatch):
    """hoist.optim has several units, and parameters in pieces, of models that would be one unit."""
    monkeypatch.setattr("hoist.optim.pieces._UNIT_ELEMENTS", 5000)
    monkeypatch.setattr("hoist.optim.pieces._PIECE_ELEMENTS", 3000)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """What DeepSpeed 0.19 wrote (make_deepspeed_files.py)."""
    directory = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(os.path.join(os.path.dirname(__file__), "deepspeed_files.tar.xz")) as tar:
        tar.extractall(directory, filter="data")
    return directory


@pytest.fixture
def spoil(checkpoints, tmp_path):
    """A copy of a checkpoint of DeepSpeed's, to be changed."""
    def copied(cell):
        shutil.copytree(checkpoints / cell, tmp_path / "copy")
        return tmp_path / "copy" / "global_step20"

    return copied
