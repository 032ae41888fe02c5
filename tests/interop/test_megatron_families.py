"""Models go from Hugging Face to Megatron-Core, say the same there, train there, and return."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests import gloo
from tests.logical import assert_same_tree
from tests.megatron_core import VOCABULARY, Live, Spec
from tests.megatron_families import FAMILIES, LENGTH, expected_logits, write_huggingface
from zckpt.naming.apply import sorted_names
from zckpt.naming.document import read_map

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

STEP = "iter_0000002"
TOKENS = torch.randint(0, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def logits(live: Live) -> list[torch.Tensor]:
    """Return what a model says of the next token, and of further ones."""
    found: list[torch.Tensor] = []
    hook = live.model.output_layer.register_forward_hook(lambda *of: found.append(of[-1][0].transpose(0, 1).clone()))
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with torch.no_grad():
        live.model.eval()
        live.model(TOKENS, torch.arange(LENGTH).expand(2, LENGTH), mask, labels=TOKENS)
        live.model.train()
    hook.remove()
    return [found[-1], *found[:-1]]


def trained_on(rank, world: int, spec: Spec, release: Path, run: Path) -> tuple[Any, ...]:
    """Load weights, train on and save; return the logits of before and after, the losses, and names in order."""
    from megatron.core.dist_checkpointing import load

    live = Live(spec)
    live.model.load_state_dict(load({"model": live._sharded(loading=True)["model"]}, str(release))["model"])
    live.optimizer.reload_model_params()
    before = logits(live)
    losses = live.train(4)
    after = logits(live)
    live.save(run)
    return before, after, losses, [name for name, _ in live.model.named_parameters()]


def gone_on(rank, world: int, spec: Spec, folders: list[Path]) -> list[tuple[dict[str, Any], Any, Any]]:
    """Load a model with its optimizer from each folder; return its state, its logits and its losses as it goes on."""
    found = []
    for folder in folders:
        live = Live(spec)
        live.load(folder)
        found.append((live.tensors() if world == 1 else {}, logits(live), live.train(3)))
    return found


def gone_on_in_transformers(run: Path, folder: Path, names: dict[str, Any]) -> list[float]:
    """Give a live model of transformers what Megatron-Core has trained, and a plain AdamW; return the losses."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.train()
    every = dict(model.named_parameters())
    decayed = [one for name, one in every.items() if one.ndim > 1 and not name.endswith("bias")]
    rest = [one for name, one in every.items() if one.ndim == 1 or name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": rest, "weight_decay": 0.0}], lr=1e-2, weight_decay=0.1
    )
    zckpt.load(run, model=model, optimizer=optimizer, **names)
    drawing = torch.Generator().manual_seed(11)
    losses = []
    for _ in range(3):
        drawn = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=drawing)
        found = model(drawn[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), drawn[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_the_same_in_megatron_core_trains_there_and_returns(family, tmp_path):
    about = FAMILIES[family]
    config = {**write_huggingface(family, tmp_path / "hf"), "padded_vocab_size": VOCABULARY}
    names = {"map": f"{about.map or family}-huggingface-megatron", "map_config": config}
    stacked = about.settings.get("moe_layer_freq", 1) == 1
    target = {"to": "megatron", "layers": "stacked" if stacked else "apart", "transformer_impl": "local"}
    zckpt.convert(tmp_path / "hf", tmp_path / "release", verify=True, **target, **names)
    spec = Spec(experts=about.settings.get("num_moe_experts", 0), family=family, bf16=False)
    [(before, after, losses, order)] = gloo.run(
        trained_on, 1, spec, tmp_path / "release" / "release", tmp_path / "run", fresh=True
    )
    torch.testing.assert_close(before, expected_logits(family, tmp_path / "hf", TOKENS), atol=1e-5, rtol=1e-4)
    side = read_map(names["map"]).sides[1]
    assert sorted_names({name: -at for at, name in enumerate(order)}, side.order) == order
    assert all(0 < one < 10 for one in losses)
    assert not any(torch.allclose(one, other, atol=1e-3) for one, other in zip(before, after, strict=True))

    zckpt.convert(tmp_path / "run", tmp_path / "back", to="consolidated", verify=True, **names)
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "back")
    torch.testing.assert_close(after, expected_logits(family, tmp_path / "back", TOKENS), atol=1e-5, rtol=1e-4)
    zckpt.convert(tmp_path / "back", tmp_path / "again", verify=True, **target, **names)
    assert not zckpt.diff(tmp_path / "run", tmp_path / "again").changed
    folders = [tmp_path / "run" / STEP, tmp_path / "again" / STEP]
    [[(state, first, on), (other, second, anew)]] = gloo.run(gone_on, 1, spec, folders, fresh=True)
    assert_same_tree([other, second, anew], [state, first, on])
    if not about.settings.get("mtp_num_layers"):  # whose loss transformers has not
        assert gone_on_in_transformers(tmp_path / "run", tmp_path / "hf", names) == pytest.approx(on, rel=1e-4)
