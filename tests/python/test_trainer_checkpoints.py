# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of transformers.Trainer: killed runs go on from the newest complete one, and what could not be saved is refused."""

import errno
import os
import shutil
import signal

import pytest

import hoist
import hoist.store
import ranks

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate (pip install accelerate)")
from test_trainer import arguments, ds_config, tiny_llama, trainer_of  # noqa: E402

import hoist.torch.transformers as hoist_transformers  # noqa: E402
from training import digests  # noqa: E402

pytestmark = pytest.mark.usefixtures("cpu_by_default")
ranks.import_too("transformers.trainer")
# On a GPU as with the fixture above.
BEGIN = ('import os, signal, accelerator, torch; accelerator.ON_GPU and torch.set_default_device("cpu"); '
         'from pathlib import Path; from test_trainer import *')


@pytest.mark.parametrize("own", [True, False], ids=["trainers_optimizer", "the_files_optimizer"])
def test_killed_and_resumed_from_a_checkpoint(tmp_path, own):
    """Saved every 3 steps and killed after step 11: resumed at 9, it ends in the bits of a run that nobody disturbed."""
    without = ("optimizer", "scheduler") if own else ()

    def run(path, max_steps=12, **options):
        args = arguments(tmp_path / path / "out", max_steps=max_steps, save_strategy="steps", save_steps=3)
        trainer = trainer_of(args, ds_config(tmp_path / path / "nvme", without=without), model=tiny_llama(
            seed=options.pop("seed", 0), attention_dropout=0.1))
        trainer.train(**options)
        return trainer

    whole = run("whole")
    expected = digests(whole.engine)
    whole.engine.close()

    ranks.output_of(f"""
        {BEGIN}
        class Kill(transformers.TrainerCallback):
            def on_step_end(self, args, state, control, **_):
                if state.global_step == 11:
                    os.kill(os.getpid(), signal.SIGKILL)
        path = Path({str(tmp_path / "killed")!r})
        args = arguments(path / "out", max_steps=12, save_strategy="steps", save_steps=3)
        trainer = trainer_of(args, ds_config(path / "nvme", without={without!r}), model=tiny_llama(attention_dropout=0.1),
                             callbacks=[Kill()])
        trainer.train()
    """, ends_with=-signal.SIGKILL)
    checkpoints = sorted(os.listdir(tmp_path / "killed" / "out"))
    assert checkpoints == ["checkpoint-3", "checkpoint-6", "checkpoint-9"]
    with pytest.raises(hoist.StoreError, match="holds a run"):
        run("killed")
    kept = r"'global_step3'.*'global_step6' \(step 6\), 'global_step9' \(step 9\)"
    remedies = r"A larger hoist\.keep_steps keeps more .*hoist_options=\{'weights': '.*checkpoint-3'\}"
    with pytest.raises(hoist.StoreError, match=f"{kept}.*{remedies}"):
        run("killed", resume_from_checkpoint=str(tmp_path / "killed" / "out" / "checkpoint-3"))
    resumed = run("killed", seed=5, resume_from_checkpoint=True)
    assert resumed.state.global_step == resumed.engine.global_steps == 12
    assert digests(resumed.engine) == expected
    resumed.engine.close()


def test_killed_before_a_checkpoint_was_complete(tmp_path):
    """The checkpoint is there, its directory lacks Trainer's own state: the run goes on from the checkpoint before it."""
    ranks.output_of(f"""
        {BEGIN}
        path = Path({str(tmp_path)!r})
        class Dying(hoist_transformers.Trainer):
            def _save_rng_state(self, output_dir):
                if self.state.global_step == 4:
                    os.kill(os.getpid(), signal.SIGKILL)
                super()._save_rng_state(output_dir)
        args = arguments(path / "out", max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=1)
        Dying(model=tiny_llama(), args=args, train_dataset=Tokens(), hoist_config=ds_config(path / "nvme")).train()
    """, ends_with=-signal.SIGKILL)
    assert sorted(os.listdir(tmp_path / "out")) == ["checkpoint-2", "checkpoint-4"]
    assert not (tmp_path / "out" / "checkpoint-4" / "trainer_state.json").exists()
    args = arguments(tmp_path / "out", max_steps=6, save_strategy="steps", save_steps=2, save_total_limit=1)
    trainer = trainer_of(args, ds_config(tmp_path / "nvme"), model=tiny_llama(seed=5))
    trainer.train(resume_from_checkpoint=True)
    ours = digests(trainer.engine)
    assert trainer.engine.checkpoints() == {"global_step4": 4, "global_step6": 6}
    trainer.engine.close()
    whole = trainer_of(arguments(tmp_path / "whole", max_steps=6), ds_config(tmp_path / "whole-nvme"))
    whole.train()
    assert ours == digests(whole.engine)
    whole.engine.close()


