# SPDX-License-Identifier: Apache-2.0
"""Ranks that do something else than the others: other layers, other calls, other arguments, other models."""

import os

import pytest
import torch

from ranks import texts_of
from test_distributed import with_room


class Experts(torch.nn.Module):
    """Each rank uses an expert of its own."""

    def __init__(self, widths):
        super().__init__()
        self.token = torch.nn.Embedding(97, 32)
        self.experts = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(32, w), torch.nn.Linear(w, 32)) for w in widths)

    def forward(self, tokens, expert):
        return self.experts[expert](self.token(tokens))


@pytest.mark.parametrize("widths", [(128, 128), (128, 64)])
@pytest.mark.parametrize("trains", [False, True])
def test_ranks_that_use_different_layers_do_not_get_each_others_bytes(settings, tmp_path, widths, trains):
    texts = texts_of(f"""
        from test_rank_differences import Experts
        torch.manual_seed(0)
        engine = hoist.torch.wrap(Experts({widths}), config)
        with torch.set_grad_enabled({trains}):
            values = engine(torch.zeros(2, 8, dtype=torch.long), rank)
        assert values.isnan().all()  # on an accelerator; the error comes with a later call
        engine.settle()
    """, tmp_path / "meet", with_room(settings))
    for text in texts:
        assert text.startswith("CommError") and "have diverged" in text, text
        assert "rank 0 is at all_gather of 'experts.0'" in text and "rank 1 is at all_gather of 'experts.1'" in text
        assert "forward() after step 0" in text or os.environ.get("HOIST_TEST_ACCELERATOR")


def test_a_rank_that_ended_early_says_so(settings, tmp_path):
    texts = texts_of("""
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 2)
        if rank == 1:
            engine.close()
            time.sleep(20)
        train_share(engine, rank, size, 1, first=2)
    """, tmp_path / "meet", with_room(settings))
    assert texts[0].startswith("CommError") and "rank 1 has closed its engine, or ended" in texts[0]
    assert "rank 0 was at all_gather of 'token'" in texts[0]


def test_a_call_of_one_rank_alone_is_named(settings, tmp_path):
    config = with_room(settings)
    config["hoist"]["comm_timeout_seconds"] = 4.0
    texts = texts_of("""
        engine = hoist.torch.wrap(make(), config)
        engine.state_dict() if rank == 0 else train_share(engine, rank, size, 1)
    """, tmp_path / "meet", config)
    for text in texts:
        assert text.startswith("CommError") and "state_dict() after step 0" in text and "forward() after step 0" in text
        assert "Every rank must make the same calls" in text


def test_ranks_meet_again_after_a_restore_on_one_alone(settings, tmp_path):
    config = with_room(settings)
    config["hoist"]["comm_timeout_seconds"] = 4.0
    texts = texts_of("""
        engine = hoist.torch.wrap(make(), config)
        text = "nothing"
        try:
            engine.restore() if rank == 1 else train_share(engine, rank, size, 1)
        except hoist.CommError as error:
            text = str(error)
        try:
            engine.close()
        except hoist.CommError:
            pass  # where step() has failed, and not forward(): on an accelerator, whose collectives run later
        dist.barrier()
        engine = hoist.torch.wrap(make(), config, resume=True)
        train_share(engine, rank, size, 1)
        engine.close()
        dist.barrier()
        raise hoist.UsageError(f"trained after: {text}")
    """, tmp_path / "meet", config)
    assert "restore() after step 0" in texts[0] and "did not come" in texts[1], texts
    assert all(text.startswith("UsageError: trained after:") for text in texts), texts


@pytest.mark.parametrize("call", ["wrap(make(), config", "initialize(model=make(), config=config"])
@pytest.mark.parametrize("argument, shown", [("resume=True", "resume=True"), ("weights='nowhere'", "weights=...")])
def test_an_argument_that_one_rank_alone_passes_is_named(settings, tmp_path, call, argument, shown):
    for text in texts_of(f"""
        hoist.torch.{call}, **(dict({argument}) if rank == 1 else {{}}))
    """, tmp_path / "meet", with_room(settings)):
        assert text.startswith(f"UsageError: rank 1 passes {shown}, and rank 0 does not: pass it on every rank"), text


def test_a_mirror_on_one_rank_alone_is_named(settings, tmp_path):
    """As where a node has another configuration file. All look for the run to resume, in the mirror as well."""
    for text in texts_of("""
        if rank == 0:
            config["hoist"]["mirror"] = {"path": directory + "/mirror"}
        hoist.torch.wrap(make(), config, resume=True)
    """, tmp_path / "meet", with_room(settings)):
        assert "rank 1 is at 'Engine::find_commit() without hoist.mirror', rank 0 at 'Engine::find_commit() with" in text, text


def test_ranks_that_built_different_parameters_are_refused(settings, tmp_path):
    """As programs do whose rank 0 alone reads the weights."""
    for text in texts_of("""
        hoist.torch.wrap(built_with(0, "cpu" if rank == 0 else "meta"), config, initialize=fill_at_random)
    """, tmp_path / "meet", with_room(settings)):
        assert text.startswith("UsageError: the ranks have built different parameters")


def test_ranks_whose_models_differ_are_told_where(settings, tmp_path):
    for text in texts_of("""
        from test_rank_differences import Experts
        hoist.torch.wrap(Experts([128] * (2 + rank)), config)
    """, tmp_path / "meet", with_room(settings)):
        assert text.startswith("CommError") and "experts.2" in text, text
