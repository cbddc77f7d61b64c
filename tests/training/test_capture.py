"""A loss and its gradient as one graph. That every loss and every miner is right in it is in the contract tests."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from unimetric.errors import UnimetricError
from unimetric.objectives import Output
from unimetric.spec import create
from unimetric.training import capture
from unimetric.training.capture import compiled

LABELS = torch.arange(24) // 2


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()


@pytest.fixture
def handed(monkeypatch):
    """What inductor would be handed, run as it is."""
    graphs = []
    monkeypatch.setattr(capture, "_inductor", lambda graph, inputs, options: graphs.append(graph) or graph)
    return graphs


@pytest.fixture
def inductor(monkeypatch):
    """The compiler. For each of ten instruction sets, it starts a process that loads a test library, here without the rest of torch."""
    if shutil.which("g++") is None:
        pytest.skip("inductor compiles with g++")
    library = Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"
    load = f"import ctypes\nctypes.CDLL({str(library)!r})\nctypes.CDLL('__lib_path__')\n"
    if library.exists():
        monkeypatch.setattr("torch._inductor.cpu_vec_isa.VecISA._avx_py_load", load, raising=False)


def embeddings(seed=0, rows=24):
    torch.manual_seed(seed)
    return torch.randn(rows, 16, requires_grad=True)


def one(value):
    return type(value.grad_fn).__name__ == "KnownBackward"


class Scaled(nn.Module):
    """As simple as a loss can be, with a parameter that has no part in it and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.scale, self.idle, self.frozen = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.tensor(5.0))
        self.frozen.requires_grad_(False)

    def forward(self, z, labels):
        return self.scale * self.frozen * z.square().sum()


def test_only_what_takes_part_gets_a_gradient(handed):
    loss, z = Scaled(), embeddings()
    value = compiled(loss)(z, LABELS)
    assert one(value)
    value.backward()
    assert torch.allclose(z.grad, 20 * z)
    assert loss.scale.grad.item() == pytest.approx(5 * z.square().sum().item())
    assert loss.idle.grad is None
    assert loss.frozen.grad is None


def test_gradients_are_multiplied_and_added_like_any_other(handed):
    z, minimise = embeddings(), compiled(Scaled())
    (minimise(z, LABELS) * 3 + 0.5 * minimise(z, LABELS)).backward()
    assert torch.allclose(z.grad, 3.5 * 20 * z)
    value = minimise(z, LABELS)
    value.backward(retain_graph=True)
    value.backward()
    assert torch.allclose(z.grad, 5.5 * 20 * z)


def test_the_gradient_of_the_gradient_is_refused(handed):
    z = embeddings()
    with pytest.raises(UnimetricError, match="gradient of its gradient"):
        torch.autograd.grad(compiled(Scaled())(z, LABELS), z, create_graph=True)


def test_every_shape_and_kind_of_number_has_a_graph_of_its_own(handed):
    loss = create("losses", "contrastive")
    minimise = compiled(copy.deepcopy(loss))
    for rows, dtype in ((24, torch.float32), (20, torch.float32), (24, torch.float64), (24, torch.float32)):
        z = embeddings(rows=rows).detach().to(dtype).requires_grad_()
        value = minimise(z, LABELS[:rows])
        assert one(value)
        assert value.item() == pytest.approx(loss(z, LABELS[:rows]).item(), rel=1e-5)
    assert len(handed) == 3


def test_many_losses_and_shapes_share_the_limit_of_one_call(handed):
    """Dynamo stores at most eight graphs of a function by default, and all losses begin with the same one."""
    with torch._dynamo.config.patch(recompile_limit=8):
        for text in ("contrastive", "sup_con"):
            minimize = compiled(create("losses", text))
            for rows in range(4, 24, 4):
                minimize(embeddings(rows=rows), LABELS[:rows]).backward()
    assert len(handed) == 10


def test_a_setting_that_changes_is_seen(handed):
    loss, z = create("losses", "triplet(miner='hardest')"), embeddings()
    minimise = compiled(loss)
    before = minimise(z, LABELS).item()
    loss.margin += 1
    assert minimise(z, LABELS).item() == pytest.approx(loss(z, LABELS).item(), rel=1e-5)
    assert minimise(z, LABELS).item() > before


def test_without_gradient_and_under_autocast_nothing_is_joined(handed):
    minimise, z = compiled(Scaled()), embeddings()
    with torch.no_grad():
        assert not minimise(z, LABELS).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = minimise(z, LABELS)
    assert not one(value)
    value.backward()
    assert z.grad.isfinite().all()


