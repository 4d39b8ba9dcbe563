# SPDX-License-Identifier: Apache-2.0
"""save_pretrained(): a killed or failing save leaves the old model or the new one, and two saves do not mix."""

import copy
import errno
import os
import shutil

import pytest
import torch

import hoist
import hoist.torch
import ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
from safetensors.torch import load_file, save_file  # noqa: E402
from test_pretrained import SMALL, config_of, saved  # noqa: E402

from hoist.torch.checkpoint import checkpoints  # noqa: E402
from hoist.torch.pretrained import export as pretrained_export  # noqa: E402
from hoist.torch.transformers import from_pretrained, save_pretrained  # noqa: E402


def set_os(patch, os):
    for module in (pretrained_export, checkpoints):
        patch.setattr(module, "os", os)


class Steps:
    """os, as pretrained_export sees it: `before` is called before each call that changes or flushes files."""

    def __init__(self, before):
        self.before = before

    def __getattr__(self, name):
        real = getattr(os, name)
        if name not in ("makedirs", "open", "pwrite", "fsync", "replace", "unlink"):
            return real

        def call(*arguments, **named):
            self.before(name)
            return real(*arguments, **named)
        return call


def fails_at(step):
    """A drive that is full at this step and afterwards."""
    count = 0

    def before(_):
        nonlocal count
        count += 1
        if count >= step:
            raise OSError(errno.ENOSPC, "full")
    return Steps(before)


def files_of(directory):
    return {os.path.join(path, file): open(os.path.join(path, file), "rb").read()
            for path, _, files in os.walk(directory) for file in files}


class Models:
    """The model that a directory holds, and the one that is saved over it. The old one's settings may differ."""

    def __init__(self, path, shards, changed):
        changes = {"tie_word_embeddings": False}
        self.old, self.directory = saved(path, seed=0, shards=shards, **changes, **({"rms_norm_eps": 0.5} if changed else {}))
        torch.manual_seed(1)
        self.new = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL | changes))
        self.new.generation_config.max_new_tokens = 33
        self.kept = copy.deepcopy(self.new)

    def found_in(self, directory):
        try:
            found = transformers.LlamaForCausalLM.from_pretrained(directory, dtype="auto")
        except OSError:
            return "refused"
        for name, model in (("old", self.old), ("new", self.kept)):
            if found.config.rms_norm_eps == model.config.rms_norm_eps and all(
                    torch.equal(values, model.state_dict()[key]) for key, values in found.state_dict().items()):
                return name
        return "mixed"


SIZES = {"one_file": ("1GB", "1GB"), "to_shards": ("1GB", "40KB"), "to_one_file": ("40KB", "1GB"),
         "shards_of_the_same_names": ("40KB", "40KB"), "more_shards": ("40KB", "20KB")}


def saved_again_and_killed(engine, models, directory, shards, monkeypatch):
    """The models that kills of a second save leave, until it has begun to write weights."""
    states, is_writing = [], False

    def before(name):
        nonlocal is_writing
        if not is_writing:
            copied = again.with_name(f"{again.name}-{len(states)}")
            shutil.copytree(again, copied)
            states.append(models.found_in(copied))
        is_writing = is_writing or name == "pwrite"

    again = directory.with_name(f"{directory.name}-again")
    shutil.copytree(directory, again)
    with monkeypatch.context() as patch:
        set_os(patch, Steps(before))
        save_pretrained(engine, again, max_shard_size=shards)
    return states


