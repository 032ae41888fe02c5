"""The map as a picture: well-formed, to scale, bounded in size, and written by `zckpt map`."""

from __future__ import annotations

import sys
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.cli.console import FIXTURES, refused, succeeded
from tests.folders import names_in
from tests.refusals import refusing
from tests.report.documents import layout_map
from tests.report.synthetic import HOSTILE, flat, large, per_parameter
from zckpt.errors import UsageError
from zckpt.formats import open_checkpoint
from zckpt.report.picture import png, svg
from zckpt.state import Checkpoint

SOURCE = "fixtures/s2_bf16_dp2"
SVG = "{http://www.w3.org/2000/svg}"
MASTER = "#2d98bd"


def drawn(checkpoint: Checkpoint, **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(svg(layout_map(checkpoint, **options)))


def boxes(picture: ElementTree.Element, fill: str) -> list[tuple[float, float, float, float]]:
    keys = ("x", "y", "width", "height")
    found = [one for one in picture.iter(f"{SVG}rect") if one.get("fill") == fill and one.get("x")]
    return [tuple(float(one.get(key, 0)) for key in keys) for one in found]


def texts(picture: ElementTree.Element) -> list[str]:
    return [one.text or "" for one in picture.iter(f"{SVG}text")]


def test_runs_are_to_scale():
    picture = drawn(flat({"a": (300,), "b": (100,)}, 2), slots=["master"])
    across = [one for one in boxes(picture, MASTER) if 130 <= one[0] < 1130]
    assert [(x, width) for x, _, width, _ in across] == [(130.0, 500.0), (630.0, 500.0)]
    assert across[0][1] < across[1][1]


def test_padding_and_frozen_parameters_are_hatched():
    picture = drawn(open_checkpoint(FIXTURES / "s3_bf16_dp3"))
    assert len(boxes(picture, "url(#padding)")) > 2
    assert len(boxes(picture, "url(#frozen)")) > 2
    assert {"frozen", "padding", "group 0"} <= set(texts(picture))


def test_picture_says_what_it_shows():
    picture = drawn(open_checkpoint(FIXTURES / "hf_llama_s2_bf16_dp2"))
    assert picture.get("role") == "img"
    title, description = picture.findtext(f"{SVG}title"), picture.findtext(f"{SVG}desc")
    assert (title or "").endswith("hf_llama_s2_bf16_dp2/global_step5")
    assert description == "3 rows of ranks or files, 20 parameters to scale"
    assert {"weight", "master", "exp_avg", "exp_avg_sq", "model file", "rank 0", "rank 1"} <= set(texts(picture))


def test_labels_do_not_overlap():
    picture = drawn(open_checkpoint(FIXTURES / "hf_llama_s2_bf16_dp2"))
    lines: dict[str, list[tuple[float, float]]] = {}
    for one in picture.iter(f"{SVG}text"):
        size, x = float(one.get("font-size", 0)), float(one.get("x", 0))
        if one.get("text-anchor") != "end":
            lines.setdefault(one.get("y", ""), []).append((x, x + 0.55 * size * len(one.text or "")))
    for spans in lines.values():
        ordered = sorted(spans)
        assert all(a[1] <= b[0] for a, b in pairwise(ordered))


def test_a_thousand_ranks_are_bands_and_the_picture_stays_small():
    checkpoint = large(layers=50, per_layer=40, ranks=1024)
    text = svg(layout_map(checkpoint))
    assert len(text) < 60_000
    picture = ElementTree.fromstring(text)
    assert "ranks 0\u201331" in texts(picture)
    assert "ranks 992\u20131023" in texts(picture)
    assert float(picture.get("height", 0)) < 800


def test_shares_of_every_rank_fill_every_band():
    shapes = {f"layers.{i}.weight": (64, 64) for i in range(40)}
    picture = drawn(per_parameter(shapes, 128))
    bands = {y for x, y, _, _ in boxes(picture, MASTER) if 130 <= x < 1130}
    assert len(bands) == len([text for text in texts(picture) if text.startswith("ranks ")])


def test_hostile_names_are_text():
    checkpoint = flat(dict.fromkeys(HOSTILE, (40, 50)), 2)
    checkpoint.source = HOSTILE[0]
    picture = drawn(checkpoint)
    assert list(picture.iter(f"{SVG}script")) == []
    assert "script" in (picture.findtext(f"{SVG}title") or "")


def test_nothing_to_draw_is_a_picture_all_the_same():
    assert drawn(Checkpoint(source="none", format="deepspeed")).tag == f"{SVG}svg"


def test_png_is_the_same_picture_at_twice_the_size():
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    layout = layout_map(open_checkpoint(FIXTURES / "s2_bf16_dp4"))
    data = png(layout)
    assert data.startswith(b"\x89PNG")
    pixels = imread(BytesIO(data))
    height = float(ElementTree.fromstring(svg(layout)).get("height", 0))
    assert pixels.shape[:2] == (2 * height, 2560)
    weight = tuple(round(255 * float(part)) for part in pixels[2 * 116, 2 * 300][:3])
    assert weight == (0x3F, 0x6F, 0xA6)


def test_png_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with refusing(UsageError, r"pip install 'zckpt\[png\]'"):
        png(layout_map(open_checkpoint(FIXTURES / "s2_bf16_dp2")))


def test_map_command_writes_both_kinds():
    pytest.importorskip("matplotlib")
    for suffix, start in (("svg", b"<svg"), ("PNG", b"\x89PNG")):
        done = succeeded(f"map {SOURCE} map.{suffix} --slots master,exp_avg")
        assert (done.stdout, done.stderr) == ("", "")
        assert Path(f"map.{suffix}").read_bytes().startswith(start)
    assert "exp_avg_sq" not in Path("map.svg").read_text()


def test_map_command_refuses_what_it_cannot_do():
    refused(2, f"map {SOURCE} map.pdf", words=".svg or .png")
    refused(2, f"map {SOURCE} map.svg --slots nothing", words=("no such slot", "exp_avg"))
    there = Path("there.svg")
    there.write_text("mine")
    refused(4, f"map {SOURCE} there.svg", words=("already exists", "--overwrite"))
    assert there.read_text() == "mine"
    succeeded(f"map {SOURCE} there.svg --overwrite")
    assert there.read_text().startswith("<svg")
    assert names_in() == ["there.svg"]


def test_inspect_writes_a_page_beside_what_it_prints():
    done = succeeded(f"inspect {SOURCE} --html page.html")
    assert done.stdout == succeeded(f"inspect {SOURCE}").stdout
    assert Path("page.html").read_text("utf-8").startswith("<!DOCTYPE html>")
    refused(4, f"inspect {SOURCE} --html page.html", words=("already exists", "--overwrite"))
    succeeded(f"inspect {SOURCE} --html page.html --overwrite")