def test_autocast_does_not_change_the_gradient_of_a_compiled_loss(handed):
    loss, z = create("losses", "sup_con"), embeddings()
    (expected,) = torch.autograd.grad(loss(z, LABELS), z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = compiled(loss)(embeddings=z, labels=LABELS)
    assert one(value)
    value.backward()
    torch.testing.assert_close(z.grad, expected, rtol=1e-5, atol=1e-7)


def test_an_objective_of_one_term_is_joined_and_one_of_several_is_not(handed):
    z = embeddings()
    output = Output(z, torch.randn(24, 3, 16), torch.zeros(24, 3, 4, 4), (z,))
    plain = create("objectives", "plain", loss="margin", num_classes=12, dim=16)
    terms = compiled(plain)(output, LABELS)
    assert one(terms["loss"])
    several = create("objectives", "cross_batch(size=48)", loss="margin", num_classes=12, dim=16, batch_size=24)
    terms = compiled(several)(output, LABELS)
    assert len(terms) == 2 and not any(one(term) for term in terms.values())
    sum(terms.values()).backward()
    assert z.grad.isfinite().all()


def test_labels_are_told_apart_by_every_bit(handed):
    """Compared by halves: labels that differ in one of them only, below zero and above 2^32."""
    labels = torch.tensor([0, 1, 1 << 32, (1 << 32) + 1, -1, -(1 << 32), (1 << 62) + 5, 5]).repeat_interleave(3)
    loss, z = create("losses", "contrastive(miner='all')"), embeddings()
    value = compiled(loss)(z, labels)
    assert one(value)
    assert value.item() == pytest.approx(loss(z, labels).item(), rel=1e-6)
    assert value.item() != pytest.approx(loss(z, labels % 2**32).item(), rel=1e-3)


@pytest.mark.parametrize("text", ["contrastive(miner='all', active_only=True)", "triplet(miner='semihard')", "multi_similarity", "n_pair"])
def test_a_graph_has_neither_wide_masks_nor_single_numbers_to_add(handed, text):
    loss, z = create("losses", text), embeddings()
    compiled(loss)(z, LABELS).backward()
    aten, read = torch.ops.aten, [node for node in handed[0].graph.nodes if node.op == "call_function"]
    for node in read:
        kinds = [given.meta["val"].dtype for given in node.all_input_nodes if "val" in given.meta]
        if node.target in (aten.eq.Tensor, aten.ne.Tensor) and node.meta.get("val", z).dim() == 2:
            assert kinds != [torch.int64, torch.int64]
        if node.target in (aten.sum.default, aten.sum.dim_IntList) and kinds == [torch.bool]:
            assert node.kwargs["dtype"] == torch.int32
        assert node.target not in (aten.any.dim, aten.any.default) or kinds != [torch.bool]
        assert node.target is not aten.index_put.default or node.args[0].meta["val"].dim() != 2
    turned = [node for node in read if node.target is aten.permute.default and node.users and node.meta["val"].shape == (24, 24)]
    made = torch.ops.prims.inductor_force_stride_order.default
    assert all(node.args[0].target is made for node in turned if any(user.target is aten.add.Tensor for user in node.users))


@pytest.mark.usefixtures("inductor")
@pytest.mark.parametrize("text", ["margin", "proxy_nca", "curricularface", "smooth_ap", "triplet(miner='all')", "cross_batch(size=48)"])
def test_compiled_in_earnest(text):
    """By inductor itself, in float32, step after step: mining, proxies, changing buffers, an operator of our own, and several terms."""
    kind = "objectives" if "cross" in text else "losses"
    eager = create(kind, text, num_classes=12, dim=16, batch_size=24)
    captured = copy.deepcopy(eager)
    minimise = compiled(captured)

    def step(call, module, z):
        given = (Output(z, torch.zeros(24, 3, 16), torch.zeros(24, 3, 4, 4), (z,)), LABELS) if kind == "objectives" else (z, LABELS)
        value = call(*given)
        value = sum(value.values()) if kind == "objectives" else value
        module.zero_grad()
        value.backward()
        return [value.detach(), z.grad, *(parameter.grad for parameter in module.parameters()), *module.buffers()]

    for seed in range(3):
        for found, expected in zip(step(minimise, captured, embeddings(seed)), step(eager, eager, embeddings(seed)), strict=True):
            assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.usefixtures("inductor")
def test_transposed_embeddings_have_the_same_gradient():
    eager = create("losses", "triplet")
    captured, plain = compiled(copy.deepcopy(eager)), embeddings()
    transposed = plain.detach().T.contiguous().T.requires_grad_()
    value, expected = captured(transposed, LABELS), eager(plain, LABELS)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5) and one(value)
    value.backward()
    expected.backward()
    assert torch.allclose(transposed.grad, plain.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("private", ["_decompositions", "_make_once", "_count_in_32_bits"])
def test_private_function_that_changed_costs_only_speed(handed, monkeypatch, recwarn, private):
    def changed(*_):
        raise AttributeError("module 'torch._inductor' has no attribute 'gone'")

    monkeypatch.setattr(capture, private, changed)
    monkeypatch.setattr(capture, "_warned", set())
    loss, z = Scaled(), embeddings()
    for seed in (0, 1):  # two graphs, one warning
        torch._dynamo.reset()
        z = embeddings(seed)
        value = compiled(loss)(z, LABELS)
        assert not one(value)
        value.backward()
        assert value.item() == pytest.approx(10 * z.square().sum().item())
        assert torch.allclose(z.grad, 20 * z)
    warned = [str(each.message) for each in recwarn if "as one graph" in str(each.message)]
    assert len(warned) == 1 and "no attribute 'gone'" in warned[0] and torch.__version__ in warned[0]


def test_inductor_that_is_gone_leaves_the_loss_uncompiled(monkeypatch, recwarn):
    def changed(*_):
        raise ImportError("cannot import name 'compile'")

    monkeypatch.setattr(capture, "_inductor", changed)
    monkeypatch.setattr(capture, "_warned", set())
    loss, z = Scaled(), embeddings()
    value = compiled(loss)(z, LABELS)
    value.backward()
    assert value.item() == pytest.approx(10 * z.square().sum().item()) and torch.allclose(z.grad, 20 * z)
    assert [str(each.message) for each in recwarn if "run uncompiled" in str(each.message)]


def test_compiler_errors_are_not_hidden(monkeypatch):
    def broken(*_):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(capture, "_inductor", broken)
    with pytest.raises(Exception, match=r"no C\+\+ compiler"):
        compiled(Scaled())(embeddings(), LABELS)
