import json
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from unimetric.analysis.adapt import _check_global, adapt, draw_episodes, last_layers, tune_head
from unimetric.analysis.curves import t_interval
from unimetric.analysis.evaluate import evaluate
from unimetric.analysis.few_shot import adapt_study
from unimetric.analysis.shift import draw_report, shift_report
from unimetric.analysis.split import features_of, make_splits, write_splits
from unimetric.analysis.transfer import transfer
from unimetric.cli import app
from unimetric.config import from_settings, load
from unimetric.errors import UnimetricError
from unimetric.images import packing
from unimetric.runs.folder import study_runs
from unimetric.runs.model import Model
from unimetric.runs.rows import read_table
from unimetric.runs.weights import read_tensors, write_tensors
from unimetric.spec import create
from unimetric.training.loop import train


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A file of splits of the letters, and four runs: two losses on its easiest and its hardest split."""
    folder = tmp_path_factory.mktemp("shift")
    data = tmp_path_factory.mktemp("armenian") / "armenian.pack"  # enough classes for training to help on the others
    packing.write(data, create("datasets", "glyphs(blocks='armenian')"), short_side=None, encoding="raw")
    common = {
        "dataset": f"pack(path='{data}')",
        "transform": "glyphs(size=32)",
        "backbone": "small(channels=16)",
        "head": "linear(dim=8)",
        "batch_size": 32,
        "optimizer": "adam(lr=3e-3)",
        "epochs": 6,
        "evaluate_every": 6,
        "metrics": ["recall(k=1)", "r_precision"],
        "logger": "none",
        "device": "cpu",
    }
    table, features = features_of(from_settings(common), path=folder / "untrained.npz")
    write_splits(folder / "splits.json", make_splits(table, features, swaps=1, count=3, easier=2, removal=False, choose=2), {})
    for loss in ("margin", "triplet"):
        for number in (1, 2):
            text = f"ood(path='{folder}/splits.json', split={number})"
            train(from_settings(common | {"loss": loss, "split": text}), folder / f"{loss}_{number}", quiet=True)
    return folder


def test_learning_the_last_layer_alone():
    torch.manual_seed(0)
    head = create("heads", "mlp(dim=4, hidden=16, layers=2)", features=12)
    before = {key: value.clone() for key, value in head.state_dict().items()}
    centres = torch.randn(4, 12)
    labels = np.repeat(np.arange(4), 5)
    views = 0.5 * centres[labels] + torch.randn(3, 20, 12)
    tuned = tune_head(head, last_layers(head), views, labels, iterations=60, lr=1e-2, batch_size=8)
    assert all(torch.equal(value, before[key]) for key, value in head.state_dict().items())
    changed = {key for key, value in tuned.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"layers.2.weight", "layers.2.bias"}

    def separation(part):
        points = torch.nn.functional.normalize(part(views.flatten(0, 1)[:, None]), dim=1)
        same = torch.from_numpy(np.tile(labels, 3))
        same = same[:, None] == same[None]
        return ((points @ points.T)[same].mean() - (points @ points.T)[~same].mean()).item()

    assert separation(tuned) > separation(head) + 0.1
    again = tune_head(head, last_layers(head), views, labels, iterations=60, lr=1e-2, batch_size=8)
    assert all(torch.equal(value, again.state_dict()[key]) for key, value in tuned.state_dict().items())


def test_adapt_names_a_run_without_a_linear_layer(config, tmp_path):
    train(from_settings(asdict(config) | {"head": "identity", "epochs": 1}), tmp_path / "run", quiet=True)
    with pytest.raises(UnimetricError, match="run: `head = 'identity'` has no linear layer to tune") as caught:
        adapt(tmp_path / "run", shots=2)
    assert "`head=linear(dim=128)`" in caught.value.hint


def test_a_run_is_adapted(runs):
    result = adapt(runs / "margin_1", shots=4, episodes=3, iterations=40, lr=1e-2, looks=2, metrics=("recall(k=1)",))
    assert json.loads((runs / "margin_1" / "adapt_4_shots.json").read_text())["summary"].keys() == result["summary"].keys()
    assert len(result["episodes"]) == 3
    for line in result["episodes"]:
        assert line["gain/recall(k=1)"] == line["few/recall(k=1)"] - line["zero/recall(k=1)"]
    mean, half = result["summary"]["few/recall(k=1)"]
    assert mean == pytest.approx(np.mean([line["few/recall(k=1)"] for line in result["episodes"]])) and half >= 0
    same = adapt(runs / "margin_1", shots=4, episodes=3, iterations=40, lr=1e-2, looks=2, metrics=("recall(k=1)",))
    assert same == result
    # Nothing learnt is nothing gained.
    still = adapt(runs / "margin_1", shots=4, episodes=2, iterations=1, lr=0.0, looks=0, metrics=("recall(k=1)",))
    assert still["summary"]["gain/recall(k=1)"] == (0, 0)


def test_adapt_records_its_settings(runs):
    settings = {"shots": 3, "episodes": 2, "iterations": 3, "looks": 2, "metrics": ("recall(k=1)",), "seed": 7}
    result = adapt(runs / "margin_1", **settings)
    stored = json.loads((runs / "margin_1" / "adapt_3_shots.json").read_text())
    assert (stored["epoch"], stored["with_replacement"], stored["head"]) == ("last", True, "linear(dim=8)")
    assert result["tuned_weights"] is None
    assert adapt(runs / "margin_1", with_replacement=False, epoch="best", **settings)["with_replacement"] is False


def test_tune_draws_support_batches_with_replacement(monkeypatch):
    """In two shots, half of the pairs are one image, shown in two crops."""
    import unimetric.analysis.adapt as module

    head, labels = create("heads", "linear(dim=4)", features=6), np.repeat(np.arange(8), 2)
    seen = []

    def record(batches, crops, seed):
        seen.append((batches, draw(batches, crops, seed)))
        return seen[-1][1]

    draw = module._draw_crops
    monkeypatch.setattr(module, "_draw_crops", record)
    same = []
    for with_replacement in (True, False):
        options = {"iterations": 50, "batch_size": 16, "with_replacement": with_replacement}
        tune_head(head, last_layers(head), torch.randn(4, 16, 6), labels, **options)
        batches, which = seen[-1]
        assert (labels[batches[:, ::2]] == labels[batches[:, 1::2]]).all()
        twice = batches[:, ::2] == batches[:, 1::2]
        assert (which[:, ::2] != which[:, 1::2])[twice].all()
        assert set(np.unique(which)) == {0, 1, 2, 3}
        same.append(twice.mean())
    assert same[0] == pytest.approx(0.5, abs=0.1) and same[1] == 0


def test_tune_divides_by_active_triplets(monkeypatch):
    built = []

    def watch(kind, text, **offered):
        built.append(text)
        return create(kind, text, **offered)

    monkeypatch.setattr("unimetric.analysis.adapt.create", watch)
    head = create("heads", "linear(dim=4)", features=6)
    tune_head(head, last_layers(head), torch.randn(2, 16, 6), np.repeat(np.arange(4), 4), iterations=2, batch_size=8)
    assert "margin(beta=1.2, learn_beta=False, or_count=True)" in built


def test_tune_uses_equal_head_weights():
    """The run's weights must not reach the gradient, and the tuned copy must have them again."""
    views = torch.randn(2, 20, 6, generator=torch.manual_seed(0))
    labels = np.repeat(np.arange(4), 5)
    tuned = []
    for weights in ("(0.5, 1.5, 1.5, 1.5)", "(1, 1, 1, 1)"):
        torch.manual_seed(0)
        head = create("heads", f"diva(dim=3, weights={weights})", features=6)
        tuned.append(tune_head(head, last_layers(head), views, labels, iterations=20, lr=1e-2, batch_size=8))
        assert tuned[-1].weights == head.weights
        assert not torch.equal(tuned[-1].layer.weight, head.layer.weight)
    assert tuned[0].weights == (0.5, 1.5, 1.5, 1.5)
    assert torch.equal(tuned[0].layer.weight, tuned[1].layer.weight)


