"""DistributedOptimizer: parameters on several RPC workers, in real processes, step as one optimizer would step them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.autograd as dist_autograd
from torch.distributed import rpc

import zckpt
from tests.folders import names_in
from tests.gloo import run
from tests.logical import assert_same_tree
from tests.refusals import refusing
from zckpt.errors import DamagedFileError, UsageError
from zckpt.formats.native.rank_file import recorded
from zckpt.optim import DistributedOptimizer, files

pytestmark = pytest.mark.interop

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    (torch.optim.AdamW, {"lr": 0.05}),
    (torch.optim.Adagrad, {"lr": 0.05}),
    (torch.optim.RMSprop, {"lr": 0.05}),
    (torch.optim.NAdam, {"lr": 0.05}),  # has no functional equivalent in torch
]


class Layer:
    """A weight on a worker."""

    def __init__(self, seed: int, trained: bool = True) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.rand(3, 3, generator=generator, requires_grad=trained)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x

    def parameter(self) -> torch.Tensor:
        return self.weight


class FailingOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        raise ValueError("no step today")


class UnmadeOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        raise ValueError("no optimizer today")


def call(remote: Any, name: str, *args: Any) -> Any:
    return getattr(remote.local_value(), name)(*args)


class Model:
    """Layers on workers 1, 2, ..., and parameters as RRefs."""

    def __init__(self, *layers: tuple[str, int, bool]) -> None:
        self.layers = [rpc.remote(worker, Layer, args=(seed, trained)) for worker, seed, trained in layers]
        self.parameters = [rpc.remote(one.owner(), call, args=(one, "parameter")) for one in self.layers]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = rpc.rpc_sync(layer.owner(), call, args=(layer, "forward", x))
        return x

    def weights(self) -> list[torch.Tensor]:
        return [parameter.to_here().detach() for parameter in self.parameters]

    def step(self, optimizer: Any, x: torch.Tensor) -> None:
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [self.forward(x).sum()])
            optimizer.step(context)


def on_caller(rank, world_size, path: Path, function: Callable[[], Any]) -> Any:
    """Run a function on worker 0 while the others serve it."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{path}", num_worker_threads=8)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
    try:
        return function() if rank == 0 else None
    finally:
        rpc.shutdown()


TWO = (("worker1", 1, True), ("worker2", 2, True))
PLACES = (*TWO, ("worker1", 3, True))
MOVED = (("worker2", 1, True), ("worker0", 2, True), ("worker2", 3, True))


def local(*layers: tuple[str, int, bool]) -> list[Layer]:
    return [Layer(seed, trained) for _, seed, trained in layers]


def weights(layers: list[Layer]) -> list[torch.Tensor]:
    return [layer.weight.detach() for layer in layers]


def local_step(layers: list[Layer], optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    for layer in layers:
        x = layer.forward(x)
    x.sum().backward()
    optimizer.step()


def inputs(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.rand(3, 2, generator=generator) for _ in range(count)]


# --- what runs on the caller; every assertion is made there


def steps_are_those_of_one_optimizer() -> None:
    for kind, options in OPTIMIZERS:
        model, layers = Model(*TWO), local(*TWO)
        optimizer = DistributedOptimizer(kind, model.parameters, **options)
        reference = kind([layer.weight for layer in layers], **options)
        schedulers = [torch.optim.lr_scheduler.StepLR(one, 2) for one in (optimizer, reference)]
        for number, x in enumerate(inputs(4)):
            model.step(optimizer, x)
            local_step(layers, reference, x)
            for scheduler in schedulers:
                scheduler.step()
            assert_same_tree(model.weights(), weights(layers), f"{kind}, {number}")
            assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"]
        assert_same_tree(optimizer.state_dict(), reference.state_dict(), str(kind))


def groups_have_their_own_hyperparameters() -> None:
    model, layers = Model(*TWO), local(*TWO)
    groups = [{"params": [("a", model.parameters[0])], "lr": 0.1}, {"params": [("b", model.parameters[1])]}]
    optimizer = DistributedOptimizer(torch.optim.SGD, groups, lr=0.01, momentum=0.9)
    reference = torch.optim.SGD([{"params": [layers[0].weight], "lr": 0.1}, {"params": [layers[1].weight]}],
                                lr=0.01, momentum=0.9)  # fmt: skip
    assert [group["param_names"] for group in optimizer.param_groups] == [["a"], ["b"]]
    assert optimizer.defaults["nesterov"] is False
    for number, x in enumerate(inputs(4)):
        for one in (optimizer, reference):
            one.param_groups[1]["lr"] = 0.02 * (number + 1)
        model.step(optimizer, x)
        local_step(layers, reference, x)
    assert_same_tree(model.weights(), weights(layers))


def parameters_without_a_gradient_stay() -> None:
    places = (("worker1", 1, True), ("worker2", 2, False))
    model = Model(*places)
    before = model.weights()
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameters, lr=0.1)
    model.step(optimizer, inputs(1)[0])
    after = model.weights()
    assert not torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert all(rpc.rpc_sync(p.owner(), has_gradient, args=(p,)) is False for p in model.parameters)