def test_interrupted_in_a_forward_pass_and_resumed_by_the_same_trainer(tmp_path):
    """As in a notebook. After the engine is closed, the error says what helps."""
    def made(path):
        return trainer_of(arguments(tmp_path / path / "out", max_steps=4, save_strategy="steps", save_steps=2),
                          ds_config(tmp_path / path / "nvme"))

    def interrupt(*_):
        if trainer.state.global_step == 3:
            raise KeyboardInterrupt

    whole = made("whole")
    whole.train()
    expected = digests(whole.engine)
    whole.engine.close()
    trainer = made("interrupted")
    hook = trainer.model.model.layers[1].register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    hook.remove()
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 4 and digests(trainer.engine) == expected
    trainer.engine.close()
    with pytest.raises(hoist.UsageError, match=r"closed.*make a new Trainer.*resume_from_checkpoint=True"):
        trainer.train(resume_from_checkpoint=True)
    again = made("interrupted")
    again.train(resume_from_checkpoint=True)
    again.engine.close()


class Interrupts(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 3:
            raise KeyboardInterrupt


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_interrupted_before_the_first_checkpoint(tmp_path, strategy):
    """The store has steps that Trainer cannot continue from: the error does not name a call that cannot work."""
    config = ds_config(tmp_path / "nvme", without=("scheduler",))

    def made(*callbacks):
        args = arguments(tmp_path / "out", max_steps=6, save_strategy=strategy, save_steps=4, learning_rate=1e-3)
        return trainer_of(args, config, callbacks=list(callbacks))

    trainer = made(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.engine.close()
    with pytest.raises(hoist.StoreError, match=r"holds a run without a checkpoint.*hoist\.store.*resume=True") as told:
        made().train()
    assert "resume_from_checkpoint" not in str(told.value)
    with hoist.store.open(tmp_path / "nvme") as stored:
        assert stored.step == 3


def test_only_weights_were_saved(tmp_path):
    """The store's run and its moments are not those of the checkpoint: the error says what to remove, and that works."""
    def made(*callbacks):
        args = arguments(tmp_path / "out", max_steps=4, save_strategy="steps", save_steps=2, save_only_model=True)
        return trainer_of(args, ds_config(tmp_path / "nvme"), callbacks=list(callbacks))

    trainer = made(Interrupts())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    with pytest.raises(hoist.UsageError, match=r"checkpoint-2 has weights alone.*moments of step 3: make a new Trainer"):
        trainer.train(resume_from_checkpoint=True)
    trainer.engine.close()
    for resume in (None, True):
        with pytest.raises(hoist.StoreError, match=r"holds a run, and .*checkpoint-2 has weights alone.*Remove.*=True\)"):
            made().train(resume_from_checkpoint=resume)
    shutil.rmtree(tmp_path / "nvme")
    trainer = made()
    assert trainer.train(resume_from_checkpoint=True).global_step == 4
    assert trainer.engine.step_count == 2
    trainer.engine.close()


def test_a_store_whose_checkpoints_are_older_than_weights_alone(tmp_path):
    """The error does not advise to remove it, and names a call that works."""
    def made(steps, only_model):
        return trainer_of(arguments(tmp_path / "out", max_steps=steps, save_strategy="steps", save_steps=2,
                                    save_only_model=only_model), ds_config(tmp_path / "nvme"))

    def run(steps, only_model, **options):
        trainer = made(steps, only_model)
        trainer.train(**options)
        trainer.engine.close()

    run(2, only_model=False)
    run(4, only_model=True, resume_from_checkpoint=True)
    for resume in (None, True):
        with pytest.raises(hoist.StoreError, match=r"and .*checkpoint-4 has weights alone.*It keeps 'global_step2'.*continues "
                                                   "it.*another directory") as told:
            run(6, only_model=True, resume_from_checkpoint=resume)
        assert "emove" not in str(told.value)
    run(6, only_model=True, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))


def test_what_ranks_do_follows_the_drive_of_the_first(tmp_path):
    """Each has its own, and only the first one's has checkpoints. All raise, and leave no engine open."""
    for said in ranks.results(ranks.start(f"""
        from pathlib import Path
        from test_trainer import arguments, ds_config, trainer_of
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", "{ranks.free_port()}"
        join()
        def made(steps):
            args = arguments(Path({str(tmp_path)!r}) / f"out-{{rank}}", max_steps=steps, save_strategy="steps", save_steps=2,
                             save_only_model=True)
            return trainer_of(args, ds_config(Path({str(tmp_path)!r}) / "nvme"))
        trainer = made(2)
        trainer.train()
        trainer.engine.close()
        for resume in (None, True):
            trainer, said = made(4), ""
            try:
                trainer.train(resume_from_checkpoint=resume)
            except hoist.StoreError as error:
                said = str(error)
            assert "holds a run" in said and trainer.engine is None, said
        print(json.dumps(said))
    """, tmp_path / "meet", {})):
        assert "out-0/checkpoint-2 has weights alone" in said, said


@pytest.mark.parametrize("files, is_so", [
    (["model.safetensors", "training_args.bin"], True), (["model-00001-of-00002.safetensors"], True),
    (["pytorch_model.bin"], True), (["adapter_model.safetensors"], True), (["reward/adapter_model.safetensors"], True),
    ([], False), (["training_args.bin"], False),
    (["model.safetensors", "latest"], False), (["pytorch_model_fsdp.bin", "optimizer.bin"], False),
    (["model.safetensors", "optimizer_0/a"], False), (["pytorch_model.bin", "global_step2/a"], False)])
def test_directories_of_weights_alone(tmp_path, files, is_so):
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).touch()
    assert hoist_transformers.has_weights_alone(str(tmp_path)) is is_so


