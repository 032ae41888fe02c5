"""Models with experts and latent attention go from Hugging Face to Megatron-Core, train there, and return."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from tests import gloo
from tests.megatron_core import VOCABULARY, Live, Spec
from tests.megatron_families import LENGTH, huggingface

pytestmark = [pytest.mark.interop, pytest.mark.nightly]

STEP = "iter_0000002"


def tokens(rows: int) -> torch.Tensor:
    return torch.randint(0, rows, (2, LENGTH), generator=torch.Generator().manual_seed(2))


def logits(live: Live, rows: int) -> torch.Tensor:
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)
    with torch.no_grad():
        live.model.eval()
        found: torch.Tensor = live.model(tokens(rows), torch.arange(LENGTH).expand(2, LENGTH), mask)
        live.model.train()
    return found[..., :rows]


def trained_on(rank, world: int, spec: Spec, release: Path, run: Path, rows: int) -> tuple[Any, ...]:
    """Load weights, train on and save; return the logits of before and after, and the losses."""
    from megatron.core.dist_checkpointing import load

    live = Live(spec)
    live.model.load_state_dict(load({"model": live._sharded(loading=True)["model"]}, str(release))["model"])
    live.optimizer.reload_model_params()
    before = logits(live, rows)
    losses = live.train(4, rows)
    after = logits(live, rows)
    live.save(run)
    return before, after, losses


def gone_on(rank, world: int, spec: Spec, folders: list[Path], rows: int) -> list[tuple[dict[str, Any], Any, Any]]:
    """Load a model with its optimizer from each folder; return its state, its logits and its losses as it goes on."""
    found = []
    for folder in folders:
        live = Live(spec)
        live.load(folder)
        found.append((live.tensors() if world == 1 else {}, logits(live, rows), live.train(3, rows)))
    return found


@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v2", "deepseek-v3"])
def test_it_trains_in_megatron_core_and_returns(family, tmp_path):
    import transformers

    theirs = huggingface(family)
    theirs.save_pretrained(tmp_path / "hf")
    rows = theirs.config.vocab_size
    config = {**json.loads((tmp_path / "hf" / "config.json").read_text()), "padded_vocab_size": VOCABULARY}
    name = f"{'qwen3-moe' if family == 'qwen3-moe' else 'deepseek'}-huggingface-megatron"
    layers = "stacked" if family == "qwen3-moe" else "apart"
    names = {"map": name, "map_config": config}
    target = {"to": "megatron", "verify": True, "layers": layers, "transformer_impl": "local"}
    zckpt.convert(tmp_path / "hf", tmp_path / "release", **target, **names)
    spec = Spec(experts=4, family=family, bf16=False)
    [(before, after, losses)] = gloo.run(
        trained_on, 1, spec, tmp_path / "release" / "release", tmp_path / "run", rows, fresh=True
    )
    with torch.no_grad():
        torch.testing.assert_close(before, theirs(tokens(rows)).logits, atol=1e-5, rtol=1e-4)
    assert all(0 < one < 10 for one in losses)
    assert not torch.allclose(before, after, atol=1e-3)

    zckpt.convert(tmp_path / "run", tmp_path / "back", to="consolidated", verify=True, **names)
    shutil.copy(tmp_path / "hf" / "config.json", tmp_path / "back")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").float()
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(tokens(rows)).logits, after, atol=1e-5, rtol=1e-4)
    zckpt.convert(tmp_path / "back", tmp_path / "again", **target, **names)
    assert not zckpt.diff(tmp_path / "run", tmp_path / "again").changed
    folders = [tmp_path / "run" / STEP, tmp_path / "again" / STEP]
    [[(state, first, on), (other, second, anew)]] = gloo.run(gone_on, 1, spec, folders, rows, fresh=True)
    assert state.keys() == other.keys()
    assert all(torch.equal(other[key], value) for key, value in state.items())
    assert torch.equal(first, second)
    assert on == anew
