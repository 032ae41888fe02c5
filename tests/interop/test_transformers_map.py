"""`--map transformers`: names and tensors in files and in memory, each slot as transformers itself saves weights."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

import zckpt
from tests.live import save_both
from zckpt.errors import UnsupportedError, UsageError
from zckpt.naming import installed

if int(transformers.__version__.partition(".")[0]) < 5:
    pytest.skip("transformers converts since version 5", allow_module_level=True)

from transformers.core_model_loading import revert_weight_conversion

pytestmark = pytest.mark.interop

TINY = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8, "image_size": 8,
    "patch_size": 4, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "n_group": 1,
    "decoder_ffn_dim": 16, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "q_lora_rank": 8,
    "topk_group": 1,
    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "pad_token_id": 0,
    "image_token_index": 31, "image_token_id": 31, "first_k_dense_replace": 1, "mamba_d_state": 4, "mamba_dt_rank": 4,
}  # fmt: skip
OTHERS = {
    "vit": "ForImageClassification",
    **dict.fromkeys(["mixtral", "qwen2_moe", "olmoe", "deepseek_v2", "deepseek_v3", "phimoe", "granitemoe",
                     "qwen3_moe", "minimax", "ernie4_5_moe", "glm4_moe", "flex_olmo", "afmoe",
                     "gpt_neox"], "ForCausalLM"),
    **dict.fromkeys(["deit", "vit_mae", "vit_msn", "ijepa", "clip", "siglip"], "Model"),
}  # fmt: skip


@pytest.fixture
def without_transformers(monkeypatch):
    """Let maps be made as if it were not installed."""

    def made(command, **_):
        said = json.dumps({"refused": "No module named 'transformers'"})
        return subprocess.CompletedProcess(command, 0, said, "")

    installed._made.cache_clear()
    monkeypatch.setattr(installed.subprocess, "run", made)
    yield
    installed._made.cache_clear()


def model_of(kind, head):
    config = CONFIG_MAPPING[kind]()
    for key, value in TINY.items():
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, value)
    for part in ("vision_config", "text_config"):
        for key, value in TINY.items() if hasattr(config, part) else ():
            if isinstance(getattr(getattr(config, part), key, None), int):
                setattr(getattr(config, part), key, value)
    config = CONFIG_MAPPING[kind].from_dict({**config.to_dict(), "layer_types": None, "layers_block_type": None}
                                            if kind != "jamba" else config.to_dict())  # fmt: skip
    name = transformers.AutoModel._model_mapping[type(config)].__name__.removesuffix("Model")
    torch.manual_seed(0)
    return getattr(transformers, name + head)(config)


def hold(kind, head, tmp_path):
    """Write what is in memory under the file's names, and that in memory's again; hold all slots against the truth."""
    model = model_of(kind, head)
    every = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(every.items(), lr=1e-2)
    for one in every.values():
        one.grad = torch.randn_like(one)
    optimizer.step()
    model.save_pretrained(tmp_path / "file")
    save_both(model, optimizer, tmp_path / "memory.pt")
    saved, config = load_file(tmp_path / "file/model.safetensors"), tmp_path / "file"
    done = zckpt.convert(tmp_path / "memory.pt", tmp_path / "there", to="zckpt", map="transformers", map_config=config)
    there = zckpt.open(tmp_path / "there")
    for name, tensor in saved.items():
        assert torch.equal(there.read(name, "weight") if name in there.parameters else tensor, tensor), name
    assert {*saved} <= {*there.parameters, *there.buffers}
    for slot in ("exp_avg", "exp_avg_sq"):
        moments = {name: optimizer.state[one][slot] for name, one in every.items()}
        for name, tensor in revert_weight_conversion(model, moments).items():
            assert torch.equal(there.read(name, slot), tensor), (slot, name)
    if "same names" in str(done.notes):
        return False
    zckpt.convert(tmp_path / "there", tmp_path / "back", to="zckpt", map="transformers", map_config=config)
    back = zckpt.open(tmp_path / "back")
    own = dict(model.named_parameters(remove_duplicate=False))
    assert [name for name in back.parameters if name in own] == [*own]
    for name, one in every.items():
        assert torch.equal(back.read(name, "weight"), one), name
        assert torch.equal(back.read(name, "exp_avg"), optimizer.state[one]["exp_avg"]), name
    live = model_of(kind, head)
    its = torch.optim.AdamW(live.parameters(), lr=1e-2)
    zckpt.load(tmp_path / "there", model=live, optimizer=its, map="transformers", map_config=config)
    assert all(torch.equal(one, every[name]) for name, one in live.named_parameters())
    return True


def test_every_slot_is_as_transformers_saves_it_and_comes_back(tmp_path):
    assert hold("jamba", "ForCausalLM", tmp_path)


def in_training(kind, head):
    """Return a model, an optimizer with the Trainer's groups, and what makes a step of both and returns its loss."""
    model = model_of(kind, head).train()
    for one in model.modules():
        if isinstance(one, torch.nn.Dropout):
            one.p = 0.0
    decayed = {*transformers.Trainer.get_decay_parameter_names(None, model)}
    groups = [[one for name, one in model.named_parameters() if (name in decayed) == is_in] for is_in in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1]}], lr=1e-2)
    torch.manual_seed(1)
    ids, pixels = torch.randint(1, 31, (2, 8)), torch.randn(2, 3, 8, 8)
    batch = {"input_ids": ids, "labels": ids}
    if kind == "vit":
        batch = {"pixel_values": pixels, "labels": torch.tensor([0, 1])}
    elif kind == "llava":
        ids[:, 2:6] = 31
        batch["pixel_values"] = pixels

    def step():
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, optimizer, step