def has_gradient(parameter: Any) -> bool:
    return parameter.local_value().grad is not None


def state_continues_elsewhere() -> None:
    """Saved with two workers, loaded with three other places for the same parameters, and by torch.optim."""
    model, layers = Model(*PLACES), local(*PLACES)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameters, lr=0.05)
    for x in inputs(3):
        model.step(optimizer, x)
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0, 1, 2]
    moved = Model(*MOVED)
    for target, weight in zip(moved.parameters, model.weights(), strict=True):
        rpc.rpc_sync(target.owner(), set_weight, args=(target, weight))
    for layer, weight in zip(layers, model.weights(), strict=True):
        layer.weight.data.copy_(weight)
    other = DistributedOptimizer(torch.optim.AdamW, moved.parameters, lr=1.0)
    other.load_state_dict(saved)
    reference = torch.optim.AdamW([layer.weight for layer in layers], lr=1.0)
    reference.load_state_dict(saved)
    for x in inputs(3):
        model.step(optimizer, x)
        moved.step(other, x)
        local_step(layers, reference, x)
    assert_same_tree(model.weights(), moved.weights())
    assert_same_tree(model.weights(), weights(layers))


def set_weight(parameter: Any, weight: torch.Tensor) -> None:
    parameter.local_value().data.copy_(weight)


def a_dict_of_another_optimizer_changes_nothing() -> None:
    model = Model(*TWO)
    optimizer = DistributedOptimizer(torch.optim.AdamW, model.parameters, lr=0.05)
    model.step(optimizer, inputs(1)[0])
    before = optimizer.state_dict()
    fewer = {"state": {}, "param_groups": [{**before["param_groups"][0], "params": [0]}]}
    strange = {"state": {5: {}}, "param_groups": before["param_groups"]}
    wrong = {0: before["state"][0], 1: {**before["state"][1], "exp_avg": torch.zeros(4, 4)}}
    for given in (fewer, strange, {"state": wrong, "param_groups": before["param_groups"]}):
        with pytest.raises(ValueError, match=r"parameters|state for parameter 5|shape"):
            optimizer.load_state_dict(given)
        assert_same_tree(optimizer.state_dict(), before)


def an_error_of_a_worker_is_raised() -> None:
    model = Model(*TWO)
    with pytest.raises(Exception, match="no optimizer today"):
        DistributedOptimizer(UnmadeOptimizer, model.parameters)
    optimizer = DistributedOptimizer(FailingOptimizer, model.parameters)
    with pytest.raises(Exception, match="no step today"):
        model.step(optimizer, inputs(1)[0])
    with pytest.raises(ValueError, match="empty"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)
    with pytest.raises(RuntimeError, match="constructor"):
        optimizer.add_param_group({"params": model.parameters})


def callers_at_once_are_taken_one_after_the_other() -> None:
    """Two optimizers of the same parameters, stepped by two threads: no gradient is lost or counted twice."""
    model = Model(*TWO)
    before = model.weights()
    errors: list[BaseException] = []

    def train() -> None:
        try:
            optimizer = DistributedOptimizer(torch.optim.SGD, model.parameters, lr=1.0)
            for _ in range(10):
                with dist_autograd.context() as context:
                    loss = sum(rpc.rpc_sync(p.owner(), total, args=(p,)) for p in model.parameters)
                    dist_autograd.backward(context, [loss])
                    optimizer.step(context)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    expected = [old - 20 for old in before]  # the gradient is one everywhere, twenty times
    torch.testing.assert_close(model.weights(), expected, atol=1e-4, rtol=0)


def total(parameter: Any) -> torch.Tensor:
    return parameter.local_value().sum()


def zero_grad_reaches_the_workers() -> None:
    model = Model(*TWO)
    optimizer = DistributedOptimizer(torch.optim.SGD, model.parameters, lr=1.0)
    for parameter in model.parameters:
        rpc.rpc_sync(parameter.owner(), set_gradient, args=(parameter,))
    assert all(rpc.rpc_sync(p.owner(), has_gradient, args=(p,)) for p in model.parameters)
    optimizer.zero_grad()
    assert not any(rpc.rpc_sync(p.owner(), has_gradient, args=(p,)) for p in model.parameters)


