# SPDX-License-Identifier: Apache-2.0
"""What transformers.Trainer is made of with hoist: files, dictionaries, arguments and optimizers, and what of them is refused."""

import pytest
import torch

import hoist

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")
pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate (pip install accelerate)")
from test_trainer import DS_CONFIG, ON_CPU, Tokens, arguments, ds_config, losses_of, tiny_llama, trainer_of  # noqa: E402

import hoist.torch.transformers as hoist_transformers  # noqa: E402
from training import digests  # noqa: E402

pytestmark = pytest.mark.usefixtures("cpu_by_default")


def test_trainer_reads_the_yaml_file_of_accelerate(tmp_path):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (pip install pyyaml)")
    file = tmp_path / "default_config.yaml"
    file.write_text(yaml.safe_dump({"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "deepspeed_config": {
        "zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "gradient_accumulation_steps": 2}}))
    changes = {"lr_scheduler_type": "constant", "max_steps": 4}
    from_yaml = trainer_of(arguments(tmp_path / "yaml", **changes), file)
    from_yaml.train()
    cpu = {"device": "cpu"}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}, "bf16": {"enabled": True}}
    from_dictionary = trainer_of(arguments(tmp_path / "dictionary", **changes), config)
    from_dictionary.train()
    assert losses_of(from_yaml) == losses_of(from_dictionary) and digests(from_yaml.engine) == digests(from_dictionary.engine)
    with pytest.raises(hoist.UsageError, match="gradient_accumulation_steps is 2, and"):
        trainer_of(arguments(tmp_path / "other", gradient_accumulation_steps=4, **changes), file).train()


@pytest.mark.parametrize("nothing", [None, 7])
def test_no_configuration_is_said(tmp_path, nothing):
    with pytest.raises(hoist.UsageError, match="pass a DeepSpeed JSON file"):
        trainer_of(arguments(tmp_path), nothing)


def test_a_broken_file_is_said_with_its_line(tmp_path):
    (tmp_path / "ds.json").write_text('{"zero_optimization":\n {"stage" 3}}')
    with pytest.raises(hoist.ConfigError, match=r"a colon is missing after the key .*ds.json:2:11"):
        trainer_of(arguments(tmp_path), str(tmp_path / "ds.json"))


def test_a_file_with_comments_and_a_warm_up_of_no_steps(tmp_path):
    """hoist's reader takes comments, and so does this; no warm-up is TrainingArguments' default, and the file has "auto"."""
    file = tmp_path / "ds_config.json"
    file.write_text("// ZeRO-3\n" + (DS_CONFIG % (tmp_path / "nvme", tmp_path / "nvme")).replace(
        '"stage": 3,', '"stage": 3,  # all of it "in parts"').replace('"wall_clock_breakdown": false', "/* the end */"))
    trainer = trainer_of(arguments(tmp_path / "out", max_steps=2, warmup_steps=0), str(file))
    assert trainer.train().global_step == 2
    trainer.engine.close()


def test_keys_that_are_commented_out_stay_so(tmp_path):
    """wrap() and `hoist check` pass over keys with an underscore in front, also where a dot is in them."""
    config = ds_config(tmp_path / "nvme")
    config["zero_optimization"]["offload_optimizer"]["_was.device"] = "none"
    config["hoist"] = {**config.get("hoist", {}), "_try.moments_dtype": "fp8"}
    filled = hoist_transformers.fill_in(config, arguments(tmp_path / "out"), 100)
    assert filled["zero_optimization"]["offload_optimizer"]["device"] == "nvme" and "moments_dtype" not in filled["hoist"]


@pytest.mark.parametrize("optim, kind, eight_bits", [
    ("paged_adamw_32bit", "AdamW", False), ("adamw_bnb_8bit", "AdamW", True), ("paged_adamw_8bit", "AdamW", True),
    ("lion_32bit", "Lion", False), ("paged_lion_8bit", "Lion", True)])
def test_other_librarys_optimizers_are_hoists(tmp_path, caplog, optim, kind, eight_bits):
    """Nothing of bitsandbytes is needed, and what is done instead is said."""
    cpu = {"device": "cpu"}
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": cpu, "offload_param": cpu}}
    decay = {"weight_decay": 0.1 if kind == "AdamW" else 0.0}  # an optimizer of the file decays every parameter

    def trained(name, config):
        trainer = trainer_of(arguments(tmp_path / name, optim=name, max_steps=4, **decay), config)
        trainer.train()
        assert trainer.args.optim == name
        return trainer.engine, losses_of(trainer)

    engine, losses = trained(optim, config)
    assert f"optim {optim} is hoist's {kind}" in caplog.text and ("moments of 8 bits" in caplog.text) == eight_bits
    assert engine.config.setting("hoist.moments_dtype") == ("fp8" if eight_bits else None)
    assert len(engine.optimizer.param_groups) == 2
    expected = config | ({"hoist": {"moments_dtype": "fp8"}} if eight_bits else {})
    if kind == "Lion":
        expected["optimizer"] = {"type": "Lion", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}}
    other, other_losses = trained("adamw_torch", expected)
    if optim == "adamw_bnb_8bit":
        kept = [each.statistics()["tiers"]["pinned"]["peak_bytes"] for each in (engine, trained("adamw_torch", config)[0])]
        assert kept[0] < 0.8 * kept[1]
    assert losses == pytest.approx(other_losses, rel=1e-3)
    if kind == "AdamW" or not eight_bits:  # the random numbers of rounding go by groups, and here one run has two
        assert digests(engine) == digests(other)
    assert "hoist" not in config and "optimizer" not in config  # the caller's


