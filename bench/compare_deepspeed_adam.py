#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The update kernels beside PyTorch's and DeepSpeed's, on the same arrays.

  compare_deepspeed_adam.py --shim build/dev/bench/libhoist_optimizer_shim.so [--check-only | --smoke] [--json FILE]

First that they compute the same: 1000 steps on the gradients of a small model that is being trained, every optimizer
beside torch.optim's, in the units of rounding said below; and the split master against the whole one, bit by bit. Then
how fast: alternating pairs with a control of ours against ours, one thread for each core on every side. Exits with 77,
naming the reason, where PyTorch is not installed; a missing DeepSpeed is said and left out.
"""
import argparse
import ctypes
import functools
import os
import sys
import time

from pairs import Pairs, write_json

try:
    import torch
except ImportError as error:
    print(f"skipped: PyTorch is not installed ({error})")
    sys.exit(77)

ADAMW, ADAM, ADAGRAD, LION, SGD = range(5)
BF16, FP32 = 0, 2


class Optimizer(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int)] + [
        (name, ctypes.c_double)
        for name in ("learning_rate", "beta1", "beta2", "epsilon", "weight_decay", "momentum", "dampening")
    ] + [("nesterov", ctypes.c_int), ("learning_rate_decay", ctypes.c_double)]


class Shim:
    def __init__(self, path, threads):
        self.library = ctypes.CDLL(path)
        self.library.shim_pool.restype = ctypes.c_void_p
        self.library.shim_update.argtypes = ([ctypes.c_void_p, ctypes.POINTER(Optimizer), ctypes.c_uint64,
                                              ctypes.c_double] + [ctypes.c_void_p] * 6 + [ctypes.c_int, ctypes.c_size_t])
        self.pool = self.library.shim_pool(threads)

    def update(self, optimizer, step, weight, gradient, moment1=None, moment2=None, remainder=None, master=None, scale=1.0):
        def address(tensor):
            return None if tensor is None else tensor.data_ptr()
        dtype = BF16 if gradient.dtype == torch.bfloat16 else FP32
        sound = self.library.shim_update(self.pool, ctypes.byref(optimizer), step, scale, address(weight),
                                         address(remainder), address(master), address(moment1), address(moment2),
                                         address(gradient), dtype, weight.numel())
        assert sound, "a state came out that may not be committed"


def split(master):
    bits = master.view(torch.int32)
    weight = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    return weight.contiguous(), (bits & 0xFFFF).to(torch.int16).contiguous()


def join(weight, remainder):
    return ((weight.view(torch.int16).to(torch.int32) << 16) + remainder.to(torch.int32)).view(torch.float32)


# ---- that they compute the same ------------------------------------------------------------------------------------

def cases():
    base = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8, "weight_decay": 0.01}

    def ours(kind, **more):
        return Optimizer(kind=kind, **{**base, **more})
    optim = torch.optim
    return {
        "AdamW": (ours(ADAMW), lambda p: optim.AdamW(p, lr=1e-3, weight_decay=0.01)),
        "Adam": (ours(ADAM), lambda p: optim.Adam(p, lr=1e-3, weight_decay=0.01)),
        "Adagrad": (ours(ADAGRAD, learning_rate=1e-2, epsilon=1e-10, learning_rate_decay=0.001),
                    lambda p: optim.Adagrad(p, lr=1e-2, lr_decay=0.001, weight_decay=0.01)),
        "SGD": (ours(SGD, learning_rate=1e-2), lambda p: optim.SGD(p, lr=1e-2, weight_decay=0.01)),
        "SGD momentum": (ours(SGD, learning_rate=1e-2, momentum=0.9, dampening=0.1),
                         lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.01)),
        "SGD Nesterov": (ours(SGD, learning_rate=1e-2, momentum=0.9, nesterov=1),
                         lambda p: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01)),
    }


def text_bytes():
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    with open(os.path.join(root, "README.md"), "rb") as file:
        return torch.tensor(list(file.read()), dtype=torch.long)


class Reader(torch.nn.Module):
    """Guesses the next byte from the last eight."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 16)
        self.hidden = torch.nn.Linear(128, 64)
        self.out = torch.nn.Linear(64, 256)

    def forward(self, x):
        return self.out(torch.tanh(self.hidden(self.embedding(x).flatten(1))))


