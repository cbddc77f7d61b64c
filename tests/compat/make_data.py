"""Write `tests/compat/data/` with the code of commit 2e3eac6, the last one before the code was moved.

    mkdir /tmp/old && git archive 2e3eac6 src configs | tar x -C /tmp/old
    cd tests/compat/data && PYTHONPATH=/tmp/old/src OMP_NUM_THREADS=1 python ../make_data.py /tmp/old/configs

It imports modules of that commit, so it does not run with the present code. The data is committed and
must not be made again: it shows that files of that commit still work.
"""

from __future__ import annotations

import inspect
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from unimetric.bench.grid import read_any, read_grid
from unimetric.bench.study import study
from unimetric.engine.checkpoint import read_tensors
from unimetric.engine.evaluate import evaluate
from unimetric.engine.signals import Signals
from unimetric.engine.train import train
from unimetric.pack import Pack, write

from unimetric.config import RunConfig, load
from unimetric.errors import Interrupted, UnimetricError
from unimetric.report import report
from unimetric.spec import create, find, kinds, names, signature

RUN = {
    "dataset": "pack(path='letters.pack')",
    "transform": "glyphs(size=32)",
    "backbone": "small(channels=8)",
    "head": "linear(dim=8)",
    "optimizer": "adam(lr=1e-3)",
    "metrics": ["recall(k=1)", "map_at_r", "nmi", "pi_ratio", "spectral_decay"],
    "batch_size": 8,
    "epochs": 3,
    "workers": 0,
    "logger": "none",
    "device": "cpu",
}
#: Interrupted runs: the components whose state a checkpoint holds.
INTERRUPTED = {
    "margin": {"loss": "margin(beta=1.2, learn_beta=True)", "miner": "distance_weighted", "optimizer": "adam(lr=1e-3)"},
    "sgd": {"loss": "multi_similarity", "optimizer": "sgd(lr=1e-2, momentum=0.9)", "schedule": "cosine", "clip_norm": 1.0},
    "proxies": {"loss": "proxy_anchor", "optimizer": "adamw(lr=1e-3)", "warmup_epochs": 1, "evaluate_every": 3},
    "memory": {"objective": "cross_batch(size=16)", "loss": "contrastive", "sampler": "class_random"},
    "bank": {"loss": "triplet", "miner": "semihard", "sampler": "distance_matching"},
    "diva": {"objective": "diva(hidden=16)", "head": "diva(dim=8)"},
    "s2sd": {"objective": "s2sd(dims=[16])"},
    "mixup": {"objective": "mixup", "loss": "multi_similarity"},
    "prior": {"objective": "uniform_prior(hidden=8, every=2)", "loss": "margin"},
    "crt": {"objective": "crt", "head": "crt(dim=8, hidden=8, prototypes=4, low_prototypes=3)", "loss": "multi_similarity"},
}
STUDY = """
dataset = "pack(path='letters.pack')"
transform = "glyphs(size=32)"
backbone = "small(channels=8)"
head = "linear(dim=8)"
optimizer = "adam(lr=1e-3)"
metrics = ["recall(k=1)", "map_at_r", "spectral_decay"]
batch_size = 8
epochs = 2
workers = 0
logger = "none"
device = "cpu"
seed = [0, 1]

[[method]]
name = "Margin"
loss = "margin(beta=1.2)"
"""
#: Components of which the names and shapes of the state are kept, with a tiny transformer for adapters.
EXTRA = {"losses": {"num_classes": 5, "dim": 8}, "heads": {"features": 16}}


def pack() -> None:
    table = create("datasets", "glyphs(blocks='armenian')")
    kept = np.zeros(len(table.labels), dtype=bool)
    for train_rows in (True, False):
        for label in np.unique(table.labels[table.train == train_rows])[:6]:
            kept[np.flatnonzero(table.labels == label)[:4]] = True
    write("letters.pack", table.take(kept), short_side=None, encoding="png")


def stop_after(count: int) -> object:
    """A stop signal after some steps, in place of `Signals.agreed`."""
    asked = iter(range(1, 1000))

    def agreed(self: Signals, fabric: object, step: int = 0) -> bool:
        return next(asked) == count

    return agreed


def interrupted(name: str) -> None:
    folder, patient = Path("runs") / name, Signals.agreed
    settings = {"name": None} | RUN | INTERRUPTED[name]
    del settings["name"]
    config = load(**settings)
    Signals.agreed = stop_after(5)  # steps 1 and 2, the end of epoch 1, and steps 1 and 2 of epoch 2
    try:
        train(config, folder, quiet=True)
    except Interrupted as stopped:
        print(name, stopped)
    Signals.agreed = patient