def test_adapt_reads_the_last_or_the_best_epoch(runs, tmp_path):
    """The run's best and last epoch differ: its checkpoint is replaced by one of other weights."""
    folder = tmp_path / "run"
    shutil.copytree(runs / "margin_1", folder)
    settings = {"shots": 3, "episodes": 2, "iterations": 1, "lr": 0.0, "looks": 0, "metrics": ("spectral_decay",)}
    best = adapt(folder, epoch="best", **settings)
    tensors, notes = read_tensors(folder / "checkpoint.safetensors")
    tensors["model/head.layer.weight"] = torch.randn(8, 16, generator=torch.manual_seed(0))
    write_tensors(folder / "checkpoint.safetensors", tensors, notes)
    last = adapt(folder, **settings)
    assert adapt(folder, epoch="last", **settings) == last
    assert adapt(folder, epoch="best", **settings) == best
    assert (best["epoch"], last["epoch"]) == ("best", "last")
    assert best["summary"]["zero/spectral_decay"] != last["summary"]["zero/spectral_decay"]
    with pytest.raises(UnimetricError, match=r"`epoch` must be one of best, last, got `first`"):
        adapt(folder, epoch="first", **settings)
    (folder / "checkpoint.safetensors").unlink()
    with pytest.raises(UnimetricError, match=r"no checkpoint.safetensors") as caught:
        adapt(folder, **settings)
    assert caught.value.hint == "use `--epoch best`"
    shown = CliRunner().invoke(app, ["adapt", str(folder), "--epoch", "best", "--shots", "3", "--iterations", "1", "--looks", "0"])
    assert shown.exit_code == 0 and "few/recall(k=1)" in shown.output
    assert json.loads((folder / "adapt_3_shots.json").read_text())["epoch"] == "best"


