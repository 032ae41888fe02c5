"""Documents of diff, series and verify in the shapes that their verbs print, for the pages made of them."""

from __future__ import annotations

import random
from typing import Any

import zckpt

HOSTILE_NAME = '</script><script>document.title="taken"</script>.weight'


def about(source: str, step: int | None = 5) -> dict[str, Any]:
    return {"source": source, "format": "deepspeed", "step": step, "world_size": 2, "zero_stage": 2}


def difference(name: str, slot: str, rel_l2: object, **other: Any) -> dict[str, Any]:
    """An entry of `different`; figures that are not given follow from `rel_l2`."""
    worst = rel_l2 if isinstance(rel_l2, float) else 0.5
    return {
        "name": name, "slot": slot, "num_different": 120, "numel": 1024, "max_abs": worst / 3, "max_rel": rel_l2,
        "rel_l2": rel_l2, "cosine": 1 - worst / 50, "max_ulp": 12_345, "nan_a": 0, "nan_b": 0, "inf_a": 0, "inf_b": 0,
        "first": 17, "dtype_a": "float32", "dtype_b": "float32", "shape_a": [32, 32], "shape_b": [32, 32],
        "histogram": {"decades": list(range(-9, 4)), "counts": [0, 0, 3, 9, 20, 40, 31, 12, 4, 1, 0, 0, 0]},
    } | other  # fmt: skip


def diff(layers: int = 6) -> dict[str, Any]:
    """Changes that grow with the layer; a NaN, another shape, a hostile name; two layers equal in the masters."""
    random_ = random.Random(7)
    different, equal = [], []
    for layer in range(layers):
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"):
            for slot, scale in (("weight", 1e-3), ("master", 1e-4), ("exp_avg", 0.3), ("exp_avg_sq", 0.05)):
                name = f"model.layers.{layer}.{part}.weight"
                if slot == "master" and layer < 2:
                    equal.append({"name": name, "slot": slot, "numel": 1024})
                else:
                    different.append(difference(name, slot, scale * 10 ** (layer / 3 + random_.random() - 2)))
    none = dict.fromkeys(("num_different", "max_abs", "max_rel", "cosine", "max_ulp", "first", "histogram"))
    different += [
        difference("model.embed_tokens.weight", "master", "nan", nan_b=3, max_abs="nan", cosine="nan"),
        difference("lm_head.weight", "weight", "inf", inf_b=1, max_ulp=None, dtype_b="bfloat16"),
        difference("model.norm.weight", "master", None, **none | {"shape_b": [16]}),
        difference(HOSTILE_NAME, "exp_avg", 0.01),
    ]
    return {
        "a": about("runs/base/global_step5"), "b": about("runs/tuned/global_step9", 9), "equal": False,
        "compared": {"parameters": 4 * layers + 4, "slots": 16 * layers + 4, "elements": 99_000, "nbytes": 396_000},
        "only_in_a": [{"name": "old.head.weight", "slot": None}],
        "only_in_b": [{"name": "model.norm.weight", "slot": "momentum_buffer"}],
        "different": different, "equal_slots": equal,
        "metadata": [{"key": "param_groups[0].lr", "a": 0.001, "b": 0.0005}, {"key": "<b>seed", "a": None, "b": 3}],
        "warnings": ["a warning with <angle> brackets"],
    }  # fmt: skip


def same() -> dict[str, Any]:
    """A diff that found nothing."""
    return diff() | {"equal": True, "different": [], "only_in_a": [], "only_in_b": [], "metadata": [], "warnings": []}


def series(names: int = 30, points: int = 8) -> dict[str, Any]:
    random_ = random.Random(3)
    lines = []
    for i in range(names):
        for slot, scale in (("master", 1.0), ("exp_avg", 0.02)):
            norm = [scale * (3 + i / 4) * (1 + 0.05 * t + 0.02 * random_.random()) for t in range(points)]
            change = [
                None,
                *(scale * (0.2 + i / 40) / (t + 1) * (0.8 + random_.random() / 3) for t in range(points - 1)),
            ]
            lines.append({"name": f"model.layers.{i}.mlp.weight", "slot": slot, "norm": norm, "change": change})
    lines.append(
        {"name": HOSTILE_NAME, "slot": "master", "norm": [1.0] * points, "change": [None, "nan", *[0.0] * (points - 2)]}
    )
    steps = [100 * (t + 1) for t in range(points)]
    return {"sources": [about(f"run/global_step{s}", s) for s in steps], "steps": steps, "series": lines}


def finding(code: str, severity: str, title: str, message: str, **other: Any) -> dict[str, Any]:
    empty = {"file": None, "ranks": [], "parameters": [], "expected": None, "found": None, "advice": None}
    return {"code": code, "severity": severity, "title": title, "message": message, **empty, **other}


def verification(
    findings: list[dict[str, Any]], source: str = "run/global_step7", *, deep: bool = True
) -> dict[str, Any]:
    return {
        "source": source, "checkpoint": source, "format": "deepspeed", "deep": deep,
        "sound": not any(one["severity"] == "error" for one in findings),
        "checked": {"files": 3, "parameters": 20, "elements": 19_968, "nbytes": 69_888},
        "fingerprint": "zckpt1:0123456789abcdef0123456789abcdef", "findings": findings,
    }  # fmt: skip


def layout_map(checkpoint: zckpt.Checkpoint, **options: Any) -> dict[str, Any]:
    """What pages and pictures of a map are drawn from."""
    return zckpt.map(checkpoint, **options).as_dict()


def recorded(name: str, step: int | None, **other: Any) -> dict[str, Any]:
    return {
        "path": f"run/{name}", "name": name, "step": step, "saved": "2026-11-24T15:58:00+00:00", "nbytes": 4_210_000,
        "format": "deepspeed", "world_size": 8, "sound": True, "why": None, "latest": False, "named_by": [],
        "fingerprint": None, "equal": [],
    } | other  # fmt: skip


def history() -> dict[str, Any]:
    """Two series, one with steps and one without; one that is not sound, of no format; a hostile name."""
    every = [
        recorded("a/step100", 100),
        recorded("a/step200", 200, sound=False, why="ZC-101: <b>missing", format=None, world_size=None, nbytes=0),
        recorded("a/step300", 300, latest=True, named_by=["a/latest"]),
        recorded("final", None, equal=["a/step300"]),
        recorded(HOSTILE_NAME, None, named_by=["link"]),
    ]
    left = ["run/.step400.zckpt-partial"]
    return {"run": "runs/base", "checkpoints": every, "nbytes": 16_840_000, "leftovers": left}
