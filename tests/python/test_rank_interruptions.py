# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C, and what the program's handlers of signals raise, on one of several ranks: that rank's program gets it, and the others
learn why at once."""

import sys

import pytest
import torch.distributed as dist

from hoist.torch.ranks import channels
from ranks import results, start
from test_distributed import with_room


def test_a_construction_that_is_interrupted_as_it_begins_is_told_and_counted(monkeypatch):
    """Ranks that count otherwise would not meet again. Before `try` it is as if it came before the call."""
    construction = channels.Start.__init__.__code__, channels._begins.__code__, channels.start.__wrapped__.__code__
    before_try = 2  # lines
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    for count in range(1, 100):
        store, seen = dist.HashStore(), 0
        monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda store=store: store)
        monkeypatch.setattr(channels, "_numbers", {})

        def interrupt(frame, event, _, count=count):
            nonlocal seen
            seen += event == "line" and frame.f_code in construction
            if seen == before_try + count:
                sys.settrace(None)
                raise KeyboardInterrupt
            return interrupt

        sys.settrace(interrupt)
        try:
            with channels.start((0, 1)):
                sys.settrace(None)
                break
        except KeyboardInterrupt:
            assert channels._numbers == {(0, 1): 1}
        finally:
            sys.settrace(None)
        monkeypatch.setattr(channels, "_numbers", {})
        assert channels.Start((0, 1)).why(1) == "rank 0 failed: KeyboardInterrupt"
    assert count > 5


@pytest.mark.parametrize("handler, raised", [("signal.default_int_handler", "KeyboardInterrupt"),
                                             ("lambda *_: broken()", "LookupError: no such token")])
def test_what_a_handler_of_a_signal_raises_reaches_the_program(settings, tmp_path, handler, raised):
    """While the rank waits for another one, which then learns why."""
    ranks = results(start(f"""
        import traceback
        from test_rank_failures import broken
        join()
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 1)
        if rank == 1:
            signal.signal(signal.SIGALRM, {handler})
            signal.setitimer(signal.ITIMER_REAL, 0.5)
        else:
            time.sleep(2)
        began = time.monotonic()
        text = ""
        try:
            engine.state_dict()
        except BaseException as error:
            text = "".join(traceback.format_exception_only(error)).strip()
        again = ""
        try:
            engine.state_dict()
        except hoist.Error as error:
            again = str(error)
        print(json.dumps([text, again, time.monotonic() - began]), flush=True)
        os._exit(0)
    """, tmp_path / "meet", with_room(settings)))
    (first, _, seconds), (second, again, _) = ranks
    assert second == raised and raised.partition(":")[0] in again
    assert first.startswith("hoist.CommError") and f"rank 1 was interrupted: {raised}" in first
    assert seconds < 30


def test_an_interruption_while_channels_are_closed_is_not_lost(settings, tmp_path):
    ranks = results(start("""
        from hoist.torch.ranks.channels import Channel
        join()
        engine = hoist.torch.wrap(make(), config)
        close, closed = Channel.close, []

        def interrupted_once(channel):
            closed.append(channel)
            if len(closed) == 1:
                raise KeyboardInterrupt
            close(channel)

        Channel.close = interrupted_once
        text = ""
        try:
            engine.close()
        except KeyboardInterrupt:
            text = "KeyboardInterrupt"
        print(json.dumps([text, len(closed) > 1 and closed[0] is closed[1]]))
    """, tmp_path / "meet", with_room(settings)))
    assert ranks == [["KeyboardInterrupt", True]] * 2


class Preempted(RuntimeError):
    pass


@pytest.mark.parametrize("raised", ["KeyboardInterrupt", "Preempted"])
def test_an_interruption_at_any_line_of_a_call_is_told_to_the_others(settings, tmp_path, raised):
    """At once, though the program keeps the exception, whose traceback holds the variables of what was interrupted."""
    config = with_room(settings)
    config["hoist"]["comm_timeout_seconds"] = 600.0
    interrupted, told = results(start(f"""
        raised = {raised!r}""" + """
        from hoist.torch.ranks import channels
        from test_rank_interruptions import Preempted
        def handler(*_):
            raise {"KeyboardInterrupt": KeyboardInterrupt, "Preempted": Preempted}[raised]("here")

        signal.signal(signal.SIGUSR1, handler)
        join()
        engine = hoist.torch.wrap(make(), config)
        train_share(engine, rank, size, 1)
        tried, here = set(), []

        def interrupt(frame, event, _):
            if frame.f_code.co_filename != channels.__file__:
                return None
            line = frame.f_code.co_name, frame.f_lineno
            if event == "line" and line not in tried:
                sys.settrace(None)
                tried.add(line)
                here.append(line)
                signal.raise_signal(signal.SIGUSR1)
            return interrupt

        texts, kept, began = [], [], time.monotonic()
        while True:
            here.clear()
            dist.barrier()
            sys.settrace(interrupt if rank == 0 else None)
            text = ""
            try:
                engine._unit_manager.same_on_all("")
            except BaseException as error:
                sys.settrace(None)
                kept.append(error)
                text = f"{type(error).__name__}: {error}"
            sys.settrace(None)
            assert time.monotonic() - began < 200, here
            was_interrupted = [bool(here)]
            dist.broadcast_object_list(was_interrupted)
            if not was_interrupted[0]:
                break
            texts.append(text)
            engine.restore()
        print(json.dumps(texts), flush=True)
        os._exit(0)
    """, tmp_path / "meet", config))
    assert set(interrupted) == {f"{raised}: here"}
    # Where all has been sent, the others have what they wait for.
    assert {"rank 0 was interrupted: " in text and f"{raised}: here" in text for text in told if text} == {True}