def test_zero_shot_is_the_run_on_the_pictures_that_are_left(runs):
    from unimetric.images.loading import View, open_pictures
    from unimetric.metrics import measure
    from unimetric.runs.device import open_fabric
    from unimetric.runs.embed import embed, space_of
    from unimetric.runs.folder import open_run

    result = adapt(runs / "triplet_2", shots=3, episodes=2, iterations=1, looks=0, metrics=("recall(k=1)",), seed=5, epoch="best")
    config, model = open_run(runs / "triplet_2")
    table, split = read_table(config)
    support = draw_episodes(config, table, split.test, shots=3, episodes=2, seed=5)
    pictures = open_pictures(table, device=torch.device("cpu"), mean=model.mean, std=model.std)
    for line, rows in zip(result["episodes"], support, strict=True):
        left = np.setdiff1d(split.test, rows)
        embeddings = embed(open_fabric(config), model, pictures, left, View(create("transforms", config.transform)), batch=64)
        assert measure(space_of(embeddings, table, left), ["recall(k=1)"])["recall(k=1)"] == pytest.approx(line["zero/recall(k=1)"])


def test_episodes_are_seeded_and_of_each_class_alike(config):
    table, split = read_table(config)
    first, second = (draw_episodes(config, table, split.test, shots=3, episodes=4, seed=1) for _ in range(2))
    assert [rows.tolist() for rows in first] == [rows.tolist() for rows in second]
    assert len({tuple(rows) for rows in first}) == 4
    for rows in first:
        assert set(rows) <= set(split.test) and (np.unique(table.labels[rows], return_counts=True)[1] == 3).all()
    with pytest.raises(UnimetricError, match="`shots` must be at least 2, got 1"):
        draw_episodes(config, table, split.test, shots=1, episodes=4)
    with pytest.raises(UnimetricError, match=r"needs 99 support images and two more to search, but `.+` has only \d+ images"):
        draw_episodes(config, table, split.test, shots=99, episodes=4)
    with pytest.raises(UnimetricError, match="no published episodes"):
        draw_episodes(config, table, split.test, shots=2, episodes=4, draw="published")
    with pytest.raises(UnimetricError, match="got `dice`"):
        draw_episodes(config, table, split.test, shots=2, episodes=4, draw="dice")


def test_published_episodes_are_taken(config, tmp_path):
    table, split = read_table(config)
    names = [table.class_names[label] for label in np.unique(table.labels[split.test])]
    rows = {name: np.flatnonzero(table.labels == table.class_names.index(name)) for name in names}
    from unimetric.images.pack import opened

    called = [name.rpartition("/")[2] for name in opened(table.paths[0].partition("::")[0]).names]
    assert all(len({called[row] for row in own}) == len(own) for own in rows.values())  # a picture's name is its own within its class
    group = {str(n): {name: [called[row] for row in rows[name][n : n + 2]] for name in names} for n in range(3)}
    trained = [table.class_names[label] for label in np.unique(table.labels[split.train])]
    file = tmp_path / "file.json"
    file.write_text(json.dumps({"4": {"fid": 1.0, "train": trained, "test": names, "test_episodes": {"2": group}}}))
    config = from_settings(asdict(config) | {"split": f"published(path='{file}', split=4)"})
    found = draw_episodes(config, table, split.test, shots=2, episodes=10)
    assert [sorted(support) for support in found] == [sorted(np.concatenate([rows[name][n : n + 2] for name in names])) for n in range(3)]
    assert len(draw_episodes(config, table, split.test, shots=3, episodes=10)) == 10  # the file has none of three
    read = split.test[~np.isin(split.test, found[0][:1])]  # all but one picture, which cannot be read
    assert [len(support) for support in draw_episodes(config, table, read, shots=2, episodes=10)] == [
        len(found[0]) - 1,
        *(len(support) for support in found[1:]),
    ]


