"""`--map transformers`: names and tensors in files and in memory, each slot as transformers itself saves weights."""

from __future__ import annotations

import json
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

import zckpt
from tests.interop.test_transformers_families import families
from tests.live import equal
from tests.logical import assert_same_tree
from tests.pairwise import some
from zckpt.errors import UnsupportedError, UsageError
from zckpt.formats.transformers_trainer.architectures import is_converted
from zckpt.naming import installed, traced

pytestmark = pytest.mark.interop

CONVERTED = [
    "vit", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "phimoe", "granitemoe",
    "minimax", "ernie4_5_moe", "glm4_moe", "flex_olmo", "afmoe", "gpt_neox", "llava", "deit", "vit_mae", "vit_msn",
    "ijepa", "clip", "siglip",
]  # fmt: skip
"""Families whose files have other names than memory."""


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


def numbered(saved):
    """The names in memory, in the optimizer's order."""
    return [name for group in saved.optimizer.param_groups for name in group["param_names"]]


def assert_loads(model, directory):
    """Let `from_pretrained` find all, and nothing else, in a directory."""
    found, info = type(model).from_pretrained(directory, output_loading_info=True)
    assert not any(info.values()), info
    assert equal(found, model)


def change_config(run, **changes):
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("family", some(["qwen3_moe"], ["vit", "llava"]))
def test_a_file_and_a_live_model_get_the_names_that_they_want(family, tmp_path):
    """Of another version that made the file, parameters may have another order: they need names."""
    saved = families.Saved.of(family, tmp_path)
    done = zckpt.consolidate(saved.memory, tmp_path / "model", config=saved.run, slots="all")
    assert "names of memory become those of file" in done.notes[0]
    zckpt.consolidate(saved.run, tmp_path / "of-run", slots="all")  # whose names are a file's already
    *ours, theirs = (
        load_file(one / "model.safetensors") for one in (tmp_path / "model", tmp_path / "of-run", saved.run)
    )
    assert_same_tree(ours, [theirs, theirs])
    moments = [load_file(tmp_path / one / "optimizer.safetensors") for one in ("model", "of-run")]
    assert_same_tree(moments[0], moments[1])
    assert moments[0].keys() >= {f"exp_avg/{name}" for name in theirs if "tower" not in name}

    model, optimizer, step = families.in_training(family)
    done = zckpt.load(saved.run, model=model, optimizer=optimizer)
    assert "names of file become those of memory" in done.notes[0]
    change_config(saved.run, transformers_version="5.0.0")
    model, optimizer, step = families.in_training(family)
    zckpt.load(saved.run, model=model)  # weights have names
    with pytest.raises(UnsupportedError, match="give --names FILE"):
        zckpt.load(saved.run, model=model, optimizer=optimizer)
    zckpt.load(saved.run, model=model, optimizer=optimizer, names=numbered(saved))
    assert [step(2), step(3)] == [saved.step(2), saved.step(3)]


@pytest.mark.parametrize("family", ["qwen3_moe", "vit"])
def test_a_trainers_numbers_get_the_names_in_memory(family, tmp_path):
    """The file's names and order are others."""
    saved = families.Saved.of(family, tmp_path)
    names, convert = numbered(saved), partial(zckpt.convert, saved.run, to="zckpt")

    def is_true(path, **options):
        assert not convert(path, map="transformers", **options).warnings
        found = zckpt.open(path)
        for name, one in saved.model.named_parameters():
            for slot in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(found.read(name, slot), saved.optimizer.state[one][slot]), (name, slot)
        return True

    assert is_true(tmp_path / "by-order")
    change_config(saved.run, transformers_version="5.0.0")
    no = tmp_path / "no"
    with pytest.raises(UnsupportedError, match="give --names FILE"):  # another version may have another order
        convert(no, map="transformers")
    assert is_true(tmp_path / "by-names", names=names)
    with pytest.raises(UsageError, match="do not match the optimizer"):
        convert(no, map="transformers", names=names[1:])
    with pytest.raises(UsageError, match="add --map=transformers"):
        convert(no, names=names)
    assert not no.exists()
    torch.save({**torch.load(saved.run / "optimizer.pt"), "state": {}}, saved.run / "optimizer.pt")  # plain SGD's
    convert(tmp_path / "stateless", map="transformers", names=names)
    assert zckpt.open(tmp_path / "stateless").grouped == names


