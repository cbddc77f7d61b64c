"""Coded residual transform compared with its literal equation and with a linear head.

    python benchmarks/crt.py                                        # the head alone, on the CPU
    python benchmarks/crt.py --device cuda                          # the head in float32 and bf16, and training steps
    python benchmarks/crt.py --device cuda --part step --compile    # compiled steps

Head: forward and backward at B = 80, N = 64, L = 512, K = 64. "literal" computes the (B, K, N, L) residuals and runs K networks one
after another; "half literal" computes the residuals and uses the batched networks of Unimetric. Memory is the peak of one forward and
backward pass in addition to weights and inputs, including gradients of the weights. On the CPU it is measured in a separate process, on a
GPU by the allocator. The variants alternate.

Step: backbone, head, objective, backward and AdamW on one batch that is already on the device, in bf16 (float32 without a GPU), as in a
run: on a GPU in channels-last format and, if compiled, with the objective as one CUDA graph. `mit_b2` is the backbone of the paper, with
the N and L above.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _timing import milliseconds
from torch import Tensor, nn
from torch.nn.functional import softplus

from unimetric.objectives import Output
from unimetric.runs.model import Model
from unimetric.spec import create
from unimetric.training import capture

BATCH, POSITIONS, CHANNELS = 80, 64, 512


def residuals(positions: Tensor, prototypes: Tensor) -> Tensor:
    """Compute equation 1 literally."""
    differences = positions[:, None] - prototypes[None, :, None]  # (B, K, N, L)
    weights = softplus(positions @ prototypes.T).transpose(1, 2)  # (B, K, N)
    return (weights[..., None] * differences).sum(2)


class HalfLiteral(nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = head

    def branches(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        coder = self.head.coder
        hidden = coder.layers(residuals(tokens[:, 1:], coder.prototypes).transpose(0, 1))
        return self.head.low(nn.functional.gelu(hidden)), hidden.mean(0)


class Literal(nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(head.coder.prototypes.detach())
        self.first, self.second = nn.ModuleList(), nn.ModuleList()
        for k in range(len(self.prototypes)):
            for layers, weight, bias in (
                (self.first, head.coder.layers.weight[k], head.coder.layers.bias[k, 0]),
                (self.second, head.low.weight[k], head.low.bias),
            ):
                layer = nn.Linear(*weight.shape, device="meta")
                layer.weight, layer.bias = nn.Parameter(weight.detach().T.contiguous()), nn.Parameter(bias.detach().clone())
                layers.append(layer)

    def branches(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        coded = residuals(tokens[:, 1:], self.prototypes)
        hidden = [layer(coded[:, k]) for k, layer in enumerate(self.first)]
        low = [layer(nn.functional.gelu(each)) for layer, each in zip(self.second, hidden, strict=True)]
        return torch.stack(low).mean(0), torch.stack(hidden).mean(0)


FORMS = {"literal": Literal, "half literal": HalfLiteral, "ours": lambda head: head}


def head_and_tokens(device: str) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    head = create("heads", "crt", features=CHANNELS).to(device)
    return head, torch.randn(BATCH, 1 + POSITIONS, CHANNELS, device=device, requires_grad=True)


def both_ways(form: Any, tokens: Tensor, precision: str) -> Any:
    half = precision == "bf16"

    def step() -> None:
        for parameter in (tokens, *form.parameters()):
            parameter.grad = None
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=half):
            first, second = form.branches(tokens)
        (first.float().square().sum() + second.float().square().sum()).backward()

    return step


def resident(key: str) -> float:
    """Return the present (`VmRSS`) or peak (`VmHWM`) memory of this process in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) / 1024


def peak(name: str, device: str, precision: str) -> float:
    """Return the extra memory of one forward and backward pass in MiB."""
    if device == "cpu":
        words = [sys.executable, __file__, "--peak-of", name, "--precision", precision]
        return float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    head, tokens = head_and_tokens(device)
    form = FORMS[name](head)
    step = both_ways(form, tokens, precision)
    step()  # the workspaces of the libraries are not counted
    for parameter in (tokens, *form.parameters()):
        parameter.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def peak_of_this_process(name: str, precision: str) -> None:
    head, tokens = head_and_tokens("cpu")
    form = FORMS[name](head)
    if name == "literal":
        del head  # its weights were copied
    little = torch.randn(2, 3, 4, requires_grad=True)
    (little @ little.transpose(1, 2)).sum().backward()  # loads the libraries
    before = resident("VmRSS")
    both_ways(form, tokens, precision)()
    print(resident("VmHWM") - before)


