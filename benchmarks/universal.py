"""Cost of adapters in training and in embedding, relative to the plain network.

    python benchmarks/universal.py --device cuda                            # ViT-S/16, batch 720, bf16
    python benchmarks/universal.py --device cuda --compile --only full,puma
    python benchmarks/universal.py --device cpu --network test_vit --image-size 32 --batch 64

A step is forward, loss (CurricularFace), backward, clipping and AdamW on one batch that is already on the device. All cases alternate in
one process, and the ratio is that of the medians over rounds. Memory is the peak of a step with one case on the device, including weights
and moments; on a CPU, it is the memory that the graph saves for the backward pass.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from pathlib import Path

import torch
from _timing import milliseconds

from unimetric.adapters import _vit
from unimetric.config import load
from unimetric.objectives import Output
from unimetric.runs.model import Model, build_model
from unimetric.training.build import build_objective, build_optimizer

CASES = {
    "full": "",
    "linear probe": "linear_probe",
    "vpt": "vpt",
    "lora": "lora",
    "adaptformer": "adaptformer",
    "static adapter": "stochastic_adapter(keep=1.0)",
    "stochastic adapter": "stochastic_adapter",
    "puma": "puma",
}
CLASSES = 400


class Case:
    """A model with its objective and optimizer."""

    def __init__(self, adapter: str, options: argparse.Namespace, images: torch.Tensor) -> None:
        size = f", image_size={options.image_size}" if options.image_size else ""
        config = load(
            backbone=f"timm(name='{options.network}'{size})",
            adapter=adapter,
            head="linear(dim=128)",
            loss="curricularface(scale=32.0, margin=0.3, per_class_t=True)",
            optimizer="adamw(lr=1e-4, weight_decay=1e-4)",
            batch_size=len(images),
        )
        self.device, self.images = torch.device(options.device), images
        self.labels = torch.arange(len(images), device=self.device) % CLASSES
        self.bare: Model = build_model(config).to(self.device)
        self.objective = build_objective(config, self.bare, num_classes=CLASSES).to(self.device)
        self.optimizer = build_optimizer(config, self.bare, self.objective)
        self.model = torch.compile(self.bare, dynamic=False) if options.compile else self.bare
        self.trained = sum(parameter.numel() for parameter in self.bare.parameters() if parameter.requires_grad)

    def loss(self) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            embeddings, tokens, branches = self.model(self.images)
        terms = self.objective(Output(embeddings.float(), tokens, self.images, tuple(b.float() for b in branches)), self.labels)
        return torch.stack(list(terms.values())).sum()

    def step(self) -> None:
        self.model.train()
        loss = self.loss()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_value_([p for p in self.bare.parameters() if p.grad is not None], 1.0)
        self.optimizer.step()

    def embed(self) -> None:
        self.model.eval()
        with torch.inference_mode(), torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda"):
            self.model(self.images)

    def memory(self) -> float:
        """Return the memory of a step in MiB, as defined at the top of the file."""
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            return torch.cuda.max_memory_allocated() / 2**20
        weights, held = {parameter.numel() for parameter in self.bare.parameters()}, {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.numel() not in weights:
                held[tensor.untyped_storage().data_ptr()] = (tensor.untyped_storage().nbytes(), tensor)
            return tensor

        self.model.train()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            self.loss()
        return sum(size for size, _ in held.values()) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", default="vit_small_patch16_224")
    parser.add_argument("--image-size", type=int, default=0, help="image size in pixels; 0 for that of the network")
    parser.add_argument("--batch", type=int, default=720)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="steps per round")
    parser.add_argument("--compile", action="store_true", help="compile the model in every case")
    parser.add_argument("--plain", action="store_true", help="without the fused LayerNorm of frozen transformers")
    parser.add_argument("--only", default="", help="cases, separated by commas; `full` is always included")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    options = parser.parse_args()
    _vit.FUSE = not options.plain
    torch._dynamo.config.recompile_limit = 64  # every case recompiles the same forward, for training and for embedding
    device = torch.device(options.device)
    chosen = [name.strip() for name in options.only.split(",") if name.strip()]
    cases = {name: adapter for name, adapter in CASES.items() if not chosen or name in chosen or name == "full"}
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    images = torch.randn(options.batch, 3, options.image_size or 224, options.image_size or 224, device=device)

    numbers: dict[str, dict[str, float]] = {}
    for name, adapter in cases.items():  # one case at a time on the device
        case = Case(adapter, options, images)
        numbers[name] = {"trained": case.trained, "memory_mib": case.memory()}
        del case
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()

    built = {name: Case(adapter, options, images) for name, adapter in cases.items()}
    times: dict[str, dict[str, list[float]]] = {name: {"step": [], "embed": []} for name in built}
    for kind in ("step", "embed"):
        for case in built.values():
            milliseconds(getattr(case, kind), device, 3)
        for _ in range(options.rounds):  # alternate
            for name, case in built.items():
                times[name][kind].append(milliseconds(getattr(case, kind), device, options.steps))
    for name in built:
        numbers[name] |= {f"{kind}_ms": statistics.median(values) for kind, values in times[name].items()}

    full = numbers["full"]
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"\n{options.network}, batch {options.batch}, {where}" + (", compiled" if options.compile else ""))
    print(f"{'':<20}{'trained':>12}{'step ms':>10}{'ratio':>7}{'MiB':>10}{'ratio':>7}{'embed ms':>10}{'ratio':>7}")
    for name, row in numbers.items():
        step, memory, embed = (row[key] / full[key] for key in ("step_ms", "memory_mib", "embed_ms"))
        print(
            f"{name:<20}{row['trained']:>12,}{row['step_ms']:>10.2f}{step:>7.2f}{row['memory_mib']:>10,.0f}{memory:>7.2f}"
            f"{row['embed_ms']:>10.2f}{embed:>7.2f}"
        )
    if options.out:
        options.out.write_text(json.dumps(numbers, indent=1))


if __name__ == "__main__":
    main()