def test_the_optimizer_of_a_subclass(tmp_path):
    """Its create_optimizer() need not call hoist's."""
    class OfItsOwn(hoist_transformers.Trainer):
        def create_optimizer(self, *_):
            self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=1e-2)
            return self.optimizer

    config = ds_config(tmp_path / "nvme", without=("optimizer", "scheduler"))
    args, model = arguments(tmp_path / "out", max_steps=3), tiny_llama()
    trainer = OfItsOwn(model=tiny_llama(), args=args, train_dataset=Tokens(), hoist_config=config)
    given = trainer_of(args, config | {"zero_optimization": {"stage": 3}}, model=model,
                       optimizers=(torch.optim.Adagrad(model.parameters(), lr=1e-2), None))
    for each in (trainer, given):
        each.train()
    rates = [[row["learning_rate"] for row in each.state.log_history if "loss" in row] for each in (trainer, given)]
    assert digests(trainer.engine) == digests(given.engine) and rates[0] == rates[1] and trainer.engine.global_steps == 3


@pytest.mark.parametrize("optim", ["adafactor", "rmsprop"])
def test_an_optim_that_hoist_lacks_is_refused_with_those_it_has(tmp_path, optim):
    config = ds_config(tmp_path / "nvme", without=("optimizer",))
    with pytest.raises(hoist.UsageError, match=rf"optim='{optim}' of TrainingArguments.*adamw_torch, .*sgd, .*lion_32bit"):
        trainer_of(arguments(tmp_path / "out", optim=optim), config).train()
    assert not (tmp_path / "nvme").exists()


def test_evaluations_of_a_run_log_what_trainers_do(tmp_path):
    """Nothing is prepared for them: the model is trained already."""
    args = arguments(tmp_path / "out", max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer = trainer_of(args, ds_config(tmp_path / "nvme"), eval_dataset=Tokens(8))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "eval_loss" in row] + [trainer.evaluate()]
    assert len(rows) == 3 and not any("eval_model_preparation_time" in row for row in rows)
    trainer.engine.close()


def test_deepspeed_of_accelerate_launch_is_refused(tmp_path, monkeypatch):
    made = transformers.Trainer.create_accelerator_and_postprocess

    def with_deepspeed(self):
        made(self)
        self.is_deepspeed_enabled = True

    monkeypatch.setattr(transformers.Trainer, "create_accelerator_and_postprocess", with_deepspeed)
    with pytest.raises(hoist.UsageError, match="accelerate launch.*start the program with torchrun"):
        trainer_of(arguments(tmp_path), {})


def test_what_contradicts_the_arguments_is_refused(tmp_path):
    config = ds_config(tmp_path / "nvme")
    config["gradient_clipping"] = 3.0
    config["optimizer"]["params"]["lr"] = 5e-5
    with pytest.raises(hoist.UsageError, match="gradient_clipping is 3.0.*max_grad_norm.*lr is 5e-05.*learning_rate"):
        trainer_of(arguments(tmp_path / "out"), config).train()
    for name in ("bf16_full_eval", "fp16_full_eval"):
        with pytest.raises(hoist.UsageError, match=f"^{name} of TrainingArguments is not supported"):
            trainer_of(arguments(tmp_path / "out", **{name: True}), ds_config(tmp_path / "nvme"))
    with pytest.raises(hoist.UsageError, match="micro-batches"):
        trainer_of(arguments(tmp_path / "out", auto_find_batch_size=True), ds_config(tmp_path / "nvme"))
    with pytest.raises(hoist.UsageError, match="micro_batch_order"):
        vertical = ds_config(tmp_path / "nvme")
        vertical.setdefault("hoist", {})["micro_batch_order"] = "vertical"
        trainer_of(arguments(tmp_path / "out"), vertical).train()
    assert not (tmp_path / "nvme").exists()


