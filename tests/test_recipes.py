"""docs/recipes.md: every pair of its table, every command and every program on it is run, as it stands there."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import zckpt
from tests.cli.console import FIXTURES, ROOT, command, environment, inspected, run
from tests.folders import write_model
from tests.live import trained
from tests.pairwise import some
from zckpt.cli import cli
from zckpt.formats.registry import formats

PAGE = (ROOT / "docs/recipes.md").read_text()
OTHER = FIXTURES / "other"
SOURCE = "SOURCE"
YES, NO, NAMES, GROUPS = "yes", "no", "names", "groups"
ADAPTERS = Path(__file__).parent / "operations/adapters"
LLAMA = "hf_llama_s2_bf16_dp2"
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2,
          "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 24, "vocab_size": 67,
          "max_position_embeddings": 32, "tie_word_embeddings": True}  # fmt: skip
IN_A_PROCESS = "zckpt inspect run/ --tag"
"""How the line begins whose command is a process of its own."""


def _saved_model(at: Path) -> None:
    checkpoint = zckpt.open(FIXTURES / "s2_bf16_dp2")
    torch.save({name: checkpoint.read(name, "weight") for name in [*checkpoint.parameters, *checkpoint.buffers]}, at)


def _converted(name: str, *, lacks: str = "", **options: Any) -> Callable[[Path], None]:
    """What zckpt makes of a fixture; without the file in which it keeps what is its own."""

    def make(at: Path) -> None:
        zckpt.convert(FIXTURES / name, at, **options)
        if lacks:
            (at / lacks).unlink()

    return make


def _hugging_face(at: Path) -> None:
    zckpt.consolidate(FIXTURES / LLAMA, at, dtype="bfloat16", max_shard_size=4096)
    (at / "config.json").write_text(json.dumps(CONFIG))


def _transformers_fsdp(at: Path) -> None:
    from torch.distributed.checkpoint import HuggingFaceStorageWriter, save

    checkpoint = zckpt.open(FIXTURES / LLAMA)
    model = {name: checkpoint.read(name, "weight") for name in checkpoint.parameters}
    names = [one.name for one in checkpoint.owners]
    moments = {f"state.{name}.exp_avg": checkpoint.read(name, "exp_avg") for name in names}
    groups = {f"param_groups.{name}.lr": 0.1 for name in names}
    save(model, storage_writer=HuggingFaceStorageWriter(path=str(at), save_distributed=True), no_dist=True)
    save({"optimizer": {**moments, **groups}}, checkpoint_id=at / "optimizer", no_dist=True)
    (at / "config.json").write_text(json.dumps(CONFIG))


def _few_bits(at: Path) -> None:
    tensors = {"q.weight": torch.ones(200, 130).to(torch.float8_e4m3fn), "q.weight_scale_inv": torch.ones(2, 2)}
    write_model(at, tensors, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})


def _plain_layer(at: Path) -> None:
    write_model(at, {"model.layers.0.mlp.up_proj.weight": torch.ones(128, 256)}, {})


def _gpt_oss(at: Path) -> None:
    """In MXFP4, as it is released: experts' codes, and their scales."""
    one, sizes = "model.layers.0", {"q": 32, "k": 16, "v": 16, "o": 32}
    tensors = {f"{one}.self_attn.{key}_proj.weight": torch.randn(rows, 32) for key, rows in sizes.items()}
    tensors |= {f"{one}.self_attn.{key}_proj.bias": torch.randn(rows) for key, rows in sizes.items()}
    tensors |= {f"{one}.{key}_layernorm.weight": torch.ones(32) for key in ("input", "post_attention")}
    tensors |= {f"{one}.mlp.router.weight": torch.randn(2, 32), f"{one}.mlp.router.bias": torch.randn(2),
                f"{one}.self_attn.sinks": torch.randn(4), "model.norm.weight": torch.ones(32)}  # fmt: skip
    tensors |= {key: torch.randn(64, 32) for key in ("model.embed_tokens.weight", "lm_head.weight")}
    for key, rows in (("gate_up", 64), ("down", 32)):
        front = f"{one}.mlp.experts.{key}_proj"
        tensors[f"{front}_blocks"] = torch.randint(0, 256, (2, rows, 1, 16), dtype=torch.uint8)
        tensors[f"{front}_scales"] = torch.randint(120, 130, (2, rows, 1), dtype=torch.uint8)
        tensors[f"{front}_bias"] = torch.randn(2, rows)
    tensors = {name: value.bfloat16() if value.is_floating_point() else value for name, value in tensors.items()}
    config = {"model_type": "gpt_oss", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
              "head_dim": 8, "num_key_value_heads": 2, "vocab_size": 64,
              "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip
    write_model(at, tensors, config)


def _adapter_of(module: str, a: tuple[int, int], b: tuple[int, int], **config: Any) -> Callable[[Path], None]:
    """An adapter whose factors of one module have these shapes."""

    def make(at: Path) -> None:
        at.mkdir()
        factors = {f"{module}.lora_A.weight": torch.ones(a), f"{module}.lora_B.weight": torch.ones(b)}
        save_file(factors, at / "adapter_model.safetensors")
        told = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
        (at / "adapter_config.json").write_text(json.dumps(told))

    return make


def _verl_lora(at: Path) -> None:
    tensors = load_file(ADAPTERS / "plain/whole.safetensors")
    at.mkdir(parents=True)
    torch.save(tensors, at / "model_world_size_1_rank_0.pt")
    (at / "lora_train_meta.json").write_text('{"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}')
    (at / "fsdp_config.json").write_text('{"FSDP_version": 2, "world_size": 1}')
    (at / "huggingface").mkdir()
    (at / "huggingface/config.json").write_text("{}")


def _lora_run(at: Path) -> None:
    """A directory of DCP that has all of a model with the adapter that is `adapter`."""
    own = load_file(at.parent / "adapter/adapter_model.safetensors")
    whole = {name.replace(".weight", ".default.weight"): one for name, one in own.items()}
    whole |= {f"{name.partition('.lora_')[0]}.base_layer.weight": torch.ones(16, 16) for name in own}
    save_file(whole, at.parent / "lora.safetensors")
    zckpt.convert(at.parent / "lora.safetensors", at, to="dcp")


def _mixtral(at: Path) -> None:
    one = "model.layers.0.block_sparse_moe.experts"
    tensors = {f"{one}.{e}.w{n}.weight": torch.ones((6, 4) if n != 2 else (4, 6)) for e in range(2) for n in (1, 2, 3)}
    sizes = {"model_type": "mixtral", "num_local_experts": 2, "hidden_size": 4, "intermediate_size": 6}
    write_model(at, tensors, sizes)


def _mixtral_new(at: Path) -> None:
    """A model that nobody has trained, as large as `llama` but for its experts."""
    moe = {f"model.layers.{layer}.block_sparse_moe.gate.weight": torch.randn(2, 16) for layer in (0, 1)}
    config = {**CONFIG, "model_type": "mixtral", "num_local_experts": 2}
    write_model(at, {**moe, "model.norm.weight": torch.ones(16)}, config)


def _llama_deeper(at: Path) -> None:
    at.mkdir()
    (at / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))