def check(shim, steps):
    """Trains each of PyTorch's optimizers, and gives ours the same gradients. Compares the weights at the end, relative to
    their size plus the distance that they moved, and the moments, relative to themselves or to the largest gradient they have
    seen (its square). An error of 2^-24 a step, all of one sign, would be `steps` roundings. Coefficients that the two sides
    round differently add some in the first steps."""
    text = text_bytes()
    results = {}
    for name, (ours, make) in cases().items():
        torch.manual_seed(1)
        model = Reader()
        parameters = list(model.parameters())
        optimizer = make(parameters)
        flat = torch.cat([p.detach().flatten() for p in parameters])
        begin, whole, largest = flat.clone(), flat.clone(), torch.zeros_like(flat)
        moments = [torch.zeros_like(flat) for _ in range(4)]
        weight, remainder = split(flat)
        for step in range(1, steps + 1):
            at = torch.randint(0, len(text) - 9, (32,))
            x = torch.stack([text[i:i + 8] for i in at])
            loss = torch.nn.functional.cross_entropy(model(x), text[at + 8])
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            gradient = torch.cat([p.grad.flatten() for p in parameters])
            decay = 0 if ours.kind == ADAMW else ours.weight_decay
            largest = torch.maximum(largest, (gradient + decay * whole).abs())
            optimizer.step()
            shim.update(ours, step, whole, gradient, moments[0], moments[1])
            shim.update(ours, step, weight, gradient, moments[2], moments[3], remainder)
        theirs = torch.cat([p.detach().flatten() for p in parameters])
        identical = torch.equal(join(weight, remainder).view(torch.int32), whole.view(torch.int32)) and torch.equal(
            weight.view(torch.int16), split(whole)[0].view(torch.int16)) and torch.equal(
                moments[0], moments[2]) and torch.equal(moments[1], moments[3])
        reach = (theirs - begin).abs() + theirs.abs()
        error = ((whole - theirs).abs() / reach.clamp_min(1e-30)).max().item() * 2**24
        moment_error = 0.0
        state = [optimizer.state[p] for p in parameters]
        for ours_m, key, power in ((moments[0], "exp_avg", 1), (moments[1], "exp_avg_sq", 2)):
            if key in state[0]:
                theirs_m = torch.cat([s[key].flatten() for s in state])
                scale = torch.maximum(theirs_m.abs(), largest**power).clamp_min(2**-126)
                moment_error = max(moment_error, ((ours_m - theirs_m).abs() / scale).max().item() * 2**24)
        results[name] = {"split_is_whole": identical, "worst_roundings": max(error, moment_error),
                         "weights_roundings": error, "moments_roundings": moment_error, "loss": loss.item(),
                         "bound": steps + 64}
        print(f"{name:14} {steps} steps, {flat.numel()} parameters, loss {loss.item():.3f}: split master "
              f"{'identical to the whole one' if identical else 'DIFFERS'}; from PyTorch's at most {error:.0f} roundings "
              f"(2^-24 of its size plus the distance it moved), moments {moment_error:.0f} (of the moment, or the largest "
              f"gradient it has seen); bound {steps + 64}")
    return results


# ---- how fast ------------------------------------------------------------------------------------------------------

def seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def deepspeed_adam():
    """DeepSpeed's kernel as a function of (step, weight, gradient, moment1, moment2), or the reason why there is none."""
    try:
        from deepspeed.ops.op_builder import CPUAdamBuilder
        kernel = CPUAdamBuilder().load()
        kernel.create_adam(0, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, False)
    except Exception as error:  # whatever its build says
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return (lambda step, w, g, m, v: kernel.adam_update(0, step, 1e-3, 0.9, 0.999, 1e-8, 0.01, True, w, g, m, v)), ""


def torch_adam(step, w, g, m, v):
    torch._fused_adamw_([w], [g], [m], [v], [], [torch.tensor(float(step))], lr=1e-3, beta1=0.9, beta2=0.999,
                        weight_decay=0.01, eps=1e-8, amsgrad=False, maximize=False)


def speed(shim, count, pairs):
    torch.manual_seed(1)
    ours = Optimizer(kind=ADAMW, learning_rate=1e-3, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.01)
    weight = 0.1 * torch.randn(count)
    gradient = 1e-3 * torch.randn(count)
    moment1, moment2 = torch.zeros(count), torch.zeros(count)
    bf16, fp16 = torch.empty(count, dtype=torch.bfloat16), torch.empty(count, dtype=torch.float16)
    half_gradient = gradient.to(torch.bfloat16)
    high, remainder = split(weight)
    steps = iter(range(1, 1 << 30))

    def plain():
        shim.update(ours, next(steps), weight, gradient, moment1, moment2)

    def same_arrays():
        shim.update(ours, next(steps), fp16, gradient, moment1, moment2, master=weight, scale=0.999)

    def mixed():
        shim.update(ours, next(steps), high, half_gradient, moment1, moment2, remainder, scale=0.999)

    rivals = {"PyTorch fused AdamW": torch_adam}
    kernel, reason = deepspeed_adam()
    if kernel is None:
        print(f"DeepSpeed's cpu_adam is left out: {reason}")
    else:
        rivals["DeepSpeed cpu_adam"] = kernel
    results = {}
    for name, update in rivals.items():
        def their_plain(update=update):
            update(next(steps), weight, gradient, moment1, moment2)

        def their_mixed(weights_out, update=update):  # what a trainer needs of them: unscale and clip, update, weights out
            gradient.mul_(0.999)
            update(next(steps), weight, gradient, moment1, moment2)
            weights_out.copy_(weight)

        comparisons = [("fp32", plain, their_plain, 1.0),
                       ("mixed precision, the same fp32 arrays, fp16 weights", same_arrays, lambda: their_mixed(fp16), 1.7),
                       ("mixed precision, bf16 gradient, split master", mixed, lambda: their_mixed(bf16), 1.9)]
        for what, mine, their, target in comparisons:
            for call in (mine, their, mine, their):
                call()
            measured = Pairs(pairs, functools.partial(seconds, their), functools.partial(seconds, mine),
                             control=functools.partial(seconds, mine))
            gradient.normal_(0, 1e-3)
            results[f"{name}, {what}"] = measured.json() | {"target": target}
            print(f"{name}, {what}: speed-up of hoist {measured}, wanted {target}")
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shim", required=True, help="libhoist_optimizer_shim.so of a build")
    parser.add_argument("--parameters", type=int, default=64 << 20)
    parser.add_argument("--pairs", type=int, default=31)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="small and quick: a test")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.parameters, arguments.pairs, arguments.steps = 1 << 16, 2, 50
    threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    shim = Shim(arguments.shim, threads)
    results = {"torch": torch.__version__, "threads": threads, "check": check(shim, arguments.steps)}
    if not arguments.check_only:
        results["speed"] = speed(shim, arguments.parameters, arguments.pairs)
    write_json(arguments.json, results)
    wrong = [name for name, r in results["check"].items() if not r["split_is_whole"] or r["worst_roundings"] > r["bound"]]
    if wrong:
        print("FAILED: " + ", ".join(wrong))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
