"""The training loop: one story, from top to bottom."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unimetric.config import RunConfig
from unimetric.errors import Interrupted, UnimetricError
from unimetric.kinds import Output
from unimetric.runs.device import open_fabric, peak_memory
from unimetric.runs.display import Display
from unimetric.runs.folder import check_same_run, is_finished, lock_run_folder, read_done
from unimetric.training.batches import Batch, batches
from unimetric.training.checkpoint import check_data, resume, save_checkpoint, write_best
from unimetric.training.distributed import average_gradients, gather, local_gradients
from unimetric.training.gains import log_watched, measure_gains
from unimetric.training.log import Log, closed_loggers, finish, format_log_line, log_starting_point, open_logger, write_skipped
from unimetric.training.progress import Meter
from unimetric.training.ranks import RankWatch
from unimetric.training.signals import Signals
from unimetric.training.state import TrainingState, build_training_state, evaluate_splits


def train(config: RunConfig, folder: str | Path, *, quiet: bool = False) -> dict[str, Any]:
    """Train a model, or resume an interrupted run.

    Args:
        config: Settings of the run; see `unimetric.load`.
        folder: Run folder. It stores `config.toml`, `metrics.jsonl`, `checkpoint.safetensors` (to resume
            from), `model.safetensors` (the best epoch), `environment.json`, and `done` when the run is
            finished.
        quiet: Whether all output is suppressed.

    Returns:
        The line of `metrics.jsonl` of the best epoch, which may be 0, the untrained model. `raw` holds the
        metric values of the backbone's own features, `gain` the gains over them, with intervals, and `warning` a
        sentence if training did not help.
        If the head has variants, such as the weightings of `diva`, `variants` holds the best epoch of each
        and its metric values.
    """
    if not isinstance(config, RunConfig):
        raise UnimetricError(f"`config` must be the settings of a run, got {config!r}", "use `unimetric.load(...)`, which reads a config")
    folder = Path(folder)
    check_same_run(config, folder)
    if is_finished(config, folder):
        best = read_done(folder)
        if not quiet:
            print(f"{folder}: this run is finished, so it does not read the images again; use another --out to train on changed images")
        return best

    # --- Devices ----------------------------------------------------------------------------------
    fabric = open_fabric(config, loggers=open_logger(config, folder), several=True)
    with (
        RankWatch(fabric) as main,
        closed_loggers(fabric),
        Display(quiet=quiet or not main) as display,
        Signals() as signals,
        ExitStack() as held,
    ):
        # --- Build everything a step needs; reject what cannot run before an image is read ------------
        state = build_training_state(config, fabric, display)
        check_data(state, folder)
        if main:
            held.enter_context(lock_run_folder(config, folder, device=fabric.device))
            write_skipped(state, folder)
            held.enter_context(state.writer)

        # --- Resume, or evaluate the starting point -----------------------------------------------------
        progress = resume(state, folder)
        log = Log(folder, fabric, upto=progress.epoch if progress.resumed else -1)
        if not progress.resumed:
            line = log_starting_point(state, log)
            progress.raw, progress.untrained = line.get("raw", {}), state.untrained | log_watched(state)
            if progress.raw and progress.record(line, state) and main:  # training may make a model worse
                write_best(state, folder, line)

        for epoch in range(progress.epoch, config.epochs):
            # --- Steps: the display reads the loss once per second, nothing else synchronizes -------------
            state.begin_epoch(epoch)
            meter = Meter(state, progress, epoch, folder)
            for step, batch in batches(state, epoch, start=progress.step):
                meter.add(*take_step(state, batch, epoch + step / state.steps))
                if display.due():
                    display.step("training", epoch * state.steps + step + 1, config.epochs * state.steps, meter.note())
                if step + 1 < state.steps and signals.stop_requested(fabric, after_step=True):
                    save_checkpoint(state, folder, progress.at(epoch, step + 1, meter.total()))
                    raise Interrupted(f"saved in epoch {epoch + 1} after step {step + 1}; run the same command to resume")

            # --- Evaluate, and save the weights of the best epoch -------------------------------------------
            line = meter.line()  # raises an error if the loss is not finite
            last = epoch + 1 == config.epochs
            if last or (config.evaluate_every and (epoch + 1) % config.evaluate_every == 0):
                line |= evaluate_splits(state) | {"peak_memory_gib": peak_memory(fabric.device)}
                if progress.record(line, state) and main:
                    write_best(state, folder, line)
            log.write(line)
            display.line(format_log_line(line, config.epochs))

            # --- Checkpoint; stop if a signal arrived ---------------------------------------------------------
            progress.at(epoch + 1, 0, 0.0)
            stop = signals.stop_requested(fabric)
            if last or stop or (epoch + 1) % config.checkpoint_every == 0:
                save_checkpoint(state, folder, progress)
            if stop and not last:
                raise Interrupted(f"saved after epoch {epoch + 1}; run the same command to resume")

        # --- Done ---------------------------------------------------------------------------------------
        return finish(fabric, folder, progress.result(state, measure_gains(state, folder, progress)))


def take_step(state: TrainingState, batch: Batch, now: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Update the model with one batch.

    Args:
        state: State of the run.
        batch: Images and labels.
        now: Number of epochs so far, with the fraction of the current one.

    Returns:
        The loss and its terms. They stay on the device, so nothing synchronizes.
    """
    objective, optimizer, fabric = state.objective, state.optimizer, state.fabric
    state.set_rates(now)
    objective.begin()
    with local_gradients(fabric, state.model):
        embeddings, tokens, branches = objective.forward_pass(state.model, batch.images)
        output = Output(embeddings.float(), tokens, batch.images, tuple(branch.float() for branch in branches), batch.views)
        output = gather(fabric, output, objective.reads)
        terms = state.minimize(output, batch.labels)
        loss = torch.stack(list(terms.values())).sum()
        optimizer.zero_grad()
        objective.backward_pass(loss, fabric.backward)
    average_gradients(fabric, state.bare.parameters())
    state.limit_gradients()
    optimizer.step()
    with torch.no_grad():
        objective.stepped()
    state.sampler.refresh(batch.rows, output.embeddings.detach())
    # Losses of other packages may skip rows that are not finite. Adding 0 times their sum makes the reported loss not finite,
    # without synchronizing.
    return loss.detach() + 0 * output.embeddings.detach().sum(), terms