def heads(device: str, precision: str, rounds: int, repeats: int) -> dict[str, Any]:
    head, tokens = head_and_tokens(device)
    forms = {name: make(head) for name, make in FORMS.items()}
    if precision == "float32":  # they compute the same
        with torch.no_grad():
            for other in forms.values():
                for ours, theirs in zip(head.branches(tokens), other.branches(tokens), strict=True):
                    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    steps = {name: both_ways(form, tokens, precision) for name, form in forms.items()}
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, device, repeats))
    del forms, steps, head, tokens
    result = {name: {"ms": statistics.median(times[name]), "peak_mib": peak(name, device, precision)} for name in FORMS}
    print(f"\nhead, forward and backward, {precision} on {torch.cuda.get_device_name() if device == 'cuda' else 'cpu'}")
    for name, row in result.items():
        slower, larger = row["ms"] / result["ours"]["ms"], row["peak_mib"] / result["ours"]["peak_mib"]
        print(f"  {name:<13} {row['ms']:9.2f} ms  {slower:5.2f}x   {row['peak_mib']:8.0f} MiB  {larger:5.2f}x")
    return result


def whole_steps(backbone: str, head: str, rounds: int, repeats: int, *, compiled: bool) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = 227 if backbone.startswith("mit") else 224  # the paper's 8 x 8 positions, of 512 channels in MiT
    text = f"timm(name='{backbone}'{', image_size=224' if backbone.startswith(('vit', 'deit')) else ''})"
    if backbone.startswith("mit"):
        text = f"mit(name='{backbone.removeprefix('mit_')}')"
    labels = torch.arange(BATCH, device=device) // 5
    images = torch.randn(BATCH, 3, size, size, device=device)
    loss = "multi_similarity(kept_only=False)"
    steps: dict[str, Any] = {}
    parameters: dict[str, int] = {}
    for name, objective_text, head_text in (("linear, MS", "plain", "linear(dim=128)"), ("crt", "crt", head)):
        torch.manual_seed(0)
        network = create("backbones", text)
        model = Model(network, create("heads", head_text, features=network.channels))
        objective = create("objectives", objective_text, loss=loss, num_classes=16, dim=model.dim, branches=model.dims)
        if hasattr(objective, "meet"):
            objective.meet(model)
        if device == "cuda":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model, objective = model.to(device).train(), objective.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, fused=device == "cuda")
        parameters[name] = sum(parameter.numel() for parameter in model.parameters())
        run: Any = torch.compile(model, dynamic=False) if compiled else model
        minimise: Any = capture.compiled(objective, device) if compiled else objective

        def step(run: Any = run, minimise: Any = minimise, optimizer: Any = optimizer) -> None:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                embeddings, tokens, branches = run(images)
            output = Output(embeddings.float(), tokens, images, tuple(branch.float() for branch in branches))
            total = torch.stack(list(minimise(output, labels).values())).sum()
            optimizer.zero_grad()
            total.backward()
            optimizer.step()

        steps[name] = step
    for step in steps.values():
        for _ in range(5 if device == "cuda" else 1):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, device, repeats))
    result = {name: {"ms": statistics.median(times[name]), "parameters": parameters[name]} for name in steps}
    print(f"\ntraining step, {backbone}, batch {BATCH} on {device}{', compiled' if compiled else ''}, head `{head}`")
    for name, row in result.items():
        ratio = row["ms"] / result["linear, MS"]["ms"]
        print(f"  {name:<13} {row['ms']:9.2f} ms  {ratio:6.3f}x   {row['parameters'] / 1e6:7.1f} M parameters")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--part", default="", choices=["", "head", "step"], help="head or step (default: head on a CPU, both on a GPU)")
    parser.add_argument(
        "--backbones", default="mit_b2,vit_small_patch14_dinov2,resnet50", help="timm names or mit_b0 to mit_b5, separated by commas"
    )
    parser.add_argument("--head", default="crt", help='such as "crt(reduce=512)"')
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=0, help="steps per round (default: 30 on a GPU, 1 on a CPU)")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--peak-of", default="", choices=["", *FORMS], help=argparse.SUPPRESS)
    parser.add_argument("--precision", default="", choices=["", "float32", "bf16"])
    options = parser.parse_args()
    if options.peak_of:
        return peak_of_this_process(options.peak_of, options.precision)
    cuda = options.device == "cuda"
    repeats = options.repeats or (30 if cuda else 1)
    results: dict[str, Any] = {}
    if options.part != "step":
        for precision in [options.precision] if options.precision else ["float32", "bf16"] if cuda else ["float32"]:
            results[f"head, {precision}"] = heads(options.device, precision, options.rounds, repeats)
    if options.part == "step" or (cuda and not options.part):
        for backbone in options.backbones.split(","):
            results[backbone] = whole_steps(backbone, options.head, options.rounds, repeats, compiled=options.compile)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))
    return None


if __name__ == "__main__":
    main()
