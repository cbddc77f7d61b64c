import numpy as np
import pytest
import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset

from unimetric.spec import create, names


@pytest.mark.parametrize("name", names("samplers"))
@pytest.mark.parametrize("workers", [0, 1])
def test_sampler_is_the_batch_sampler_of_a_loader(name, workers):
    labels = torch.arange(40) % 10
    sampler = create("samplers", name, labels=labels, batch_size=8, seed=0)
    sampler.fill(torch.randn(40, 4))
    loader = DataLoader(TensorDataset(torch.arange(40), labels), batch_sampler=sampler, num_workers=workers)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader) == 5
        for rows, found in batches:
            assert len(rows) == 8 and torch.equal(found, labels[rows])
        epochs.append(np.concatenate([rows.numpy() for rows, _ in batches]))
    assert not (epochs[0] == epochs[1]).all()


def test_lightning_sets_the_epoch_of_a_batch_sampler():
    sampler = create("samplers", "samples_per_class", labels=torch.arange(40) % 10, batch_size=8)
    loader = Fabric(accelerator="cpu", devices=1).setup_dataloaders(DataLoader(TensorDataset(torch.arange(40)), batch_sampler=sampler))
    for epoch in range(2):
        rows = torch.stack([batch for (batch,) in loader]).numpy()
        assert sampler.epoch == epoch and (rows == sampler.plan()).all()