def test_intervals_are_students():
    mean, half = t_interval([0.1, 0.2, 0.4, 0.5])
    assert mean == pytest.approx(0.3) and half == pytest.approx(3.182446 * np.std([0.1, 0.2, 0.4, 0.5], ddof=1) / 2, rel=1e-6)


def test_curves_over_runs(runs, tmp_path):
    names = ["margin_1", "margin_2", "triplet_1", "triplet_2"]
    report = shift_report([runs / name for name in names], metrics=["recall(k=1)", "r_precision"])
    assert list(report["methods"]) == ["margin", "triplet"]
    for name, method in report["methods"].items():
        assert method["splits"] == ["1", "2"] and method["distances"][0] < method["distances"][1]
        done = [json.loads((runs / f"{name}_{number}" / "done").read_text())["test/recall(k=1)"] for number in (1, 2)]
        assert method["scores"]["recall(k=1)"] == done
        assert method["ags"]["recall(k=1)"] == pytest.approx(np.mean(done))
    changes = [method["change"]["recall(k=1)"]["1"] for method in report["methods"].values()]
    assert sum(changes) == pytest.approx(0)
    draw_report(tmp_path / "shift.png", report, "recall(k=1)")
    assert (tmp_path / "shift.png").stat().st_size > 1000


def test_few_shot_study_over_runs(runs, tmp_path, monkeypatch):
    folder = tmp_path / "study"
    names = ["margin_1", "margin_2", "triplet_1", "triplet_2"]
    for name in names:
        shutil.copytree(runs / name, folder / name)
        (folder / name / "adapt_3_shots.json").unlink(missing_ok=True)
    settings = {"episodes": 2, "iterations": 2, "looks": 0, "seed": 3}
    report = adapt_study(study_runs(folder), shots=[3, 4], metrics=["recall(k=1)"], **settings)
    assert list(report) == ["3", "4"] and list(report["3"]) == ["margin", "triplet"]
    for name in ("margin", "triplet"):
        for part in ("zero", "few", "gain"):
            found = [adapt(runs / f"{name}_{number}", shots=3, metrics=["recall(k=1)"], **settings)["summary"] for number in (1, 2)]
            assert report["3"][name]["scores"][f"{part}/recall(k=1)"] == [each[f"{part}/recall(k=1)"][0] for each in found]
    assert study_runs(folder / "margin_1") == []

    monkeypatch.setattr("unimetric.analysis.few_shot.adapt", lambda *_, **__: pytest.fail("known results are adapted again"))
    assert adapt_study(study_runs(folder), shots=[3, 4], metrics=["recall(k=1)"], **settings) == report
    with pytest.raises(pytest.fail.Exception):
        adapt_study(study_runs(folder), shots=[3], metrics=["recall(k=1)"], **(settings | {"seed": 4}))
    monkeypatch.undo()
    command = ["adapt", str(folder), "--shots", "3", "--shots", "4", "--episodes", "2", "--iterations", "2", "--crops", "0", "--seed", "3"]
    shown = CliRunner().invoke(app, command)
    assert shown.exit_code == 0 and "3 shots, triplet: gain of recall(k=1)" in shown.output, shown.output
    assert (folder / "few_shot.json").exists() and (folder / "few_shot_4.png").stat().st_size > 1000