TRAINED = [("qwen3_moe", "ForCausalLM"), ("vit", "ForImageClassification"), ("llava", "ForConditionalGeneration")]


def trainers(model, optimizer, run):
    """Save what a Trainer does; return the moments by name in memory."""
    model.save_pretrained(run)
    torch.save(optimizer.state_dict(), run / "optimizer.pt")
    (run / "trainer_state.json").write_text('{"global_step": 2}')
    found = {name: optimizer.state[one] for name, one in model.named_parameters()}
    return {name: (one["exp_avg"].clone(), one["exp_avg_sq"].clone()) for name, one in found.items() if one}


def loads_equal(model, directory):
    """Tell whether from_pretrained finds all, and nothing else, in a directory, and makes the same outputs."""
    found, info = type(model).from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    inputs = {"pixel_values": torch.ones(1, 3, 8, 8)} if "pixel" in model.main_input_name else {
        "input_ids": torch.arange(1, 9)[None]}  # fmt: skip
    with torch.no_grad():
        return torch.equal(found.eval()(**inputs).logits, model.eval()(**inputs).logits)


@pytest.mark.parametrize(("kind", "head"), TRAINED)
def test_a_live_model_and_from_pretrained_get_the_names_that_they_want(kind, head, tmp_path):
    """A live model goes on with the losses of the run that went on; what it has in memory becomes a file's again."""
    model, optimizer, step = in_training(kind, head)
    step()
    trainers(model, optimizer, tmp_path / "run")
    save_both(model, optimizer, tmp_path / "memory.pt")
    order = {id(one): name for name, one in model.named_parameters()}
    names = [order[id(one)] for group in optimizer.param_groups for one in group["params"]]
    options = {"config": tmp_path / "run", "slots": "all"}
    done = zckpt.consolidate(tmp_path / "memory.pt", tmp_path / "model", names=names, **options)
    assert "names of memory become those of file" in done.notes[0]
    zckpt.consolidate(tmp_path / "run", tmp_path / "of-run", slots="all")  # whose names are a file's already
    files = [load_file(tmp_path / one / "model.safetensors") for one in ("model", "of-run", "run")]
    assert files[0].keys() == files[1].keys() == files[2].keys()
    assert all(torch.equal(one[name], tensor) for one in files[:2] for name, tensor in files[2].items())
    moments = [load_file(tmp_path / one / "optimizer.safetensors") for one in ("model", "of-run")]
    assert moments[0].keys() == moments[1].keys() >= {f"exp_avg/{name}" for name in files[2] if "tower" not in name}
    assert all(torch.equal(moments[1][name], tensor) for name, tensor in moments[0].items())
    assert loads_equal(model, tmp_path / "model")
    model.train()
    losses = [step(), step()]
    other, its, go_on = in_training(kind, head)
    assert "names of file become those of memory" in zckpt.load(tmp_path / "run", model=other, optimizer=its).notes[0]
    assert [go_on(), go_on()] == losses
    config = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps({**config, "transformers_version": "5.0.0"}))
    other, its, go_on = in_training(kind, head)
    zckpt.load(tmp_path / "run", model=other)  # weights have names
    with pytest.raises(UnsupportedError, match="give --names FILE"):  # another version may have another order
        zckpt.load(tmp_path / "run", model=other, optimizer=its)
    zckpt.load(tmp_path / "run", model=other, optimizer=its, names=names)
    assert [go_on(), go_on()] == losses


