"""Weight decay of proxies: none by default, and the one that the loss names."""

from __future__ import annotations

import pytest
import torch

from unimetric.config import load
from unimetric.runs.model import build_model
from unimetric.spec import find, names
from unimetric.training.build import build_objective, build_optimizer

PROXIES = [name for name in names("losses") if find("losses", name).family == "proxy"]


def built(loss: str, optimizer: str = "adamw(lr=1e-3, weight_decay=0.05)") -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    config = load(loss=loss, backbone="small(channels=8)", head="linear(dim=8)", optimizer=optimizer)
    model = build_model(config)
    objective = build_objective(config, model, num_classes=5)
    return objective, build_optimizer(config, model, objective)


def test_every_loss_with_proxies_is_covered() -> None:
    assert {
        "proxy_anchor",
        "curricularface",
        "cosface",
        "arcface",
        "proxy_nca",
        "proxy_nca_pp",
        "soft_triple",
        "normalized_softmax",
    } == set(PROXIES)


@pytest.mark.parametrize("name", PROXIES)
def test_proxies_decay_as_their_loss_says(name: str) -> None:
    for text, decay in ((name, 0.0), (f"{name}(weight_decay=1e-4)", 1e-4)):
        objective, optimizer = built(text)
        backbone, head, proxies = optimizer.param_groups
        assert proxies["params"] == list(objective.parameters())
        assert (proxies["lr"], proxies["weight_decay"]) == (objective.loss.lr, decay)
        assert backbone["weight_decay"] == head["weight_decay"] == 0.05


def test_decay_shrinks_proxies_and_the_default_does_not() -> None:
    for text, factor in (("proxy_anchor(lr=0.1)", 1.0), ("proxy_anchor(lr=0.1, weight_decay=0.5)", 1 - 0.1 * 0.5)):
        objective, optimizer = built(text)
        proxies = objective.loss.proxies
        before = proxies.detach().clone()
        proxies.grad = torch.zeros_like(proxies)
        optimizer.step()
        torch.testing.assert_close(proxies.detach(), factor * before)


def test_branches_with_one_decay_share_a_group() -> None:
    """As without decay: each group is a round of kernel launches per step."""
    config = load(
        loss="proxy_anchor(weight_decay=1e-4)", objective="s2sd(dims=(8, 16))", backbone="small(channels=8)", head="linear(dim=8)"
    )
    model = build_model(config)
    objective = build_objective(config, model, num_classes=5)
    decays = [group["weight_decay"] for group in build_optimizer(config, model, objective).param_groups]
    assert decays.count(1e-4) == 1 and len(decays) == 4  # backbone, head, proxies, target branches