def test_few_shot_study_has_the_spread_over_seeds(runs, tmp_path, monkeypatch):
    for number in (1, 2):
        config = load(runs / f"margin_{number}" / "config.toml")
        for seed in (0, 1):
            folder = tmp_path / f"{number}_{seed}"
            folder.mkdir()
            (folder / "config.toml").write_text(replace(config, seed=seed).dump())
            (folder / "done").touch()

    def adapt_to(folder, **_):
        number, seed = map(int, folder.name.split("_"))
        return {"summary": {f"{part}/nmi": (0.1 * number + seed, 0.0) for part in ("zero", "few", "gain")}}

    monkeypatch.setattr("unimetric.analysis.few_shot.adapt", adapt_to)
    spread = adapt_study(study_runs(tmp_path), shots=[3], metrics=["nmi"])["3"]["margin"]["ags_spread"]["few/nmi"]
    assert (spread["seeds"], spread["low"], spread["high"]) == (2, pytest.approx(0.15), pytest.approx(1.15))


def test_few_shot_study_adapts_again_with_other_settings(runs, tmp_path, monkeypatch):
    for name in ("margin_1", "margin_2"):
        shutil.copytree(runs / name, tmp_path / name)
    few = {"episodes": 2, "iterations": 2, "looks": 0}
    report = adapt_study(study_runs(tmp_path), shots=[3], metrics=["recall(k=1)"], **few)
    monkeypatch.setattr("unimetric.analysis.few_shot.adapt", lambda *_, **__: pytest.fail("adapted again"))
    assert adapt_study(study_runs(tmp_path), shots=[3], metrics=["recall(k=1)"], **few) == report
    for settings in (few | {"iterations": 0}, {"episodes": 2, "iterations": 2}, few | {"transform": "big"}):
        with pytest.raises(pytest.fail.Exception, match="adapted again"):
            adapt_study(study_runs(tmp_path), shots=[3], metrics=["recall(k=1)"], **settings)


def test_few_shot_study_adapts_again_to_other_images(runs, tmp_path):
    for name in ("margin_1", "margin_2"):
        shutil.copytree(runs / name, tmp_path / name)
    few = {"shots": [3], "metrics": ["recall(k=1)"], "episodes": 2, "iterations": 2, "looks": 0}
    own = adapt_study(study_runs(tmp_path), **few)
    cropped = adapt_study(study_runs(tmp_path), transform="big", **few)
    assert cropped["3"]["margin"]["scores"] != own["3"]["margin"]["scores"]
    assert cropped == adapt_study(study_runs(tmp_path), transform="big", **few)
    assert own == adapt_study(study_runs(tmp_path), **few)


def test_trend_of_structure_over_runs(runs):
    report = shift_report(
        [runs / f"{name}_{number}" for name in ("margin", "triplet") for number in (1, 2)], metrics=["r_precision"], structure=["pi_ratio"]
    )
    columns = []
    for number in (1, 2):
        structure = [evaluate(runs / f"{name}_{number}", metrics=["pi_ratio"], part="train")["pi_ratio"] for name in ("margin", "triplet")]
        scores = [method["scores"]["r_precision"][number - 1] for method in report["methods"].values()]
        assert structure[0] != structure[1] and scores[0] != scores[1]
        columns += [np.argsort(structure), np.argsort(scores)]  # of two methods, the smaller is 0 and the larger 1
    x, y = np.concatenate(columns[::2]), np.concatenate(columns[1::2])
    assert report["structure"]["pi_ratio"]["correlation"] == pytest.approx(np.corrcoef(x, y)[0, 1])


def test_a_network_without_training_is_measured_on_every_split(runs):
    dataset = load(runs / "margin_1" / "config.toml").dataset
    report = shift_report([runs / "untrained.npz"], splits=str(runs / "splits.json"), dataset=dataset, metrics=["recall(k=1)", "map_at_r"])
    method = report["methods"]["untrained"]
    assert method["splits"] == ["1", "2"] and set(method["ags"]) == {"recall(k=1)", "map_at_r"}
    with pytest.raises(UnimetricError, match="no structure of training"):
        shift_report([runs / "untrained.npz"], splits=str(runs / "splits.json"), dataset=dataset, structure=["pi_ratio"])
    with pytest.raises(UnimetricError, match="require splits and a dataset"):
        shift_report([runs / "untrained.npz"])
    with pytest.raises(UnimetricError, match="no value of `map_at_r`"):
        shift_report([runs / "margin_1"], metrics=["map_at_r"])
    with pytest.raises(UnimetricError, match="not a finished run"):
        shift_report([runs / "absent"])


