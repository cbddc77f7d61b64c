import math

import pytest
import torch

from unimetric.geometry import Memory
from unimetric.losses.hyperbolic import Hyperbolic


def into_ball(x, c, clip):
    x = x * min(1.0, clip / (float(x.norm()) + 1e-5))
    norm = float(x.norm())
    z = math.tanh(math.sqrt(c) * norm) * x / (math.sqrt(c) * norm)
    rim = (1 - 1e-3) / math.sqrt(c)
    return z * min(1.0, rim / float(z.norm()))


def distance(x, y, c):
    """By the Moebius addition of -x and y, as a vector."""
    x = -x
    xy, xx, yy = float(x @ y), float(x @ x), float(y @ y)
    added = ((1 + 2 * c * xy + c * yy) * x + (1 - c * xx) * y) / (1 + 2 * c * xy + c * c * xx * yy + 1e-5)
    return 2 / math.sqrt(c) * math.atanh(min(math.sqrt(c) * float(added.norm()), 1 - 1e-5))


def naive(x, y, temperature, c, clip, average):
    """Views are stacked first, as in the authors' code, from labels of which each class has as many."""
    labels = y.tolist()
    classes = sorted(set(labels), key=labels.index)
    views = labels.count(labels[0])
    members = [[i for i, label in enumerate(labels) if label == name] for name in classes]

    def score(i, j):
        if c == 0:
            return float(x[i] @ x[j] / x[i].norm() / x[j].norm()) / temperature
        return -distance(into_ball(x[i], c, clip), into_ball(x[j], c, clip), c) / temperature

    total = 0.0
    for first in range(views):
        for second in range(views):
            if first == second:
                continue
            entropy = 0.0
            for row in range(len(classes)):
                anchor = members[row][first]
                across = [score(anchor, members[column][second]) for column in range(len(classes))]
                within = [score(anchor, members[column][first]) for column in range(len(classes)) if column != row]
                entropy += math.log(sum(math.exp(v) for v in across + within)) - across[row]
            total += entropy / len(classes)
    return total / views**2 if average else total


def example(views):
    torch.manual_seed(0)
    y = torch.tensor([4, 7, 2, 5]).repeat(views)[torch.randperm(4 * views)]
    return torch.randn(4 * views, 5, dtype=torch.float64), y


@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("curvature", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("views", [2, 3])
def test_is_its_equation(views, curvature, average):
    x, y = example(views)
    loss = Hyperbolic(curvature=curvature, average=average)
    assert math.isclose(loss(x, y).item(), naive(x, y, 0.2, curvature, 2.3, average), rel_tol=1e-9)


@pytest.mark.parametrize(("clip", "precision"), [(2.3, 1e-9), (5.0, 1e-9), (50.0, 1e-7)])
def test_far_embeddings_are_clipped_and_kept_off_the_rim(clip, precision):
    """On the rim, at 50, the artanh multiplies rounding by a hundred thousand."""
    x, y = example(2)
    x = 40 * x
    loss = Hyperbolic(clip=clip)
    assert math.isclose(loss(x, y).item(), naive(x, y, 0.2, 0.1, clip, False), rel_tol=precision)


def test_flat_in_the_limit():
    """As the curvature vanishes, the distance becomes twice the Euclidean one."""
    x, y = example(2)
    loss = Hyperbolic(curvature=1e-8, clip=None, temperature=1.0)(0.1 * x, y)
    score = -2 * torch.cdist(0.1 * x, 0.1 * x)
    other = ~torch.eye(len(y), dtype=torch.bool)
    expected = (score.masked_fill(~other, -math.inf).logsumexp(1)[:, None] - score)[(y[:, None] == y) & other].sum() / 4
    assert math.isclose(loss.item(), expected.item(), rel_tol=1e-4)  # the authors' 1e-5 remains


@pytest.mark.parametrize("curvature", [0.0, 0.1])
def test_gradients(curvature):
    x, _ = example(3)
    y = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4, 4])  # unequal classes
    assert torch.autograd.gradcheck(lambda x: Hyperbolic(curvature=curvature)(x, y), (x.requires_grad_(),))


@pytest.mark.parametrize("curvature", [0.0, 0.1])
def test_a_memory_that_is_the_batch_changes_nothing(curvature):
    x, y = example(3)
    room = torch.zeros(5, 5, dtype=torch.float64)
    memory = Memory(torch.cat([x, room]), torch.cat([y, y[:5]]), torch.arange(len(y) + 5) < len(y), torch.arange(len(y)))
    loss = Hyperbolic(curvature=curvature)
    assert math.isclose(loss(x, y, memory).item(), loss(x, y).item(), rel_tol=1e-12)