@pytest.mark.parametrize(("kind", "head"), TRAINED[:2])
def test_a_trainers_numbers_get_the_names_in_memory(kind, head, tmp_path):
    """The file's names and order are others."""
    model, optimizer, step = in_training(kind, head)
    for _ in range(2):
        step()
    run = tmp_path / "checkpoint-2"
    truth = trainers(model, optimizer, run)

    def is_true(path, **options):
        done = zckpt.convert(run, path, to="zckpt", map="transformers", **options)
        assert not done.warnings
        found = zckpt.open(path)
        for name, moments in truth.items():
            for slot, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                assert torch.equal(found.read(name, slot), moment), (name, slot)
        return True

    assert is_true(tmp_path / "by-order")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, "transformers_version": "5.0.0"}))
    with pytest.raises(UnsupportedError, match="give --names FILE"):  # another version may have another order
        zckpt.convert(run, tmp_path / "no", to="zckpt", map="transformers")
    names = list(truth)
    assert is_true(tmp_path / "by-names", names=names)
    with pytest.raises(UsageError, match="do not match the optimizer"):
        zckpt.convert(run, tmp_path / "no", to="zckpt", map="transformers", names=names[1:])
    with pytest.raises(UsageError, match="add --map=transformers"):
        zckpt.convert(run, tmp_path / "no", to="zckpt", names=names)
    assert not (tmp_path / "no").exists()


def by_table(kind, head, tmp_path):
    """Hold what the table says against what transformers saves, there and back; return the notes."""
    model = model_of(kind, head)
    table = json.loads(Path(installed.__file__).with_name("transformers.json").read_text())
    if type(model).__name__ in table["refused"]:
        pytest.skip(table["refused"][type(model).__name__])
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    for one in model.parameters():
        one.grad = torch.randn_like(one)
    optimizer.step()
    model.save_pretrained(tmp_path / "run")
    save_both(model, optimizer, tmp_path / "memory.pt")
    done = zckpt.consolidate(tmp_path / "memory.pt", tmp_path / "file", config=tmp_path / "run", slots="all")
    found, truth = (load_file(tmp_path / one / "model.safetensors") for one in ("file", "run"))
    assert found.keys() >= truth.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())
    zckpt.convert(
        tmp_path / "memory.pt", tmp_path / "named", to="zckpt", map="transformers", map_config=tmp_path / "run"
    )
    zckpt.convert(tmp_path / "named", tmp_path / "back", to="zckpt", map="transformers", map_config=tmp_path / "run")
    back, own = zckpt.open(tmp_path / "back"), dict(model.named_parameters(remove_duplicate=False))
    assert [name for name in back.parameters if name in own] == [*own]
    assert [name for group in back.param_groups for name in group.parameters] == [*dict(model.named_parameters())]
    for name, one in model.named_parameters():
        assert torch.equal(back.read(name, "weight"), one), name
        assert torch.equal(back.read(name, "exp_avg"), optimizer.state[one]["exp_avg"]), name
    return done.notes


