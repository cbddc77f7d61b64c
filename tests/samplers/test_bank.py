import numpy as np
import torch

from unimetric.samplers._bank import Bank


def nearest_to_first(embeddings, epoch, step):
    """A stand-in for a sampler: the four rows most like row 0."""
    return (embeddings @ embeddings[0]).topk(4).indices, lambda rows: rows + 100 * step


def test_refresh_overwrites_rows_on_the_sphere_and_the_later_of_two_wins():
    bank = Bank(nearest_to_first, rows=6, steps=3)
    old = torch.randn(6, 3, dtype=torch.float64)
    bank.fill(old)
    new = torch.randn(4, 3)
    bank.refresh(np.array([4, 1, 4, 4]), new)
    expected = old.float()
    expected[1], expected[4] = new[1], new[3]
    assert torch.allclose(bank.embeddings, torch.nn.functional.normalize(expected))


def test_a_batch_is_chosen_when_the_one_before_is_asked_for():
    bank = Bank(nearest_to_first, rows=8, steps=10)
    points = torch.eye(8) + 0.1
    bank.fill(points)
    bank.batch(0, 0)
    for row in (5, 6, 7):
        bank.refresh(torch.tensor([row]), points[:1])
    assert set(bank.batch(0, 1) - 100) != {0, 5, 6, 7}  # chosen before the rows moved
    assert set(bank.batch(0, 2) - 200) == {0, 5, 6, 7}


def test_what_was_trained_on_is_let_go():
    bank = Bank(nearest_to_first, rows=8, steps=4)
    bank.fill(torch.eye(8))
    for number in range(12):
        epoch, step = divmod(number, 4)
        bank.batch(epoch, step)
        assert sorted(bank.kept) == [(epoch, step), divmod(number + 1, 4)]
        bank.refresh(torch.tensor([0]), torch.ones(1, 8))
        assert sorted(bank.kept) == [divmod(number + 1, 4)]


def test_what_is_never_trained_on_does_not_pile_up():
    bank = Bank(nearest_to_first, rows=8, steps=4)
    bank.fill(torch.eye(8))
    for epoch in range(50):
        for step in range(4):
            bank.batch(epoch, step)
    assert len(bank.kept) <= 9


def test_state_is_a_copy():
    bank, other = (Bank(nearest_to_first, rows=8, steps=4) for _ in range(2))
    bank.fill(torch.eye(8))
    bank.batch(0, 0)
    state = bank.state_dict()
    other.load_state_dict(state)
    bank.refresh(torch.tensor([3]), torch.ones(1, 8))
    assert torch.equal(other.embeddings, torch.eye(8)) and torch.equal(state["embeddings"], torch.eye(8))
    assert sorted(other.kept) == [(0, 0), (0, 1)]
