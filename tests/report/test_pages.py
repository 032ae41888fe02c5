"""The pages in a real browser: nothing thrown, nothing loaded, everything found, by keyboard and by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.pairwise import some
from tests.report import documents
from tests.report.conftest import Opened
from tests.report.documents import layout_map
from tests.report.synthetic import HOSTILE, flat, large
from zckpt.formats import open_checkpoint
from zckpt.operations.inspect import inspect
from zckpt.operations.stats import stats
from zckpt.report.page import diff_page, inspect_page, series_page, stats_page, verify_page
from zckpt.report.page.history import history_page
from zckpt.report.page.markup import embedded
from zckpt.state import Checkpoint

Show = Callable[..., Opened]
FIXTURES = Path(__file__).parents[2] / "fixtures"
LLAMA = FIXTURES / "hf_llama_s2_bf16_dp2"
FINDINGS = [
    documents.finding(
        "ZC-301", "error", "NaN", "3 elements are NaN", ranks=[1], parameters=["model.norm.weight"],
        file="global_step5/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", expected="finite", found="3 NaN",
        advice="resume from an earlier checkpoint",
    ),
    documents.finding("ZC-104", "warning", "Steps", "rank 0 is at another step", ranks=[0]),
    documents.finding("ZC-900", "note", "Left over", "<i>a file</i> of a larger run"),
]  # fmt: skip


def inspection(checkpoint: Checkpoint) -> str:
    return inspect_page(inspect(checkpoint).as_dict(), layout_map(checkpoint))


def inspected(name: str) -> str:
    return inspection(open_checkpoint(FIXTURES / name))


MADE: dict[str, Callable[[], str]] = {
    "inspect": lambda: inspection(open_checkpoint(LLAMA)),
    "diff": lambda: diff_page(documents.diff()),
    "equal": lambda: diff_page(documents.same()),
    "series": lambda: series_page(documents.series()),
    "verify": lambda: verify_page(documents.verification(FINDINGS, str(LLAMA)), layout_map(open_checkpoint(LLAMA))),
    "verify without a map": lambda: verify_page(documents.verification(FINDINGS)),
    "sound": lambda: verify_page(documents.verification([], deep=False), layout_map(open_checkpoint(LLAMA))),
    "history": lambda: history_page(documents.history()),
    "stats": lambda: stats_page(stats(LLAMA).as_dict()),
}


@cache
def page_of(kind: str) -> str:
    return MADE[kind]()


def walk(opened: Opened) -> None:
    opened.locator("#map-stage").focus()
    opened.press("ArrowRight", "ArrowDown", "End", "Enter", "Home", "+", "-", "Escape")
    opened.assert_clean()


def test_a_file_without_ranks_renders(show):
    walk(show(inspected("other/plain_adamw/ckpt.pt")))


CONTRAST = """
() => {
  const parts = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (rgb) => [0.2126, 0.7152, 0.0722].reduce((sum, part, i) => sum + part * linear(rgb[i] / 255), 0);
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length === 3 || found[3] === 1) return found;
    }
    return [255, 255, 255];
  };
  const poor = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const parent = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !parent.checkVisibility() || parent.closest("script, :disabled")) continue;
    const style = getComputedStyle(parent);
    const [a, b] = [light(parts(parent.closest("svg") ? style.fill : style.color)), light(ground(parent))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) poor.push(`${ratio.toFixed(2)} ${walker.currentNode.data.trim().slice(0, 30)}`);
  }
  return poor;
}
"""


def assert_readable(page: Opened) -> None:
    """Nothing is wider than the narrow screen that it is on, and text stands out from its ground, in light and dark."""
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    page.set_viewport_size({"width": 1280, "height": 900})
    for scheme, ground in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 27)")):
        page.emulate_media(color_scheme=scheme)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == ground
        assert page.evaluate(CONTRAST) == []


def search(opened: Opened, text: str) -> str:
    """Type into the search field and return what it answers."""
    field = opened.get_by_role("searchbox")
    field.fill(text)
    answer = opened.locator("#search-answer")
    expect(answer).to_have_attribute("data-query", text)
    return answer.inner_text()


def rows(opened: Opened, table: str) -> list[str]:
    """The first cells of a table's rows that are in the page."""
    return opened.locator(f"#{table} tbody tr[data-index] th").all_inner_texts()