def test_consolidate_of_a_model_whose_only_other_name_is_tied_away(tmp_path):
    config = CONFIG_MAPPING["gpt_neox"](
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.GPTNeoXForCausalLM(config)
    model.save_pretrained(tmp_path / "run")
    zckpt.consolidate(tmp_path / "run", tmp_path / "model")
    assert loads_equal(model, tmp_path / "model")


@pytest.mark.usefixtures("without_transformers")
def test_a_table_stands_in_for_transformers(tmp_path):
    """Of an optimizer's numbers it says nothing."""
    assert "by zckpt's table): names of memory become" in by_table("qwen3_moe", "ForCausalLM", tmp_path)[0]
    model, optimizer, step = in_training("qwen3_moe", "ForCausalLM")
    step()
    moments = trainers(model, optimizer, tmp_path / "trainer")
    with pytest.raises(UnsupportedError, match="give --names FILE"):
        zckpt.convert(tmp_path / "trainer", tmp_path / "no", to="zckpt", map="transformers")
    zckpt.convert(tmp_path / "trainer", tmp_path / "there", to="zckpt", map="transformers", names=[*moments])
    there = zckpt.open(tmp_path / "there")
    assert all(torch.equal(there.read(name, "exp_avg"), one) for name, (one, _) in moments.items())
    config = json.loads((tmp_path / "run/config.json").read_text())
    (tmp_path / "run/config.json").write_text(json.dumps({**config, "architectures": ["QwenOfNextYear"]}))
    with pytest.raises(UsageError, match="needs transformers"):
        zckpt.convert(tmp_path / "run", tmp_path / "no", to="zckpt", map="transformers")
    done = zckpt.consolidate(tmp_path / "memory.pt", tmp_path / "as-it-was", config=tmp_path / "run")
    assert "names are as they were" in done.notes[0]


@pytest.mark.usefixtures("without_transformers")
def test_a_mean_and_a_model_with_its_adapter_have_the_names_of_files_too(tmp_path):
    model = model_of("qwen3_moe", "ForCausalLM")
    model.save_pretrained(tmp_path / "run")
    torch.save(model.state_dict(), tmp_path / "memory.pt")
    truth = load_file(tmp_path / "run/model.safetensors")
    assert not model.state_dict().keys() >= truth.keys()
    mean = zckpt.average([tmp_path / "memory.pt", tmp_path / "run"], tmp_path / "mean", config=tmp_path / "run")
    assert "names of memory become those of file" in mean.notes[0]
    assert loads_equal(model, tmp_path / "mean")
    for kind, own in {
        "heads": {"target_modules": ["q_proj"]},
        "experts": {"target_parameters": ["mlp.experts.down_proj"]},
    }.items():
        adapted = get_peft_model(model_of("qwen3_moe", "ForCausalLM"), LoraConfig(r=2, init_lora_weights=False, **own))
        adapted.save_pretrained(tmp_path / kind)
        merged = adapted.merge_and_unload()
        done = zckpt.merge_adapter(
            tmp_path / "memory.pt", tmp_path / kind, tmp_path / f"m-{kind}", config=tmp_path / "run"
        )
        found = load_file(tmp_path / f"m-{kind}/model.safetensors")
        if kind == "heads":
            merged.save_pretrained(tmp_path / "truth")
            wanted = load_file(tmp_path / "truth/model.safetensors")
        else:
            assert "names are as they were, of memory" in done.notes[0]
            wanted = merged.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name], one, atol=1e-6) for name, one in wanted.items())


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "head"), {**dict(TRAINED), **OTHERS}.items())
@pytest.mark.usefixtures("without_transformers")
def test_the_table_says_what_transformers_does(kind, head, tmp_path):
    by_table(kind, head, tmp_path)


@pytest.mark.nightly
def test_a_trainer_goes_on_from_the_names_in_memory(tmp_path):
    """The Trainer loads its own files by names in memory, and leaves out what has other names there."""
    seen, data = (
        [],
        [{"input_ids": ids, "labels": ids} for ids in (torch.arange(8) * 7 + torch.arange(32)[:, None]) % 32],
    )

    class Seeing(transformers.Trainer):
        def training_step(self, *given, **named):
            seen.append(super().training_step(*given, **named))
            return seen[-1]

    def losses(run, **options):
        arguments = transformers.TrainingArguments(
            str(tmp_path / run), max_steps=3, save_steps=2, per_device_train_batch_size=2, learning_rate=1e-2,
            report_to=[], use_cpu=True, disable_tqdm=True, weight_decay=0.1,
        )  # fmt: skip
        model = model_of("qwen3_moe", "ForCausalLM")
        if options:
            for one in model.parameters():
                one.data += 0.1
        seen.clear()
        Seeing(model, arguments, train_dataset=data).train(**options)
        return [one.item() for one in seen]

    whole = losses("run")
    saved, again = tmp_path / "run/checkpoint-2", tmp_path / "checkpoint-2"
    zckpt.convert(saved, again, to="transformers-trainer", map="transformers")
    assert losses("stock", resume_from_checkpoint=str(saved)) != whole[2:]  # else this is needed no longer
    assert losses("ours", resume_from_checkpoint=str(again)) == whole[2:]


def test_a_process_of_its_own_makes_the_same_map(monkeypatch):
    model = model_of("vit", "ForImageClassification")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    here = installed.transformers_map(config)
    installed._made.cache_clear()
    monkeypatch.setattr(installed, "subprocess", subprocess)
    assert installed.transformers_map(config) == here
    assert installed._made.cache_info().misses == 1


def test_what_cannot_be_made_is_refused_in_one_line(tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    with pytest.raises(UsageError, match="needs the configuration"):
        zckpt.consolidate(tmp_path / "model.pt", tmp_path / "out.safetensors", map="transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing_known"}))
    with pytest.raises(UnsupportedError, match="no model of type nothing_known"):
        zckpt.consolidate(tmp_path / "model.pt", tmp_path / "out.safetensors", map="transformers")
    assert not (tmp_path / "out.safetensors").exists()