def numbers_of(name: str) -> dict:
    """The result of resuming a copy of an interrupted run."""
    copy = Path("resumed") / name
    shutil.copytree(Path("runs") / name, copy)
    best = train(load(copy / "config.toml"), copy, quiet=True)
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    tensors = read_tensors(copy / "checkpoint.safetensors")[0]
    sums = {key: [value.double().sum().item(), value.double().abs().sum().item()] for key, value in tensors.items() if key != "random/cpu"}
    return {"run_id": load(copy / "config.toml").run_id, "best": steady(best), "lines": [steady(line) for line in lines], "sums": sums}


def settings_of(config: RunConfig) -> dict:
    """What a run sets, without the defaults."""
    plain = asdict(RunConfig())
    return {key: value for key, value in asdict(config).items() if value != plain[key]}


def shipped(configs: Path) -> list:
    """Settings and id of every run in `configs/`, and of the first and the last run of every study."""
    runs = [load(path) for path in sorted(configs.glob("*.toml"))]
    for path in sorted(configs.glob("grids/*.toml")):
        grid = read_any(path)
        runs += [grid[0].config, grid[-1].config]
    return [[settings_of(config), config.run_id] for config in runs]


def steady(line: dict) -> dict:
    """A log line without the times."""
    return {key: value for key, value in line.items() if key not in ("seconds", "pictures_per_second")}


def signatures() -> dict:
    """Arguments and defaults of every component, and names and shapes of its state."""
    found: dict = {}
    for kind in kinds():
        for name in names(kind):
            parameters = signature(find(kind, name)).parameters.values()
            found[f"{kind}/{name}"] = {
                each.name: "required" if each.default is inspect.Parameter.empty else repr(each.default) for each in parameters
            }
    return found


def states() -> dict:
    found: dict = {}

    def note(key: str, module: torch.nn.Module) -> None:
        found[key] = {name: list(tensor.shape) for name, tensor in module.state_dict().items()}

    for kind, offered in EXTRA.items():
        for name in names(kind):
            text = "crt(prototypes=4)" if (kind, name) == ("heads", "crt") else name
            try:
                note(f"{kind}/{text}", create(kind, text, **offered))
            except UnimetricError as error:
                print("no state of", kind, name, error)
    for text in ("small", "googlenet", "bn_inception", "timm(name='test_vit', image_size=32)", "timm(name='test_resnet')"):
        try:
            note(f"backbones/{text}", create("backbones", text))
        except UnimetricError as error:
            print("no state of", text, error)
    for name in names("adapters"):
        backbone = create("backbones", "timm(name='test_vit', image_size=32)")
        note(f"adapters/{name}", find("adapters", name)(backbone))
    return found


def by_line(found: dict) -> str:
    """JSON with one entry per line."""
    parts = []
    for key, values in found.items():
        if isinstance(values, str):
            parts.append(f"{json.dumps(key)}: {json.dumps(values)}")
        elif isinstance(values, list):
            parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(json.dumps(value) for value in values) + "\n]")
        else:
            parts.append(
                f"{json.dumps(key)}: {{\n"
                + ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in values.items())
                + "\n}"
            )
    return "{\n" + ",\n".join(parts) + "\n}\n"


def main() -> None:
    configs = Path(sys.argv[1])
    torch.set_num_threads(1)
    pack()
    opened = Pack.open("letters.pack")
    pictures = {"labels": opened.table.labels.tolist(), "train": opened.table.train.tolist(), "paths": list(opened.table.paths)}
    pictures |= {"class_names": list(opened.table.class_names), "sums": [int(opened.picture(row).sum()) for row in range(len(opened))]}
    train(load(**RUN | {"loss": "margin(beta=1.2)"}), "runs/finished", quiet=True)
    for name in INTERRUPTED:
        interrupted(name)
    Path("study.toml").write_text(STUDY.lstrip())
    study(read_grid("study.toml"), "study", quiet=True)
    shutil.rmtree("study/logs")
    report([Path("study")], "report.html")
    text = "recall(k=1); recall(k=2); map_at_r; nmi; f1; pi_ratio; spectral_decay; uniformity; mrr"
    numbers = {
        "pack": pictures,
        "evaluate": {part: evaluate("runs/finished", metrics=text.split("; "), part=part, level=0.95) for part in ("test", "train")},
        "rerank": evaluate("runs/finished", rerank=True),
        "resumed": {name: numbers_of(name) for name in INTERRUPTED},
        "study": {
            run.config.run_id: steady(json.loads(Path("study", run.config.run_id, "done").read_text())) for run in read_grid("study.toml")
        },
        "report": Path("report.csv").read_text(),
        "run_ids": shipped(configs),
    }
    Path("numbers.json").write_text(by_line(numbers))
    Path("components.json").write_text(by_line({"signatures": signatures(), "states": states()}))
    for left in [*Path().glob("report.*"), Path("resumed")]:
        shutil.rmtree(left) if left.is_dir() else left.unlink()


if __name__ == "__main__":
    main()