def test_runs_whose_splits_have_one_number_and_two_distances_are_not_mixed(runs, tmp_path):
    shutil.copytree(runs / "triplet_2", tmp_path / "other")
    splits = json.loads((runs / "splits.json").read_text())
    splits["splits"]["2"]["distance"] *= 2
    (tmp_path / "splits.json").write_text(json.dumps(splits))
    config = load(tmp_path / "other" / "config.toml", split=f"ood(path='{tmp_path}/splits.json', split=2)")
    (tmp_path / "other" / "config.toml").write_text(config.dump())
    with pytest.raises(UnimetricError, match="split 2 has a distance"):
        shift_report([runs / "margin_2", tmp_path / "other"])
    with pytest.raises(UnimetricError, match="class_spectra` has several"):
        shift_report([runs / "margin_2"], structure=["class_spectra"])


def test_methods_that_would_be_called_alike_are_not_mixed(runs, tmp_path):
    for name, clip in (("a", {"clip_norm": 0.5}), ("b", {"clip_value": 0.5})):
        shutil.copytree(runs / "margin_1", tmp_path / name)
        (tmp_path / name / "config.toml").write_text(load(runs / "margin_1" / "config.toml", **clip).dump())
        shutil.copy(runs / "untrained.npz", tmp_path / name / "network.npz")
    assert list(shift_report([tmp_path / "a", tmp_path / "b"])["methods"]) == [
        "clip_norm=0.5, clip_value=0.0",
        "clip_norm=0.0, clip_value=0.5",
    ]
    features = [tmp_path / name / "network.npz" for name in ("a", "b")]
    dataset = load(runs / "margin_1" / "config.toml").dataset
    report = shift_report(features, splits=str(runs / "splits.json"), dataset=dataset)
    assert list(report["methods"]) == ["network", str(features[1])]


def test_transfer_to_another_dataset(runs, tmp_path):
    """The classes of the other dataset are other letters; recall is counted one image after another."""
    from unimetric.images.loading import View, open_pictures
    from unimetric.runs.folder import open_run

    table = create("datasets", "glyphs(blocks='georgian')")
    some = np.concatenate([np.unique(table.labels[table.train])[:3], np.unique(table.labels[~table.train])[:5]])
    packing.write(tmp_path / "georgian.pack", table.take(np.isin(table.labels, some)), short_side=None, encoding="raw")
    dataset, other = load(runs / "margin_1" / "config.toml").dataset, f"pack(path='{tmp_path}/georgian.pack')"
    names = ["margin_1", "triplet_1"]
    rows = transfer([runs / name for name in names], [other, dataset])
    assert [(row["run"], row["tested_on"]) for row in rows] == [(str(runs / name), to) for name in names for to in (other, dataset)]
    assert all(row["trained_on"] == dataset for row in rows)
    for name, row in zip(names, rows[::2], strict=True):
        config, model = open_run(runs / name)
        table = create("datasets", other)
        test = np.flatnonzero(~table.train)
        pictures = open_pictures(table, device=torch.device("cpu"), mean=model.mean, std=model.std)
        with torch.no_grad():
            images = next(pictures.load([(test, View(create("transforms", config.transform)))]))
            points = torch.nn.functional.normalize(model.eval()(images)[0], dim=1)
        labels = table.labels[test]
        hits = 0
        for query in range(len(test)):
            others = [each for each in range(len(test)) if each != query]
            hits += labels[max(others, key=lambda each: float(points[query] @ points[each]))] == labels[query]
        assert len(set(labels)) == 5 and row["recall(k=1)"] == pytest.approx(hits / len(test))
    assert len({row["recall(k=1)"] for row in rows}) > 2
    with pytest.raises(UnimetricError, match="`transfer` requires at least one run"):
        transfer([], [dataset])
    seen = []
    with pytest.raises(UnimetricError, match="no `cub20` in datasets"):
        transfer([runs / "margin_1"], [dataset, "cub20"], progress=lambda done, total: seen.append(done))
    assert not seen  # nothing was embedded before the mistake was found


class Wide(torch.nn.Module):
    """A head that looks at every position."""

    dim = 4

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)

    def forward(self, tokens):
        return self.layer(tokens.amax(1))


def test_a_head_that_reads_more_than_the_summary_is_refused():
    backbone, images = create("backbones", "small(channels=16)"), torch.randn(3, 3, 32, 32)
    _check_global(Model(backbone, create("heads", "linear(dim=4)", features=16)), images)
    with pytest.raises(UnimetricError, match="reads only the global token"):
        _check_global(Model(backbone, Wide()), images)