def set_gradient(parameter: Any) -> None:
    parameter.local_value().grad = torch.ones(3, 3)


def named(model: Model) -> list[tuple[str, Any]]:
    return [(f"layer{number}", parameter) for number, parameter in enumerate(model.parameters)]


def workers_write_and_read_their_own_parts(directory: Path) -> None:
    path, model = directory / "saved", Model(*PLACES)
    optimizer = DistributedOptimizer(torch.optim.AdamW, named(model), lr=0.05)
    for x in inputs(3):
        model.step(optimizer, x)
    files.save(optimizer, path)
    assert names_in(path) == [
        "metadata.pt", "model_rank_0.pt", "model_rank_1.pt", "optimizer_rank_0.pt", "optimizer_rank_1.pt",
    ]  # fmt: skip
    zckpt.consolidate(path, directory / "model.safetensors", slots="all")
    zckpt.convert(path, directory / "other", to="zero-redundancy", world_size=3)
    opened, converted = zckpt.open(path), zckpt.open(directory / "other")
    moved = Model(*MOVED)
    for (name, parameter), its in zip(named(moved), model.weights(), strict=True):
        for slot in ("weight", "exp_avg", "exp_avg_sq"):
            assert torch.equal(opened.read(name, slot), converted.read(name, slot))
        assert torch.equal(opened.read(name), its)
        rpc.rpc_sync(parameter.owner(), set_weight, args=(parameter, its))
    other = DistributedOptimizer(torch.optim.AdamW, named(moved), lr=1.0)
    files.load(other, path)
    assert other.param_groups[0]["lr"] == 0.05
    for x in inputs(3):
        model.step(optimizer, x)
        moved.step(other, x)
    assert_same_tree(model.weights(), moved.weights())
    another = DistributedOptimizer(torch.optim.RMSprop, named(moved), lr=1.0)
    with refusing(UsageError, "RMSprop cannot continue from the state of layer0"):
        files.load(another, path)
    assert another.param_groups[0]["lr"] == 1.0


def workers_save_what_lives_with_them(directory: Path) -> None:
    """In zckpt's format."""
    path, model, other = directory / "c", Model(*PLACES), Model(*MOVED)
    optimizer, its = (DistributedOptimizer(torch.optim.AdamW, named(one), lr=0.1) for one in (model, other))
    model.step(optimizer, inputs(1)[0])
    zckpt.save(path, optimizer=optimizer, step=1, extra={"table": torch.arange(4)})
    opened, state = zckpt.open(path), optimizer.state_dict()["state"]
    for number, weight in enumerate(model.weights()):
        assert torch.equal(opened.read(f"layer{number}"), weight)
        assert torch.equal(opened.read(f"layer{number}", "exp_avg_sq"), state[number]["exp_avg_sq"])
    restored = zckpt.load(path, optimizer=its)
    assert restored.step == 1
    assert torch.equal(restored.extra["table"], torch.arange(4))
    assert_same_tree(its.state_dict()["state"], state)
    every = [one for file in opened.files if file.role == "rank" for one in recorded(file.path)]
    one = next(one for one in every if one.name == "exp_avg_sq/layer0")
    data = bytearray(Path(one.path).read_bytes())
    data[one.offset] ^= 1
    Path(one.path).write_bytes(data)
    with refusing(DamagedFileError, "exp_avg_sq/layer0: changed since it was written"):
        zckpt.load(path, optimizer=its)
    zckpt.load(path, optimizer=its, verify=False)


CHECKS = (
    steps_are_those_of_one_optimizer, groups_have_their_own_hyperparameters, parameters_without_a_gradient_stay,
    state_continues_elsewhere, a_dict_of_another_optimizer_changes_nothing, an_error_of_a_worker_is_raised,
    callers_at_once_are_taken_one_after_the_other, zero_grad_reaches_the_workers,
)  # fmt: skip


CHECKS_OF_FILES = (workers_write_and_read_their_own_parts, workers_save_what_lives_with_them)


def every_check(directory: Path) -> None:
    for check in (*CHECKS, *CHECKS_OF_FILES):
        try:
            check(directory) if check in CHECKS_OF_FILES else check()
        except BaseException as error:
            raise AssertionError(check.__name__) from error


def test_on_workers(tmp_path):
    """On the same workers, which take longer to start than most of the checks."""
    run(on_caller, 3, tmp_path / "rendezvous", partial(every_check, tmp_path), fresh=True)
