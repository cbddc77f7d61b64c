"""The training loop, in sight from top to bottom."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unimetric.config import RunConfig, better, score
from unimetric.errors import Interrupted
from unimetric.files import write_text
from unimetric.images.loading import View
from unimetric.objectives import Output
from unimetric.runs.device import open_fabric, peak_memory
from unimetric.runs.display import Display
from unimetric.runs.folder import check_same_run, lock_run_folder, read_done
from unimetric.runs.weights import write_tensors
from unimetric.samplers import occurrence, rank_slice
from unimetric.training.checkpoint import restore, save
from unimetric.training.distributed import gathered
from unimetric.training.log import Log, check_finite_loss, format_log_line, open_logger, variant_lines
from unimetric.training.signals import Signals
from unimetric.training.state import build_training_state, count_per_dataset, embed_rows, evaluate_splits


def train(config: RunConfig, folder: str | Path, *, quiet: bool = False) -> dict[str, Any]:
    """Train a model, or resume an interrupted run.

    Args:
        config: Settings of the run; see `unimetric.load`.
        folder: Run folder. It stores `config.toml`, `metrics.jsonl`, `checkpoint.safetensors` (to resume
            from), `model.safetensors` (the best epoch), `environment.json`, and `done` when the run is
            finished.
        quiet: Whether all output is suppressed.

    Returns:
        The line of `metrics.jsonl` of the best epoch. If the head has variants, such as the weightings of
        `diva`, `variants` holds the best epoch of each and its metric values.
    """
    folder = Path(folder)
    check_same_run(config, folder)
    if (folder / "done").exists():
        return read_done(folder)
    fabric = open_fabric(config, loggers=open_logger(config, folder), several=True)
    fabric.launch()
    torch.backends.cudnn.benchmark = fabric.device.type == "cuda"  # shapes are static: the fastest algorithm is searched for once
    chief = fabric.global_rank == 0
    checkpoint, precision = folder / "checkpoint.safetensors", fabric.strategy.precision
    progress: dict[str, Any] = {"epoch": 0, "step": 0, "loss": 0.0, "best": None}

    with Display(quiet=quiet or not chief) as display, Signals() as signals, ExitStack() as held:
        stage = build_training_state(config, fabric, display)
        model, objective, optimizer, sampler = stage.model, stage.objective, stage.optimizer, stage.sampler
        if chief:
            held.enter_context(lock_run_folder(config, folder, device=fabric.device))
            write_text(folder / "skipped.txt", "".join(f"{path}: {reason}\n" for path, reason in stage.skipped))
        for path, reason in stage.skipped:
            display.line(f"skipped {path}: {reason}")
        going_on = checkpoint.exists()
        if sampler.needs_embeddings:  # a restored memory needs the room, a new one the embeddings
            room = torch.zeros(len(stage.labels), stage.bare.dim, device=fabric.device)
            sampler.fill(room if going_on else embed_rows(stage, stage.split.train, config, fabric, display))
        if going_on:
            progress = restore(checkpoint, parts=stage.parts, optimizers=stage.optimizers, precision=precision)
            display.line(f"going on after epoch {progress['epoch']}, step {progress['step']}")
        log = Log(folder, fabric, upto=progress["epoch"] if going_on else -1)
        if not going_on:
            display.line(
                f"run {config.run_id}: {len(stage.labels)} pictures of {stage.labels.max() + 1} classes to train on, "
                f"{len(stage.split.test)} of {len(np.unique(stage.table.labels[stage.split.test]))} others to test on ({fabric.device})"
            )
            line: dict[str, Any] = {"epoch": 0}
            for name, (pictures, classes) in count_per_dataset(stage.table, stage.split).items():
                display.line(f"  {name}: {pictures:,} pictures of {classes:,} classes")
                line |= {f"pictures of {name}": pictures, f"classes of {name}": classes}
            if config.evaluate_every:
                line |= evaluate_splits(stage, config, fabric, display)
                display.line(format_log_line(line, config.epochs))
            if len(line) > 1:
                log.write(line)

        def save_checkpoint(epoch: int, step: int, loss: float) -> None:
            progress.update(epoch=epoch, step=step, loss=loss)
            if chief:
                save(checkpoint, parts=stage.parts, optimizers=stage.optimizers, progress=progress, precision=precision)
            fabric.barrier()

        steps, copies = len(sampler), occurrence(stage.split.train)
        most = copies.max() + 1
        chosen_on = "validation" if len(stage.split.validation) else "test"
        # Written down for the report, which cannot ask the metrics: it imports none.
        lower = {"lower_is_better": texts} if (texts := [text for text in config.metrics if better(text) == "lower"]) else {}
        variants = progress.setdefault("variants", {})  # checkpoints of earlier versions have none
        learning = [parameter for parameter in stage.bare.backbone.parameters() if parameter.requires_grad]
        for epoch in range(progress["epoch"], config.epochs):
            first, sampler.epoch = progress["step"], epoch
            total = torch.tensor(progress["loss"], device=fabric.device)
            drawn: dict[int, np.ndarray] = {}  # and not yet trained on: a loader draws ahead
            model.train()
            objective.train()
            warming = epoch < config.warmup_epochs
            for parameter in learning:  # several ranks wait for the gradient of each, which is dropped below
                parameter.requires_grad_(not warming or fabric.world_size > 1)

            def requests(epoch: int = epoch, first: int = first, drawn: dict = drawn) -> Iterator[tuple[np.ndarray, View]]:
                for step in range(first, steps):
                    drawn[step] = sampler.batch(step)
                    # A picture that stands in the split or in a batch again is looked at anew.
                    again = copies[drawn[step]] + most * occurrence(drawn[step])
                    rows, again = (rank_slice(part, fabric.global_rank, fabric.world_size) for part in (drawn[step], again))
                    for view in range(stage.views):
                        look = View(stage.recipe, seed=config.seed, epoch=epoch, view=view + stage.views * again)
                        yield stage.split.train[rows], look

            begun, step, terms = time.perf_counter(), first, {}
            looks = zip(*[stage.pictures.load(requests())] * stage.views, strict=True)  # one iterator: a step's views follow each other
            for step, (images, *views) in enumerate(looks, first):
                rows = drawn.pop(step)
                labels = torch.from_numpy(stage.labels[rows])
                if fabric.device.type == "cuda":
                    labels = labels.pin_memory()
                labels = labels.to(fabric.device, non_blocking=True)
                for group, rate in zip(optimizer.param_groups, stage.rates, strict=True):
                    group["lr"] = rate * stage.factor(epoch + step / steps)

                if hasattr(objective, "begin"):
                    objective.begin()
                embeddings, tokens, branches = model(images)
                output = Output(embeddings.float(), tokens, images, tuple(branch.float() for branch in branches), tuple(views))
                output = gathered(fabric, output, getattr(objective, "reads", ()))
                terms = stage.minimize(output, labels)
                loss: Tensor = torch.stack(list(terms.values())).sum()
                optimizer.zero_grad()
                fabric.backward(loss)
                for parameter in learning if warming else ():
                    parameter.grad = None
                if config.clip_norm:
                    fabric.clip_gradients(model, optimizer, max_norm=config.clip_norm, error_if_nonfinite=False)  # `finite` says it better
                if config.clip_value:
                    fabric.clip_gradients(model, optimizer, clip_val=config.clip_value)
                optimizer.step()
                if hasattr(objective, "stepped"):
                    with torch.no_grad():
                        objective.stepped()
                if sampler.needs_embeddings:
                    sampler.refresh(rows, output.embeddings.detach())
                total += loss.detach()

                if display.due():
                    mean = check_finite_loss(total.item(), epoch, step, folder) / (step + 1)
                    speed = (step + 1 - first) * config.batch_size / (time.perf_counter() - begun)
                    best = progress["best"]
                    note = f"loss {mean:.4f}  {speed:,.0f} pictures/s" + (f"  best {best['value']:.4f}" if best else "")
                    display.step("training", epoch * steps + step + 1, config.epochs * steps, note)
                if step + 1 < steps and signals.stop_requested(fabric, step + 1):
                    save_checkpoint(epoch, step + 1, check_finite_loss(total.item(), epoch, step, folder))
                    raise Interrupted(f"saved in epoch {epoch + 1} after step {step + 1}; run the same command to go on")

            mean = check_finite_loss(total.item(), epoch, step, folder) / steps
            seconds = time.perf_counter() - begun
            line = {
                "epoch": epoch + 1,
                "loss": mean,
                **({f"term/{name}": term.item() for name, term in terms.items()} if len(terms) > 1 else {}),
                "lr": optimizer.param_groups[0]["lr"],
                "seconds": round(seconds, 3),
                "pictures_per_second": round((steps - first) * config.batch_size / seconds, 1),
                "peak_memory_gib": peak_memory(fabric.device),
            }
            last = epoch + 1 == config.epochs
            if last or (config.evaluate_every and (epoch + 1) % config.evaluate_every == 0):
                line |= evaluate_splits(stage, config, fabric, display) | {"peak_memory_gib": peak_memory(fabric.device)}
                choosing = config.metrics[: config.chosen_by]
                value = score(choosing, line, chosen_on)
                if progress["best"] is None or value > progress["best"]["value"]:
                    progress["best"] = {"value": value, "line": line | {"chosen_on": chosen_on} | lower}
                    if chief:
                        notes = {"metrics": line} | ({"backbone": config.backbone} if config.adapter else {})
                        write_tensors(folder / "model.safetensors", stage.trained.state_dict(), notes)
                for name, own in variant_lines(line).items():
                    if name not in variants or score(choosing, own, chosen_on) > score(choosing, variants[name], chosen_on):
                        variants[name] = own
            log.write(line)
            display.line(format_log_line(line, config.epochs))
            progress["step"], progress["loss"] = 0, 0.0
            stop = signals.stop_requested(fabric)
            if last or (epoch + 1) % config.checkpoint_every == 0 or stop:
                save_checkpoint(epoch + 1, 0, 0.0)
            if stop and not last:
                raise Interrupted(f"saved after epoch {epoch + 1}; run the same command to go on")
        for logger in fabric.loggers:
            logger.finalize("success")
        result = progress["best"]["line"] | ({"variants": variants} if variants else {})
        if chief:
            write_text(folder / "done", json.dumps(result))
        return result