def test_a_store_that_holds_a_run_is_named_in_trainers_words(tmp_path):
    def made(output_dir):
        return trainer_of(arguments(output_dir, max_steps=2, save_strategy="steps", save_steps=2), ds_config(tmp_path / "store"))

    first = made(tmp_path)
    first.train()
    first.engine.close()
    again = made(tmp_path)
    with pytest.raises(hoist.StoreError, match="resume_from_checkpoint=True"):
        again.train()
    with pytest.raises(hoist.StoreError, match="resume_from_checkpoint=True"):
        again.train()  # and again
    with pytest.raises(hoist.StoreError, match="resume_from_checkpoint=DIRECTORY"):
        made(tmp_path / "elsewhere").train()


def test_a_checkpoint_of_a_plain_trainer_is_refused_before_a_store_is_made(tmp_path):
    plain = transformers.Trainer(model=tiny_llama(), args=arguments(tmp_path / "plain", max_steps=1, save_strategy="steps",
                                                                    save_steps=1, bf16=False), train_dataset=Tokens())
    if ON_CPU:
        plain.train()
    else:
        (tmp_path / "plain" / "checkpoint-1").mkdir(parents=True)
        (tmp_path / "plain" / "checkpoint-1" / "optimizer.pt").touch()
    checkpoint = str(tmp_path / "plain" / "checkpoint-1")
    trainer = trainer_of(arguments(tmp_path / "out", max_steps=2), ds_config(tmp_path / "store"))
    with pytest.raises(hoist.UsageError, match=r"weights=.*checkpoint-1.* in hoist_options"):
        trainer.train(resume_from_checkpoint=checkpoint)
    assert not (tmp_path / "store").exists()
    if ON_CPU:  # the advice works
        begun = trainer_of(arguments(tmp_path / "out", max_steps=2), ds_config(tmp_path / "store"),
                           hoist_options={"weights": checkpoint})
        begun.train()
        begun.engine.close()


def test_options_that_would_not_be_trainers_are_refused(tmp_path):
    with pytest.raises(hoist.UsageError, match=r"hoist_options has \['resume'\]"):
        trainer_of(arguments(tmp_path), ds_config(tmp_path / "store"), hoist_options={"resume": True})


def test_a_second_train_after_the_configurations_schedule_is_refused(tmp_path):
    trainer = trainer_of(arguments(tmp_path, max_steps=2), ds_config(tmp_path / "store"))
    trainer.train()
    with pytest.raises(hoist.UsageError, match="scheduler has come to its end"):
        trainer.train()
    trainer.engine.close()
    own = trainer_of(arguments(tmp_path, max_steps=2), ds_config(tmp_path / "own", without=("scheduler",)))
    own.train()
    own.train()
    assert own.engine.step_count == 4
    own.engine.close()


class Falls(torch.nn.Module):
    """Its weight falls by the rate of each step of SGD."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.line.weight)

    def forward(self, x, labels=None):
        return {"loss": self.line(x).mean()}


@pytest.mark.parametrize("kind", [None, "WarmupDecayLR", "WarmupCosineLR"])
def test_logged_rates_are_those_that_steps_used(tmp_path, kind):
    fallen = []

    class Watch(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, model, **_):
            fallen.append(model.state_dict()["line.weight"].item())

        on_train_end = on_step_begin

    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    if kind is not None:
        config["scheduler"] = {"type": kind, "params": {"warmup_num_steps": 2, "total_num_steps": "auto"}}
    if kind == "WarmupDecayLR":
        config["scheduler"]["params"] |= {"warmup_max_lr": "auto", "warmup_type": "linear"}
    args = arguments(tmp_path / "out", max_steps=6, optim="sgd", learning_rate=1e-2, warmup_steps=2, weight_decay=0.0,
                     max_grad_norm=0.0, bf16=False)
    rows = [{"x": torch.ones(1, device="cpu"), "labels": 0}] * 64
    trainer = hoist_transformers.Trainer(model=Falls(), args=args, train_dataset=rows, hoist_config=config, callbacks=[Watch()])
    trainer.train()
    logged = [row["learning_rate"] for row in trainer.state.log_history if "learning_rate" in row]
    used = [before - after for before, after in zip(fallen, fallen[1:], strict=False)]
    assert logged == pytest.approx(used, abs=1e-6) and max(logged) > 5e-3 and len(logged) == 6
    trainer.engine.close()


def test_auto_of_hoists_own_keys_is_what_a_key_left_out_is(tmp_path):
    """Trainer keeps as many steps as its arguments ask for."""
    config = ds_config(tmp_path / "nvme")
    config["hoist"] = {"keep_steps": "auto"}
    config["fp16"] = {"enabled": "auto"}
    args = arguments(tmp_path, bf16=False, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=2)
    trainer = trainer_of(args, config)
    trainer.train()
    assert trainer.engine.config.keep_steps == 3 and next(trainer.model.parameters()).dtype == torch.float32
    assert (tmp_path / "checkpoint-2").is_dir()
    trainer.engine.close()