def _actions_new(at: Path) -> None:
    """A model with a second expert, of another size than the first."""
    one = "model.layers.{}.moe.experts.{}.up_proj.weight"
    sizes = [24, 7]
    tensors = {one.format(layer, e): torch.ones(size, 16) for layer in (0, 1) for e, size in enumerate(sizes)}
    write_model(at, tensors, {"experts": sizes})


def _composer(at: Path) -> None:
    """A run of two saves, in DCP, in one dict below."""
    from torch.distributed.checkpoint import save

    model, optimizer = _trained(3, 5, 2)
    names = dict(enumerate(name for name, _ in model.named_parameters()))
    state = {names[n]: one for n, one in optimizer.state_dict()["state"].items()}
    group = {**optimizer.state_dict()["param_groups"][0], "params": list(names.values())}
    held = {"model": model.state_dict(), "optimizers": {"AdamW": {"state": state, "param_groups": [group]}}}
    for batch in (4, 8):
        save({"state": held}, checkpoint_id=at / f"ep0-ba{batch}", no_dist=True)


def _rank_0(at: Path) -> None:
    """ZeRO-3 of which only the first rank's model file was saved."""
    shutil.copytree(FIXTURES / "s3_bf16_dp2_nofrozen", at)
    next(at.rglob("*rank_1_*model_states.pt")).unlink()