@pytest.mark.parametrize("changed", [False, True], ids=["same_config", "other_config"])
@pytest.mark.parametrize("case", SIZES)
def test_a_kill_while_saving_leaves_the_old_model_or_the_new(tmp_path, monkeypatch, case, changed):
    """The directory is copied before each step, as a kill there would leave it."""
    models = Models(tmp_path / "out", SIZES[case][0], changed)
    states = []

    def before(name):
        if name not in ("open", "pwrite"):
            copied = tmp_path / f"copy-{len(states)}"
            shutil.copytree(models.directory, copied)
            states.append(models.found_in(copied))

    with hoist.torch.wrap(models.new, config_of(tmp_path / "nvme")) as engine:
        with monkeypatch.context() as patch:
            set_os(patch, Steps(before))
            save_pretrained(engine, models.directory, max_shard_size=SIZES[case][1])
        assert models.found_in(models.directory) == "new"
        assert "old" in states and states == sorted(states, key=["old", "refused", "new"].index)
        assert ("refused" in states) == (changed or case == "shards_of_the_same_names")
        save_pretrained(engine, tmp_path / "empty", max_shard_size=SIZES[case][1])
        refused = [index for index, state in enumerate(states) if state == "refused"]
        for index in {refused[0], refused[len(refused) // 2], refused[-1]} if refused else ():
            again = saved_again_and_killed(engine, models, tmp_path / f"copy-{index}", SIZES[case][1], monkeypatch)
            assert again == sorted(again, key=["refused", "new"].index) and again[-1] == "new", "it completes the first save"
        killed = tmp_path / f"copy-{states.index('refused') if 'refused' in states else 0}"
        save_pretrained(engine, killed, max_shard_size=SIZES[case][1])
        for directory in (models.directory, killed):  # nothing of the old model is left
            assert sorted(os.listdir(directory)) == sorted(os.listdir(tmp_path / "empty"))


@pytest.mark.parametrize("case", SIZES)
def test_a_full_drive_leaves_the_old_model(tmp_path, monkeypatch, case):
    models = Models(tmp_path / "out", SIZES[case][0], changed=True)
    before, step, moved = files_of(models.directory), 0, False
    with hoist.torch.wrap(models.new, config_of(tmp_path / "nvme")) as engine:
        while not moved:
            step += 1
            open_files = len(os.listdir("/proc/self/fd"))
            with monkeypatch.context() as patch, pytest.raises(OSError, match="full") as failure:
                set_os(patch, fails_at(step))
                save_pretrained(engine, models.directory, max_shard_size=SIZES[case][1])
            assert len(os.listdir("/proc/self/fd")) == open_files
            moved = any(entry.name == "_move_up" for entry in failure.traceback)
            if not moved:
                assert files_of(models.directory) == before, step
        assert step > 30 and models.found_in(models.directory) == "old"
        folder = os.path.join(models.directory, "model.partial")
        assert models.found_in(folder) == "new", "what could not be moved is kept"
        save_pretrained(engine, models.directory)
    assert models.found_in(models.directory) == "new" and not os.path.exists(folder)


@pytest.mark.cpu_tensors("it has no complex numbers and none of 8 bits")
def test_what_a_model_has_beside_its_weights_is_saved(tmp_path, caplog):
    """Numbers of 8 bits and parameters without elements. What files cannot hold is left out, with a warning."""
    model, _ = saved(tmp_path / "hub")
    model.register_buffer("eight", torch.ones(3).to(torch.float8_e4m3fn))
    model.register_buffer("wide", torch.ones(3, dtype=torch.complex128))
    model.register_buffer("conjugate", torch.ones(3, dtype=torch.complex64).conj())
    model.register_parameter("none", torch.nn.Parameter(torch.empty(0, 4)))
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        save_pretrained(engine, tmp_path / "out")
        expected = {name: values for name, values in engine.state_dict().items() if name != "wide"}
    assert "buffer 'wide' is left out: safetensors files cannot hold torch.complex128" in caplog.text
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys() - {"lm_head.weight"}  # which is tied
    for name, values in found.items():
        assert values.dtype == expected[name].dtype and values.shape == expected[name].shape, name
    assert (found["eight"].float() == 1).all() and torch.equal(found["conjugate"], expected["conjugate"])
    if not transformers.__version__.startswith("4."):  # that loads no complex numbers
        plain = from_pretrained(transformers.LlamaForCausalLM, tmp_path / "out")
        assert "conjugate" not in dict(plain.named_buffers())  # tensors that a model lacks are passed over


def test_adapters_with_modules_to_save_on_two_ranks(tmp_path):
    pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
    said = ranks.results(ranks.start(f"""
        import peft, transformers
        from hoist.torch.transformers import save_pretrained
        join()
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{SMALL!r}))
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
        with hoist.torch.wrap(model, config) as engine:
            save_pretrained(engine, directory + "/out")
            head = engine.state_dict()["base_model.model.lm_head.modules_to_save.default.weight"]
        print(json.dumps(head.tolist()))
    """, tmp_path, config_of(tmp_path / "nvme")))
    found = load_file(tmp_path / "out" / "adapter_model.safetensors")
    for head in said:
        assert torch.equal(found["base_model.model.lm_head.weight"], torch.tensor(head))


def test_quantized_weights_are_refused(tmp_path):
    _, hub = saved(tmp_path / "hub", shards="1GB")
    path = os.path.join(hub, "model.safetensors")
    tensors = load_file(path)
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"].to(torch.float8_e4m3fn)}, path, {"format": "pt"})
    if transformers.__version__.startswith("4."):  # that makes the model in the file's type
        with pytest.raises(hoist.UsageError, match=r"'model\.norm\.weight' is torch\.float8_e4m3fn; hoist trains only"):
            hoist.torch.wrap(from_pretrained(transformers.LlamaForCausalLM, hub), config_of(tmp_path / "nvme"))
        return
    with pytest.raises(hoist.UsageError, match=r"'model\.norm\.weight' is torch\.float8_e4m3fn; quantized weights are not"):
        from_pretrained(transformers.LlamaForCausalLM, hub)


def test_a_full_drive_is_said_with_the_directory(tmp_path, monkeypatch):
    _, hub = saved(tmp_path / "hub")
    model = from_pretrained(transformers.LlamaForCausalLM, hub)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        monkeypatch.setattr(os, "pwrite", full)
        with pytest.raises(hoist.IoError, match=f"the model to {tmp_path}/out failed: No space left on device; free space on"):
            save_pretrained(engine, tmp_path / "out")
    assert not (tmp_path / "out").exists() or os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("when", ["write", "move"])
def test_two_saves_into_one_directory_do_not_mix(tmp_path, monkeypatch, when):
    """The second is refused up to the end, and the first is complete."""
    models, place = Models(tmp_path / "out", "40KB", changed=True), {"write": (pretrained_export._Files, "write"),
                                                                     "move": (pretrained_export, "_move_up")}[when]
    (tmp_path / "out" / "model.partial").mkdir()  # of a save that was killed
    (tmp_path / "out" / "model.partial" / "model.safetensors").touch()
    (tmp_path / "out" / "model.partial.lock").touch()
    go_on = getattr(*place)
    with (hoist.torch.wrap(models.new, config_of(tmp_path / "nvme")) as engine,
          hoist.torch.wrap(copy.deepcopy(models.old), config_of(tmp_path / "other")) as other):

        def save_again(*arguments):
            monkeypatch.setattr(*place, go_on)
            with pytest.raises(hoist.UsageError, match=r"another save_pretrained\(\) writes into .*out"):
                save_pretrained(other, models.directory)
            go_on(*arguments)

        monkeypatch.setattr(*place, save_again)
        save_pretrained(engine, models.directory)
        assert getattr(*place) is go_on and models.found_in(models.directory) == "new"
        assert not [name for name in os.listdir(models.directory) if "partial" in name]
        save_pretrained(other, models.directory)
    assert models.found_in(models.directory) == "old"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS], ids=errno.errorcode.get)
def test_directories_that_cannot_be_flushed(tmp_path, monkeypatch, code):
    """Mounts of object stores refuse fsync() of a directory. A file that cannot be flushed is an error."""
    (tmp_path / "file").touch()

    def fsync(_):
        raise OSError(code, "fsync")

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoints.sync(str(tmp_path))
    with pytest.raises(OSError, match="fsync"):
        checkpoints.sync(str(tmp_path / "file"))


def test_adapters_are_replaced_when_the_new_ones_are_complete(tmp_path, monkeypatch):
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install peft)")
    _, hub = saved(tmp_path / "hub")
    model = peft.get_peft_model(from_pretrained(transformers.LlamaForCausalLM, hub),
                                peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    out = tmp_path / "adapter"
    with hoist.torch.wrap(model, config_of(tmp_path / "nvme")) as engine:
        save_pretrained(engine, out)
        with open(out / "README.md", "a") as card:
            card.write("Trained on a Tuesday.")
        before = files_of(out)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
            set_os(patch, fails_at(2))
            save_pretrained(engine, out)
        assert files_of(out) == before
        save_pretrained(engine, out)
    assert files_of(out).keys() == before.keys() and "on a Tuesday" in (out / "README.md").read_text()