def test_consolidate_of_a_model_whose_only_other_name_is_tied_away(tmp_path):
    config = CONFIG_MAPPING["gpt_neox"](
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.GPTNeoXForCausalLM(config)
    model.save_pretrained(tmp_path / "run")
    zckpt.consolidate(tmp_path / "run", tmp_path / "model")
    assert_loads(model, tmp_path / "model")


@pytest.mark.usefixtures("without_transformers")
def test_a_table_stands_in_for_transformers(tmp_path):
    """Of an optimizer's numbers it says nothing."""
    saved = families.Saved.of("qwen3_moe", tmp_path)
    families.there_and_back(saved, tmp_path)
    done = zckpt.consolidate(saved.memory, tmp_path / "model", config=saved.run)
    assert "by zckpt's table): names of memory become" in done.notes[0]
    with pytest.raises(UnsupportedError, match="give --names FILE"):
        zckpt.convert(saved.run, tmp_path / "no", to="zckpt", map="transformers")
    zckpt.convert(saved.run, tmp_path / "named", to="zckpt", map="transformers", names=numbered(saved))
    named = zckpt.open(tmp_path / "named")
    for name, one in saved.model.named_parameters():
        assert torch.equal(named.read(name, "exp_avg"), saved.optimizer.state[one]["exp_avg"]), name
    change_config(saved.run, architectures=["QwenOfNextYear"])
    with pytest.raises(UsageError, match="needs transformers"):
        zckpt.convert(saved.run, tmp_path / "no", to="zckpt", map="transformers")
    done = zckpt.consolidate(saved.memory, tmp_path / "as-it-was", config=saved.run)
    assert "names are as they were" in done.notes[0]


@pytest.mark.usefixtures("without_transformers")
def test_a_mean_and_a_model_with_its_adapter_have_the_names_of_files_too(torch_file, tmp_path):
    model = families.model_of("qwen3_moe")
    model.save_pretrained(tmp_path / "run")
    path = torch_file(model.state_dict())
    truth = load_file(tmp_path / "run/model.safetensors")
    assert not model.state_dict().keys() >= truth.keys()
    mean = zckpt.average([path, tmp_path / "run"], tmp_path / "mean", config=tmp_path / "run")
    assert "names of memory become those of file" in mean.notes[0]
    assert_loads(model, tmp_path / "mean")
    for kind, own in {
        "heads": {"target_modules": ["q_proj"]},
        "experts": {"target_parameters": ["mlp.experts.down_proj"]},
    }.items():
        adapted = get_peft_model(families.model_of("qwen3_moe"), LoraConfig(r=2, init_lora_weights=False, **own))
        adapted.save_pretrained(tmp_path / kind)
        merged = adapted.merge_and_unload()
        done = zckpt.merge_adapter(path, tmp_path / kind, tmp_path / f"m-{kind}", config=tmp_path / "run")
        found = load_file(tmp_path / f"m-{kind}/model.safetensors")
        assert "names of memory become those of file" in done.notes[0]
        merged.save_pretrained(tmp_path / "truth")
        wanted = load_file(tmp_path / "truth/model.safetensors")
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[name], one, atol=1e-6) for name, one in wanted.items())


@pytest.mark.usefixtures("without_transformers")
def test_a_type_with_another_types_class_has_names_of_its_own():
    """Transformers makes EXAONE of Llama's class, and Sarvam's experts of GLM's."""
    made = installed.transformers_map({"model_type": "exaone", "architectures": ["LlamaForCausalLM"]})
    assert made["rules"][0] == {"file": "transformer.wte.weight", "memory": "model.embed_tokens.weight"}
    glm = {"model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"]}
    assert installed.transformers_map(glm)["rules"]
    with pytest.raises(UsageError, match="cuts into parts that only a configuration tells"):
        installed.transformers_map({**glm, "model_type": "sarvam_moe"})


@pytest.mark.nightly
@pytest.mark.parametrize("family", CONVERTED)
@pytest.mark.usefixtures("without_transformers")
def test_the_table_says_what_transformers_does(family, tmp_path):
    saved = families.Saved.of(family, tmp_path)
    table = json.loads(Path(installed.__file__).with_name("transformers.json").read_text())
    if (name := type(saved.model).__name__) in table["refused"]:
        pytest.skip(table["refused"][name])
    families.loads(saved, tmp_path)
    families.there_and_back(saved, tmp_path)


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
        model = families.model_of("qwen3_moe")
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
    model = families.model_of("vit")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    here = installed.transformers_map(config)
    installed._made.cache_clear()
    monkeypatch.setattr(installed, "subprocess", subprocess)
    assert installed.transformers_map(config) == here
    assert installed._made.cache_info().misses == 1


def test_what_cannot_be_made_is_refused_in_one_line(torch_file, tmp_path):
    path = torch_file({"weight": torch.zeros(2)})
    with pytest.raises(UsageError, match="needs the configuration"):
        zckpt.consolidate(path, tmp_path / "out.safetensors", map="transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nothing_known"}))
    with pytest.raises(UnsupportedError, match="no model of type nothing_known"):
        zckpt.consolidate(path, tmp_path / "out.safetensors", map="transformers")
    assert not (tmp_path / "out.safetensors").exists()


def test_what_no_map_says_is_named():
    letters = traced.Letters()
    one = traced.Traced(letters, [[letters.new(2)]], frozenset(["w"]))
    for what, message in ((lambda: one.new_zeros(3), "it calls new_zeros"), (lambda: one[0], "by their index")):
        with pytest.raises(traced.NoMapError, match=message):
            what()
    assert not hasattr(one, "of_next_year")


@pytest.mark.parametrize("family", ["vit", "beit", "deit"])
def test_no_number_gets_another_parameters_name(family, tmp_path):
    """Of equal shapes in a layer, the file's names are in another order than those in memory."""
    saved = families.Saved.of(family, tmp_path)
    truth = [(one, saved.optimizer.state[one]["exp_avg"]) for one in saved.model.parameters()]
    found = zckpt.open(saved.run)
    for name, one in found.parameters.items():
        if "exp_avg" in one.slots:
            weight, moment = found.read(name, "weight"), found.read(name, "exp_avg")
            assert any(torch.equal(weight, w) and torch.equal(moment, m) for w, m in truth), name
    assert found.unnamed
    assert any("--names" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("kind", "version", "converted"),
    [("vit", "5.23.0", True), ("vit", "4.57.1", False), ("llama", "5.23.0", False), ("llama", "9.0", False),
     ("of_next_year", "9.0.0", True), ("of_next_year", "5.0.0", False), ("vit", None, False), ("vit", "?", False)],
)  # fmt: skip
def test_type_and_version_tell(kind, version, converted):
    config = {"model_type": kind, **({} if version is None else {"transformers_version": version})}
    assert is_converted(config) == converted
    parts = {"model_type": "of_mine", "vision_config": config, "transformers_version": version}
    assert is_converted(json.loads(json.dumps(parts))) == (converted or version in ("9.0", "9.0.0", "4.57.1"))