def _meta(at: Path) -> None:
    at.mkdir()
    zckpt.consolidate(FIXTURES / LLAMA, at / "model.pt", dtype="bfloat16", map="llama-huggingface-meta",
                      map_config=CONFIG)  # fmt: skip
    (at / "model.pt").rename(at / "consolidated.00.pth")
    params = {"dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 67, "norm_eps": 1e-6}
    (at / "params.json").write_text(json.dumps(params))


def _trainer(at: Path) -> None:
    zckpt.convert(FIXTURES / LLAMA, at, to="transformers-trainer")
    (at / "config.json").write_text(json.dumps(CONFIG))


def _vit(at: Path) -> None:
    """The Trainer's files of a model that has other names in memory; nothing where transformers 5 is not installed."""
    try:
        from transformers import ViTConfig, ViTForImageClassification, __version__
    except ImportError:
        return
    if int(__version__.partition(".")[0]) < 5:
        return
    model = ViTForImageClassification(ViTConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                                num_attention_heads=2, image_size=8, patch_size=4))  # fmt: skip
    every = list(model.parameters())
    groups = [[one for one in every if (one.ndim > 1) == is_in] for is_in in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
    for one in every:
        one.grad = torch.randn_like(one)
    optimizer.step()
    model.save_pretrained(at)
    torch.save(optimizer.state_dict(), at / "optimizer.pt")
    (at / "trainer_state.json").write_text('{"global_step": 1}')


def _node(number: int) -> Callable[[Path], None]:
    """The files of one of two nodes, each with a rank of a run."""

    def make(at: Path) -> None:
        folder = at / "global_step5"
        folder.mkdir(parents=True)
        for one in (FIXTURES / LLAMA / "global_step5").iterdir():
            rank = re.search(r"zero_pp_rank_(\d)", one.name)
            if int(rank[1] if rank else 0) == number:
                (folder / one.name).symlink_to(one)
        (at / "latest").write_text("global_step5")

    return make


def _trained(*sizes: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return trained(torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(sizes))))


def _lightning(at: Path) -> None:
    model, optimizer = _trained(3, 5, 2)
    states = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "lr_schedulers": []}
    about = {"epoch": 1, "global_step": 1, "pytorch-lightning_version": "2.5.0", "loops": {}, "callbacks": {}}
    torch.save(states | about, at)


def _several(at: Path) -> None:
    """A GAN: two models, and an optimizer of each."""
    (one, of_one), (two, of_two) = _trained(3, 5, 2), _trained(2, 7, 1)
    models = {"generator": one.state_dict(), "discriminator": two.state_dict()}
    torch.save({**models, "optimizer_g": of_one.state_dict(), "optimizer_d": of_two.state_dict()}, at)


def _average(at: Path) -> None:
    """A model with its average, an optimizer and a step."""
    model, optimizer = _trained(3, 5, 2)
    state = model.state_dict()
    torch.save({"model": state, "ema": state, "optimizer": optimizer.state_dict(), "step": 1}, at)


def _accelerate(at: Path) -> None:
    at.mkdir()
    model, optimizer = _trained(3, 5, 2)
    save_file(model.state_dict(), at / "model.safetensors")
    torch.save(optimizer.state_dict(), at / "optimizer.bin")
    torch.save({"step": 1, "torch_manual_seed": torch.get_rng_state()}, at / "random_states_0.pkl")