def test_the_newest_complete_checkpoint(tmp_path):
    newest = hoist_transformers.newest_complete_checkpoint
    assert newest(str(tmp_path / "nothing")) is None and newest(str(tmp_path)) is None
    for step in (9, 10, 11, 12):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert newest(str(tmp_path)) is None
    transformers.TrainerState(global_step=9).save_to_json(str(tmp_path / "checkpoint-9" / "trainer_state.json"))
    assert newest(str(tmp_path)) == str(tmp_path / "checkpoint-9")
    transformers.TrainerState(global_step=10).save_to_json(str(tmp_path / "checkpoint-10" / "trainer_state.json"))
    whole = (tmp_path / "checkpoint-10" / "trainer_state.json").read_text()
    (tmp_path / "checkpoint-11" / "trainer_state.json").write_text(whole[:len(whole) // 2])
    assert newest(str(tmp_path)) == str(tmp_path / "checkpoint-10")
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer_of(arguments(tmp_path / "nothing"), ds_config(tmp_path / "nvme")).train(resume_from_checkpoint=True)


def test_an_alarm_makes_no_checkpoint_incomplete(tmp_path, monkeypatch):
    """The handler replaces itself while it runs."""
    def handler(*_):
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raise TimeoutError("alarm")

    for step in (9, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
        transformers.TrainerState(global_step=step).save_to_json(str(tmp_path / f"checkpoint-{step}" / "trainer_state.json"))
    monkeypatch.setattr(hoist_transformers.TrainerState, "load_from_json", lambda _: signal.raise_signal(signal.SIGALRM))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError, match="^alarm$"):
            hoist_transformers.newest_complete_checkpoint(str(tmp_path))
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_model_that_cannot_be_saved_leaves_the_one_before(tmp_path, monkeypatch):
    """Trainer's own settings files must not remove the weights either."""
    out = tmp_path / "model"
    tiny_llama(seed=7).save_pretrained(out, max_shard_size="8KB")
    before = {file: (out / file).read_bytes() for file in os.listdir(out)}
    assert len(before) > 5
    trainer = trainer_of(arguments(tmp_path / "out", max_steps=1), ds_config(tmp_path / "nvme"))
    trainer.train()
    with monkeypatch.context() as patch, pytest.raises(OSError, match="full"):
        patch.setattr(os, "pwrite", full_drive)
        trainer.save_model(str(out))
    assert {file: (out / file).read_bytes() for file in os.listdir(out)} == before
    trainer.save_model(str(out))
    trainer.engine.close()
    files = set(os.listdir(out))
    assert {"config.json", "generation_config.json", "model.safetensors", "training_args.bin"} <= files
    assert not any("-of-" in file or "partial" in file for file in files)


def full_drive(*_):
    raise OSError(errno.ENOSPC, "full")


def in_memory(config):
    for part in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][part] = {"device": "cpu"}
    return config


@pytest.mark.parametrize("why", ["durability", "keep_steps"])
def test_checkpoints_that_could_not_be_saved_are_refused_at_the_start(tmp_path, why):
    """Trainer saves by default, every 500 steps: that is late to learn that the store keeps nothing."""
    def config():
        made = ds_config(tmp_path / "nvme")
        made["hoist"] = {"durability": "none"} if why == "durability" else {"keep_steps": 0}
        return made

    args = arguments(tmp_path / "out", max_steps=2, save_strategy="steps")
    with pytest.raises(hoist.UsageError, match="keep_steps.*durability.*save_strategy='no'"):
        trainer_of(args, config()).train()
    assert not (tmp_path / "nvme").exists()
    for saving in ({"save_strategy": "no"}, {"save_only_model": True}):
        trainer = trainer_of(arguments(tmp_path / "out", max_steps=2, **{"save_strategy": "steps"} | saving), config())
        assert trainer.train().global_step == 2
        trainer.engine.close()
        shutil.rmtree(tmp_path / "nvme", ignore_errors=True)


def test_state_in_memory_is_saved_where_the_file_names_a_store(tmp_path):
    config = in_memory(ds_config(tmp_path / "nvme"))
    config["hoist"] = {"checkpoint_path": str(tmp_path / "kept")}
    trainer = trainer_of(arguments(tmp_path / "out", max_steps=2, save_strategy="steps"), config)
    trainer.train()
    assert trainer.engine.checkpoints() == {"global_step2": 2}
    trainer.engine.close()


def test_state_in_memory_is_saved_beside_trainers_own_files_otherwise(tmp_path):
    """Trainer saves by default, and a canonical file names no directory."""
    def trained(steps, resume):
        trainer = trainer_of(arguments(tmp_path / "out", max_steps=steps, save_strategy="steps", save_steps=2),
                             in_memory(ds_config(tmp_path / "nvme")))
        trainer.train(resume_from_checkpoint=resume)
        kept = trainer.engine.checkpoints()
        trainer.engine.close()
        return kept

    assert trained(2, resume=False) == {"global_step2": 2}
    assert (tmp_path / "out" / "hoist").is_dir() and not (tmp_path / "nvme").exists()
    assert trained(4, resume=True)["global_step4"] == 4


@pytest.mark.parametrize("setting", ["keep_steps", "mirror"])
def test_state_in_memory_has_what_a_store_can(tmp_path, setting):
    config = in_memory(ds_config(tmp_path / "nvme"))
    config["hoist"] = {"keep_steps": 3} if setting == "keep_steps" else {"mirror": {"path": str(tmp_path / "mirror")}}
    trainer = trainer_of(arguments(tmp_path / "out", max_steps=4, save_strategy="steps", save_steps=1), config)
    trainer.train()
    assert len(trainer.engine.checkpoints()) == (3 if setting == "keep_steps" else 2)
    trainer.engine.close()
    assert (tmp_path / "out" / "hoist").is_dir() and (tmp_path / "mirror" / "hoist").is_dir() == (setting == "mirror")
    assert "checkpoint_path" not in config["hoist"]