def test_search_counts_filters_marks_and_leads_to_the_first_match(show):
    opened = show(page_of("inspect"))
    assert search(opened, "Layers.1 mlp") == "3 of 21 parameters match"
    assert rows(opened, "parameters") == [f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    tiles = opened.locator(".tile.match").evaluate_all("(tiles) => tiles.map((tile) => tile.node.name)")
    assert tiles == ["model.layers", "model.layers.1", "model.layers.1.mlp"]
    assert search(opened, "model.layers.?.*norm.weight") == "4 of 21 parameters match"
    for query in ("layers.*.q_proj", "layers.1*proj", "ayers.?.self"):  # a wildcard may be anywhere
        assert re.match(r"[1-9]\d* of ", search(opened, query)), query
    assert search(opened, "nothing of this name") == "No parameter matches"
    assert opened.text("#parameters td.empty") == "None"
    opened.press("Escape")
    assert opened.get_by_role("searchbox").input_value() == ""
    assert opened.locator(".tile.faint").count() == 0
    search(opened, "layers.1.mlp.up")
    opened.press("Enter")
    chosen = opened.locator("#chosen")
    assert chosen.get_by_role("heading").inner_text() == "model.layers.1.mlp.up_proj.weight"
    text = chosen.inner_text()
    assert "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt" in text
    assert "mp_rank_00_model_states.pt" in text
    assert "model.layers.1.mlp.up_proj.weight" in opened.text("#map .detail")
    opened.assert_clean()


def test_the_map_has_the_colours_of_the_scheme_and_dims_what_does_not_match(show):
    opened = show(page_of("inspect"), color_scheme="light")
    pixel = "() => Array.from(document.querySelector('canvas').getContext('2d').getImageData(%d, 70, 1, 1).data)"
    light = opened.evaluate(pixel % 400)
    opened.emulate_media(color_scheme="dark")
    opened.settle()
    dark = opened.evaluate(pixel % 400)
    assert (light, dark) == ([0x3F, 0x6F, 0xA6, 255], [0x5B, 0x8F, 0xCB, 255])
    before = opened.evaluate(pixel % 150)
    search(opened, "embed_tokens")
    opened.settle()
    assert opened.evaluate(pixel % 150) == before
    assert opened.evaluate(pixel % 400) != dark


def test_a_share_of_a_parameter_is_told_by_its_elements(show):
    opened = show(inspected("s3_bf16_dp3"))
    search(opened, "prime")
    opened.press("Enter")
    runs = opened.locator("#chosen-spans tbody tr[data-index]").all_inner_texts()
    assert [re.findall(r"\[.*?\)", run) for run in runs] == [["[0, 3)"], ["[3, 6)"], ["[6, 7)"]]
    opened.locator("#map-stage").focus()
    opened.press("ArrowDown")
    assert "master float32: elements [3, 6) of 7, 12 B" in opened.text("#map .detail")
    walk(opened)


def tab_to(opened: Opened, selector: str, most: int = 40) -> None:
    for _ in range(most):
        opened.press("Tab")
        if opened.evaluate("(s) => document.activeElement.matches(s)", selector):
            return
    raise AssertionError(f"Tab does not reach {selector}")


def test_map_is_reached_moved_in_and_zoomed_by_keyboard(show):
    opened = show(page_of("inspect"))
    detail = opened.locator("#map .detail")
    back = opened.button("Back to the part seen before")
    tab_to(opened, "#map-stage")
    assert "model.embed_tokens.weight" in detail.inner_text()
    assert "model file" in detail.inner_text()
    assert opened.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    opened.press("ArrowDown", "ArrowRight")
    assert "model.layers.0.self_attn.q_proj.weight" in detail.inner_text()
    assert "all 256 elements" in detail.inner_text()
    assert "rank 0" in detail.inner_text()
    opened.press("ArrowDown")
    assert "Nothing of it is here; it is in model file, rank 0" in detail.inner_text()
    assert back.is_disabled()
    opened.press("Enter")
    opened.settle()
    assert back.is_enabled()
    opened.press("Escape")
    opened.settle()
    assert back.is_disabled()
    opened.press("Shift+ArrowRight")  # to the next module
    assert "model.layers.1." in detail.inner_text()
    opened.assert_clean()


def test_pointer_shows_and_drags(show):
    opened = show(page_of("inspect"))
    box = opened.locator("#map-stage").bounding_box()
    assert box is not None
    opened.mouse.move(box["x"] + 200, box["y"] + 60)
    tip = opened.locator("#map .tip")
    assert "model.embed_tokens.weight" in tip.inner_text()
    assert "all 1,072 elements" in tip.inner_text()
    opened.mouse.down()
    opened.mouse.move(box["x"] + 420, box["y"] + 60)
    opened.mouse.up()
    opened.settle()
    assert opened.button("Back to the part seen before").is_enabled()
    opened.assert_clean()


def test_treemap_and_tables_by_keyboard(show):
    opened = show(page_of("inspect"))
    tab_to(opened, ".tile")
    opened.press("Enter")
    trail = opened.get_by_role("navigation", name="Module shown")
    assert "layers" in trail.inner_text()
    assert opened.evaluate("document.activeElement.matches('.tile')")
    first = opened.evaluate("document.activeElement.getAttribute('aria-label')")
    opened.press("ArrowRight")
    assert opened.evaluate("document.activeElement.getAttribute('aria-label')") != first
    opened.press("Escape")
    assert trail.get_by_role("button").count() == 0

    opened.get_by_text("The map as a table").click()
    assert rows(opened, "rows") == ["model file", "rank 0", "rank 1"]
    assert "9.98 kB" in opened.locator("#rows tbody tr[data-index]").first.inner_text()
    table = opened.locator("#parameters table")
    opened.locator("#parameters").get_by_role("button", name="Elements").click()
    assert rows(opened, "parameters")[0] == "model.embed_tokens.weight"
    assert table.locator("th[aria-sort=descending]").inner_text().startswith("Elements")
    table.focus()
    opened.press("End", "Enter")
    last = table.locator("tr[aria-selected=true] th").inner_text()
    assert opened.text("#chosen-name").startswith(last)
    opened.assert_clean()


def test_slots_and_order_may_be_chosen(show):
    opened = show(inspected("tp2_s1_bf16_dp2"))
    picture = "() => document.querySelector('canvas').toDataURL()"
    before = opened.evaluate(picture)
    opened.checkbox("exp_avg_sq").uncheck()
    opened.settle()
    without = opened.evaluate(picture)
    opened.get_by_role("combobox", name="Parameters").select_option("model")
    opened.settle()
    assert len({before, without, opened.evaluate(picture)}) == 3
    walk(opened)


NAMED = {
    "inspect": ["banner", "main", "contentinfo", "search", "heading 'Map'", "application",
                "grid 'Parameters and buffers'"],
    "diff": ["heading 'Change by layer'", "grid 'Tensors that differ'", "table 'Largest relative L2 change"],
    "series": ["heading 'Curves'", "grid 'Parameters and slots"],
    "verify": ["heading 'Findings'", "group 'Severities shown'", "article"],
    "stats": ["heading 'By layer'", "grid 'Figures by layer and slot'", "searchbox 'Find a tensor'"],
    "history": ["heading 'What was saved when'", "img '3 checkpoints in a, step 100 to step 300",
                "table 'Checkpoints'"],
}  # fmt: skip

LONG = {"inspect": {"parameters": 21}, "diff": {"different": len(documents.diff()["different"])}}
UNNAMED = """() => [...document.querySelectorAll('button, input, select, table, [role]')].filter((one) =>
    one.checkVisibility() && one.getAttribute('role') !== 'presentation' &&
    !(one.getAttribute('aria-label') || one.innerText.trim() || one.labels?.length || one.caption)
).map((one) => one.outerHTML.slice(0, 120))"""


@pytest.mark.parametrize("kind", MADE)
def test_page_loads_nothing_and_is_for_everybody(kind, show):
    """Also printed, where long tables are whole."""
    opened = show(page_of(kind), width=320 if kind in NAMED else 1280)
    assert opened.get_by_role("heading", level=1).count() == 1
    assert opened.get_by_role("main").inner_text()
    if kind in NAMED:
        assert_readable(opened)
        tree = opened.locator("body").aria_snapshot()
        for expected in NAMED[kind]:
            role, _, name = expected.partition(" ")
            assert re.search(rf"{role}\b.*{re.escape(name.strip(chr(39)))}", tree), (expected, tree[:3000])
        assert opened.evaluate(UNNAMED) == []
        live = opened.locator("[aria-live=polite]").evaluate_all("(all) => all.map((one) => one.id || one.className)")
        assert kind != "inspect" or live == ["search-answer", "detail", "detail small"]
        opened.evaluate("window.dispatchEvent(new Event('beforeprint'))")
        for table, count in LONG.get(kind, {}).items():
            assert len(rows(opened, table)) == count
        assert opened.locator("details:not([open])").count() == 0
        opened.evaluate("window.dispatchEvent(new Event('afterprint'))")
        assert opened.locator("details[open]").count() == 0
        assert kind not in LONG or opened.pdf(format="A4").startswith(b"%PDF-")
    opened.assert_clean()


def hostile_checkpoint() -> Checkpoint:
    checkpoint = flat(dict.fromkeys(HOSTILE, (7, 5)) | {"plain.weight": (9, 9)}, 3)
    checkpoint.source = HOSTILE[0]
    checkpoint.warnings = list(HOSTILE)
    checkpoint.details = {HOSTILE[1]: HOSTILE[2]}
    checkpoint.metadata = {HOSTILE[0]: None}
    checkpoint.param_groups[0].hyperparameters[HOSTILE[1]] = HOSTILE[0]
    return checkpoint


def hostile_diff() -> str:
    named = [documents.difference(name, "master", 0.1) for name in HOSTILE]
    return diff_page(documents.diff() | {"different": named, "a": documents.about(HOSTILE[0])})


def hostile_series() -> str:
    line = {"slot": HOSTILE[0], "norm": [1.0, 2.0], "change": [None, 0.1]}
    lines = [line | {"name": name} for name in HOSTILE]
    return series_page({"sources": [documents.about(HOSTILE[0])] * 2, "steps": [1, 2], "series": lines})


def hostile_verification() -> str:
    found = [documents.finding("ZC-1", "error", name, name, file=name, parameters=[name], advice=name)
             for name in HOSTILE]  # fmt: skip
    return verify_page(documents.verification(found, HOSTILE[0]), layout_map(hostile_checkpoint()))


def hostile_history() -> str:
    checkpoints = [documents.recorded(name, None, why=name, equal=[name]) for name in HOSTILE]
    about = {"run": HOSTILE[0], "leftovers": [*HOSTILE], "checkpoints": checkpoints}
    return history_page(documents.history() | about)


@pytest.mark.parametrize(
    ("make", "has_search"),
    [
        (lambda: inspection(hostile_checkpoint()), True),
        (hostile_diff, True),
        (hostile_series, True),
        (hostile_verification, True),
        (hostile_history, False),
    ],
    ids=["inspect", "diff", "series", "verify", "history"],
)
def test_hostile_names_are_text(make, has_search, show):
    opened = show(make())
    opened.on("dialog", lambda dialog: pytest.fail(f"a name ran as a script: {dialog.message}"))
    text = opened.text("body")
    assert '</script><script>alert("name")</script>.weight' in text
    assert "<img src=x onerror=alert(1)>.weight" in text
    assert opened.locator("img").count() == 0
    assert opened.locator("script").count() == 2
    if has_search:
        search(opened, "script")
        opened.press("Enter")
    opened.assert_clean()


def test_data_in_the_page_holds_nothing_that_html_could_read():
    data = embedded({name: name for name in HOSTILE})
    assert set(data).isdisjoint("<>&\u2028")
    assert data.isascii()


def test_policy_forbids_what_the_page_does_not_bring_along(show):
    opened = show(page_of("inspect"))
    ran = opened.evaluate(
        """async () => {
            const script = document.createElement('script');
            script.textContent = 'window.ran = true';
            document.body.append(script);
            const sent = await fetch('https://example.org/').then(() => true, () => false);
            return [window.ran === true, sent];
        }"""
    )
    assert ran == [False, False]
    assert [url for url in opened.requests if not url.startswith("file:")] == []


@pytest.mark.parametrize(("layers", "rank"), some([(20, 868)], [(100, 173)]))
def test_thousands_of_parameters_on_a_thousand_ranks(layers, rank, show):
    html = inspection(large(layers=layers, per_layer=100, ranks=1024))
    assert len(html) < 200_000 * layers
    opened = show(html)
    assert opened.locator("*").count() < 8000
    assert search(opened, "layers.17.") == f"100 of {100 * layers:,} parameters match"
    opened.press("Enter")
    assert opened.text("#chosen-name") == "model.layers.17.mlp.experts.0.up_proj.weight"
    assert f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" in opened.text("#chosen")
    assert opened.get_by_role("grid", name="Parameters and buffers").get_attribute("aria-rowcount") == "101"
    opened.locator("#map-stage").focus()
    opened.press("Enter", "ArrowRight", "Enter", "ArrowDown", "Shift+ArrowDown", "Escape", "Escape")
    opened.get_by_role("searchbox").fill("")
    expect(opened.locator("#search-answer")).to_have_attribute("data-query", "")
    opened.locator("#parameters .scroll").evaluate("(one) => { one.scrollTop = one.scrollHeight }")
    opened.settle()
    assert rows(opened, "parameters")[-1] == f"model.layers.{layers - 1}.mlp.experts.24.norm.weight"
    opened.assert_clean()


def again(opened: Opened, part: str) -> None:
    """Open the page anew, in the same window, at the address that it has when that names a part of its state."""
    expect(opened.page).to_have_url(re.compile(f"#.*{part}="))
    address = opened.url
    opened.goto("about:blank")
    opened.goto(address)
    opened.settle()


def test_heat_map_says_the_worst_change_and_leads_to_the_tensors(show):
    opened = show(diff_page(documents.diff(layers=30)))
    cells = opened.locator("#heat")
    for label in (
        "lm_head, weight: 1 of 1 parameter changed, at most \u221e",
        "model.embed_tokens, master: 1 of 1 parameter",
    ):
        assert cells.get_by_role("button", name=label).count() == 1
    assert "NaN" in cells.inner_text()
    assert "other shape" in cells.inner_text()
    assert cells.get_by_text("equal", exact=True).count() == 2
    cells.get_by_role("button", name=re.compile("^model.layers.3, exp_avg: 4 of 4")).click()
    assert len(rows(opened, "different")) == 4
    assert all(name.startswith("model.layers.3.") for name in rows(opened, "different"))
    opened.assert_clean()
    again(opened, "layer")
    assert len(rows(opened, "different")) == 4


def test_heat_map_of_few_parameters_is_by_module(show):
    opened = show(diff_page(documents.diff(layers=3)))
    layers = opened.locator("#heat tbody th").all_inner_texts()
    assert "model.layers.2.self_attn.v_proj" in layers
    assert len(layers) == 3 * 4 + 4


def test_histogram_counts_all_or_the_chosen_tensor(show):
    document = documents.diff()
    opened = show(diff_page(document))
    histogram = opened.locator("#histogram")
    with_one = [one for one in document["different"] if one["histogram"]]
    assert f"{40 * len(with_one):,}" in histogram.inner_text()
    opened.locator("#different tbody tr[data-index]").first.click()
    assert "model.layers.0.self_attn.q_proj.weight, weight" in histogram.inner_text()
    assert f"{40 * len(with_one):,}" not in histogram.inner_text()
    opened.button("All tensors").click()
    assert "All tensors" in histogram.inner_text()


def test_figures_that_are_missing_or_not_finite_are_shown_as_such(show):
    opened = show(page_of("diff"))
    search(opened, "model.norm")
    assert "\u2013" in opened.text("#different tbody tr[data-index]")
    search(opened, "embed_tokens")
    assert "NaN" in opened.text("#different tbody tr[data-index]")


def test_series_draws_what_moved_most_and_what_is_chosen(show):
    opened = show(page_of("series"))
    lines = opened.locator("#lines li")
    assert lines.count() == 6
    assert opened.locator("#change path.line").count() == 6
    search(opened, "layers.3. exp_avg")
    opened.press("Enter")
    assert lines.last.inner_text() == "model.layers.3.mlp.weight exp_avg"
    opened.locator("#norm .chart").focus()
    opened.press("ArrowLeft")
    assert opened.text("#norm .detail").startswith("step 700")
    opened.assert_clean()
    drawn = lines.all_inner_texts()
    again(opened, "lines")
    assert lines.all_inner_texts() == drawn
    opened.button("Draw none").click()
    assert lines.count() == 0


def test_findings_are_listed_filtered_by_severity_and_marked_in_the_map(show):
    opened = show(page_of("verify"))
    articles = opened.get_by_role("article")
    assert articles.count() == 3
    first = articles.first.inner_text()
    for part in ("ZC-301", "3 elements are NaN", "finite", "3 NaN", "rank_1", "model.norm.weight", "resume from"):
        assert part in first
    assert "<i>a file</i>" in articles.last.inner_text()
    opened.checkbox(re.compile("^error")).uncheck()
    assert articles.count() == 2
    assert "Not sound: 1 error, 1 warning, 1 note." in opened.get_by_role("banner").inner_text()
    again(opened, "without")
    assert articles.count() == 2
    red = """() => {
        const canvas = document.querySelector('canvas');
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        const red = (i) => data[i] === 0xb3 && data[i + 1] === 0x26 && data[i + 2] === 0x1e;
        return [...Array(data.length / 4).keys()].filter((pixel) => red(4 * pixel)).length;
    }"""
    opened.checkbox(re.compile("^error")).check()
    opened.settle()
    assert opened.evaluate(red) > 20
    assert show(page_of("sound")).evaluate(red) == 0


def test_figures_are_those_of_the_command_and_a_row_shows_its_histogram(show):
    document = stats(LLAMA).as_dict()
    opened = show(stats_page(document))
    shown = opened.locator("#histogram table")
    assert "All tensors" in shown.inner_text()
    row = next(one for one in document["slots"] if one["slot"] == "master" and one["numel"] > 100)
    search(opened, f"{row['name']} master")
    opened.press("Enter")
    opened.settle()
    assert f"master of {row['name']}" in shown.inner_text()
    counts = [int(cell.replace(",", "")) for cell in shown.locator("td.right:nth-child(3)").all_inner_texts()]
    assert counts == [*row["magnitudes"].values()] + [row["zeros"]] * bool(row["zeros"])
    opened.locator("#layers tbody tr[data-index]").nth(5).click()
    layer = document["layers"][5]
    assert f"{layer['slot']} of {layer['name']}" in shown.inner_text()
    counts = [int(cell.replace(",", "")) for cell in shown.locator("td.right:nth-child(3)").all_inner_texts()]
    assert sum(counts) == layer["numel"]
    opened.assert_clean()


def test_what_is_not_finite_is_said_first(show):
    document = stats(LLAMA).as_dict()
    document["slots"][3] |= {"nan": 2, "mean": "nan", "norm": "nan"}
    page = show(stats_page(document))
    assert "1 tensor of 80 hold NaN" in page.locator(".verdict.bad").inner_text()


def test_a_table_is_saved_as_it_is_sorted(show):
    document = documents.diff()
    opened = show(diff_page(document))
    with opened.expect_download() as told:
        opened.button("Save as CSV: Tensors that differ").click()
    text = Path(told.value.path()).read_text()
    lines = text.splitlines()
    assert told.value.suggested_filename.endswith(".csv")
    assert len(lines) == len(document["different"]) + 1
    assert lines[0].startswith("Name,Slot,")
    assert '"</script><script>document.title=""taken""</script>.weight"' in text
    assert "NaN" in text


def test_a_run_is_drawn_along_its_steps_by_what_is_sound(show):
    page = show(page_of("history"))
    bars = page.locator("svg.bars").first.locator("rect")
    assert [bar.get_attribute("class") for bar in bars.all()] == ["bar-sound", "bar-bad", "bar-latest"]
    first, middle, last = (float(str(bar.get_attribute("x"))) for bar in bars.all())
    assert middle == pytest.approx((first + last) / 2, abs=0.1)
    assert "not sound: ZC-101: <b>missing" in str(bars.nth(1).locator("title").text_content())
    assert page.locator("svg.bars").count() == 3  # a hostile name has a slash
    assert "equal to a/step300" in page.get_by_role("table", name="Checkpoints").inner_text()


def test_a_link_leads_to_what_is_seen(show):
    opened = show(page_of("inspect"))
    search(opened, "layers.1 mlp")
    opened.press("Enter")
    opened.button("Zoom in").click()
    opened.checkbox("exp_avg", exact=True).uncheck()
    opened.locator("#parameters").get_by_role("button", name="Elements").click()
    opened.button(re.compile(r"^model\.layers\.1,")).press("Enter")
    before = rows(opened, "parameters")
    again(opened, "module")
    assert opened.get_by_role("searchbox").input_value() == "layers.1 mlp"
    assert rows(opened, "parameters") == before
    assert opened.text("#chosen-name") == "model.layers.1.mlp.gate_proj.weight"
    assert not opened.checkbox("exp_avg", exact=True).is_checked()
    assert opened.checkbox("exp_avg_sq").is_checked()
    assert opened.get_by_role("navigation", name="Module shown").locator("[aria-current]").inner_text() == "1"
    assert opened.button("Back", exact=False).is_enabled()
    assert opened.text("#parameters th[aria-sort=descending]") == "Elements"
    assert opened.told == []


def test_a_link_that_says_nothing_shows_the_page(show):
    opened = show(page_of("inspect"))
    for link in ("view=5 1 0 0", "view=x&chosen=nothing&module=constructor&sort-files=-x", "a"):
        opened.goto("about:blank")
        opened.goto(f"{opened.address}#{link}")
        opened.settle()
        assert opened.locator("#map-stage").is_visible(), link
        assert opened.told == [], link


def test_many_layers_are_shown_as_ranges_with_their_numbers(show):
    opened = show(inspection(large(layers=400, per_layer=4, ranks=4)))
    names = opened.locator(".treemap .depth-0 .name").all_inner_texts()
    assert sorted(names, key=lambda name: int(name.split("\u2013")[0])) == [
        f"{first}\u2013{first + 19}" for first in range(0, 400, 20)
    ]
    opened.button(re.compile(r"\.40\u201359,")).press("Enter")
    inside = opened.locator(".treemap .depth-0 .name").all_inner_texts()
    assert len(inside) == 20
    assert {name.split(".")[0] for name in inside} == {str(n) for n in range(40, 60)}