def _lost(at: Path) -> None:
    """A run of which a rank's optimizer file is gone."""
    shutil.copytree(FIXTURES / LLAMA, at)
    next(at.rglob("*rank_1_*optim_states.pt")).unlink()


def _base(at: Path) -> None:
    """The model of `weights.pt`, untrained, and a tower that is not in it."""
    model = torch.load(at.parent / "weights.pt", weights_only=True)
    save_file({"tower.weight": torch.ones(2), **{name: torch.zeros_like(one) for name, one in model.items()}}, at)


FOUND = {
    "run": FIXTURES / LLAMA,
    "run-stage0": FIXTURES / "s0_bf16_dp2",
    "run-experts": FIXTURES / "moe_ep2_s2_bf16_dp2",
    "run-megatron": OTHER / "mcore_legacy_tp2_pp2/ckpt",
    "run-tp": FIXTURES / "tp2_s1_bf16_dp2",
    "run-pp": FIXTURES / "pp2_s1_bf16_dp1",
    "run-lamb": FIXTURES / "own_lamb_s2_fp32_dp2",
    "universal": FIXTURES / "universal" / LLAMA,
    "out/checkpoint-4": OTHER / "trainer_ds2_gpt2/checkpoint-4",
    "epoch=0-step=5.ckpt": OTHER / "litsim_ds2/epoch=0-step=5.ckpt",
    "state": OTHER / "accel_ds2_bf16/state",
    "lightning-fsdp.ckpt": OTHER / "lightning_fsdp2/epoch=0-step=5.ckpt",
    "state-fsdp": OTHER / "accel_fsdp2_dp2/state",
    "dcp": OTHER / "dcp_fsdp2_dp2/ckpt",
    "megatron": OTHER / "mcore013_bf16_model_dp2/ckpt",
    "ckpt.pt": OTHER / "plain_adamw/ckpt.pt",
    "zero": OTHER / "zro_dp2_adamw/ckpt",
    "epoch-0_step-2": Path(__file__).parent / "formats/colossalai/ckpt",
    "d20": OTHER / "nanochat_dp2/ckpt",
    "500": OTHER / "nanotron_zero1_tp2_dp2/ckpt",
    "eight-bit.pt": OTHER / "quantised_bnb_adamw8bit/ckpt.pt",
}
"""What a program wrote, by the name that it has on the page."""

UNNAMED = {"ckpt.pt": OTHER / "plain_adamw", "zero": OTHER / "zro_dp2_adamw"}
"""Where the truth is about those whose optimizer has numbers only."""

MADE: dict[str, Callable[[Path], None]] = {
    "run-stage3": _converted(LLAMA, to="deepspeed", world_size=3, stage=3),
    "global_step_5/actor": _converted(LLAMA, to="fsdp-rank-files", groups="one", lacks="zckpt.pt"),
    "step_1000": _converted(LLAMA, to="torch-checkpointing", world_size=2, lacks="zckpt.pt"),
    "weights.pt": _saved_model,
    "out/checkpoint-5": _trainer,
    "out/checkpoint-6": _vit,
    "epoch=1.ckpt": _lightning,
    "state-plain": _accelerate,
    "gan.pt": _several,
    "ema.pt": _average,
    "llama": _hugging_face,
    "adapter": _adapter_of("base_model.model.model.layers.0.self_attn.q_proj", (2, 16), (16, 2),
                           target_modules=["q_proj"], task_type="CAUSAL_LM"),
    "deepseek-fp8": _few_bits,
    "trained": _plain_layer,
    "gpt-oss-mxfp4": _gpt_oss,
    "transformers-fsdp": _transformers_fsdp,
    "lora-run": _lora_run,
    "llama-fp8": _few_bits,
    "adapter-fp8": _adapter_of("q", (2, 130), (200, 2)),
    "adapter-experts": _adapter_of("base_model.model.model.layers.0.mlp.experts", (4, 6), (4, 4),
                                   target_parameters=["experts.down_proj"]),
    "mixtral": _mixtral,
    "mixtral-new": _mixtral_new,
    "llama-deeper": _llama_deeper,
    "actions-new": _actions_new,
    "composer": _composer,
    "run-rank0": _rank_0,
    "verl-lora/actor": _verl_lora,
    "names.txt": lambda at: at.write_text(_names("zero")) and None,
    "run-lost": _lost,
    "base.safetensors": _base,
    "node0": _node(0),
    "node1": _node(1),
    "meta": _meta,
    "resume": _converted(LLAMA, to="consolidated"),
    "saved": _converted(LLAMA, to="zckpt", world_size=2),
}  # fmt: skip


def _everything(directory: Path) -> Path:
    for name, path in FOUND.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).symlink_to(path)
    for name, make in MADE.items():
        (directory / name).parent.mkdir(exist_ok=True)
        make(directory / name)
    return directory


@pytest.fixture
def there(shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with every checkpoint of the page in it."""
    for one in shared("recipes", _everything).iterdir():
        (tmp_path / one.name).symlink_to(one)
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- what is on the page


def _sections() -> dict[str, str]:
    """The text below each heading, by the anchor of the heading."""
    found = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-"): text
            for title, text in zip(found[1::2], found[2::2], strict=True)}  # fmt: skip


def _blocks(text: str) -> list[tuple[str, str]]:
    """Language and content of each block of code."""
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def _lines(block: str) -> list[str]:
    return block.replace("\\\n", " ").splitlines()


def _table() -> tuple[list[str], list[tuple[str, list[str]]]]:
    """Anchors of the table's columns, and of each row SOURCE and what it says."""
    text = PAGE[PAGE.index("| I have") :]
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    anchors = [re.fullmatch(r"\[.*\]\(#(.*)\)", cell)[1] for cell in head[2:]]  # type: ignore[index]
    return anchors, [(row[1].strip("`"), row[2:]) for row in rows]


SECTIONS = _sections()
COLUMNS, ROWS = _table()
BLOCKS = [(language, block) for language, block in _blocks(PAGE) if SOURCE not in block]


def _of_all(anchor: str) -> tuple[str, str]:
    """The one block of a section that is about SOURCE: language and content."""
    [found] = [one for one in _blocks(SECTIONS[anchor]) if SOURCE in one[1]]
    return found


# --- live objects of a checkpoint


def _live(source: str) -> tuple[torch.nn.Module, Any]:
    """A model with the tensors of a checkpoint, and an optimizer with its groups, or several by name."""
    checkpoint = zckpt.open(source)
    model = torch.nn.Module()
    known: dict[str, torch.nn.Parameter] = {}
    for one in [*checkpoint.parameters.values(), *checkpoint.buffers.values()]:
        *path, last = one.name.split(".")
        module = model
        for step in path:
            if step not in module._modules:
                module.add_module(step, torch.nn.Module())
            module = module.get_submodule(step)
        value = torch.zeros(one.shape, dtype=getattr(torch, one.dtype))
        if one.name in checkpoint.buffers:
            module.register_buffer(last, value)
        elif one.tied_to is not None:
            module.register_parameter(last, known[one.tied_to])
        else:
            known[one.name] = torch.nn.Parameter(value, requires_grad=not one.frozen)
            module.register_parameter(last, known[one.name])
    if source in UNNAMED:
        return model, torch.optim.AdamW([{"params": [known[name] for name in one]} for one in _true_groups(source)])
    groups: dict[str | None, list[dict[str, Any]]] = {}
    for one in checkpoint.param_groups:
        trained = [known[name] for name in one.parameters if name in known]
        groups.setdefault(one.optimizer, []).append({"params": trained})
    found = {name: torch.optim.AdamW(some) for name, some in groups.items()}
    return model, found.get(None, found or None)


def _names(source: str) -> str:
    """The file that `--names` takes: the names of a source's optimizer, as it numbers them."""
    return "".join(f"{name}\n" for group in _true_groups(source) for name in group)


def _true_groups(source: str) -> list[list[str]]:
    """The names in each param group of a source whose optimizer has numbers only."""
    groups = json.loads((UNNAMED[source] / "truth.json").read_text())["param_groups"]
    return [group["params"] for group in groups]


# --- what is run


def _run(line: str) -> subprocess.CompletedProcess[str]:
    words = shlex.split(line, comments=True)
    assert words[0] == "zckpt", line
    return run(words[1:])


@pytest.mark.parametrize(("source", "cells"), ROWS, ids=[source for source, _ in ROWS])
@pytest.mark.parametrize("every", some([False], [True]), ids=["in turns", "all"])
def test_every_pair_of_the_table(source, cells, every, there):
    """Where a cell is wrong, or is missing, the test says what the row has to be."""
    first = [name for name, _ in ROWS].index(source)
    numbers = range(len(COLUMNS))
    found = {number: _cell(COLUMNS[number], source) for number in numbers if every or (first + number) % 14 == 0}
    if len(cells) != len(COLUMNS) or any(cells[number] != cell for number, cell in found.items()):
        row = [found.get(number) or _cell(COLUMNS[number], source) for number in numbers]
        pytest.fail(f"the row has to end in: | `{source}` | {' | '.join(row)} |", pytrace=False)


def _cell(anchor: str, source: str) -> str:
    """What a cell has to say: what the block of its column's section does with a source."""
    language, block = _of_all(anchor)
    text = block.replace(SOURCE, source)
    if language == "python":
        model, optimizer = _live(source)
        try:
            exec(text, {"zckpt": zckpt, "model": model, "optimizer": optimizer})
        except zckpt.UnsupportedError:
            return NO
        except zckpt.UsageError as error:
            if "AdamW cannot continue from the state" not in str(error):
                raise
            return NO
        return YES
    [cell] = {_pair(line, source) for line in _lines(text)}
    return cell


def _pair(line: str, source: str) -> str:
    """What a cell has to say of one line."""
    said = []
    done = _run(line)
    if done.returncode and "give --names FILE" in done.stderr:
        said.append(NAMES)
        Path("names.txt").unlink(missing_ok=True)
        Path("names.txt").write_text(_names(source))
        done = _run(f"{line} --names names.txt")
    if "the Trainer's two param groups" in done.stderr:
        assert done.returncode == 5, (line, done.stderr)
        said.append(GROUPS)
    elif done.returncode:
        assert done.returncode in (2, 5), (line, done.stderr)
        said.append(NO)
    return ", ".join(said) or YES


@pytest.mark.parametrize(("language", "block"), BLOCKS, ids=[block.splitlines()[0][:60] for _, block in BLOCKS])
def test_every_block_of_the_page(language, block, there):
    if language == "python":
        model, optimizer = _live("run")
        exec(block, {"zckpt": zckpt, "model": model, "optimizer": optimizer})
        return
    assert language == "sh"
    if "--map transformers" in block and not Path("out/checkpoint-6").exists():
        pytest.skip("needs transformers from version 5")
    for line in _lines(block):
        if line.startswith("python -c "):
            exec(shlex.split(line)[2])
            continue
        if line.startswith("echo "):
            subprocess.run(line, shell=True, check=True)
            continue
        if line.startswith(IN_A_PROCESS):
            words = command(shlex.split(line, comments=True)[1:])
            done = subprocess.run(words, capture_output=True, text=True, env=environment(), check=False)
        else:
            done = _run(line)
        said = re.search(r"# exit status (\d)", line)
        assert done.returncode == (int(said[1]) if said else 0), (line, done.stderr)


# --- what must be on the page


def test_every_format_that_is_read_is_a_row_and_every_one_that_is_written_a_section(there):
    found = {inspected(source)["format"] for source, _ in ROWS}
    assert found == {one.name for one in formats()} - {"accelerate"}  # whose files are of other formats
    written = {one.name for one in formats() if one.writes}
    assert written == set(re.findall(r"--to ([\w-]+)", PAGE))


def test_every_verb_is_on_the_page():
    used = {line.split()[1] for _, block in _blocks(PAGE) for line in block.splitlines() if line.startswith("zckpt ")}
    assert used == set(cli.commands) - {"formats"}
