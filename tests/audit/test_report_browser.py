"""The pages in a real browser: filters, keyboard, themes, no fault on the console, no request to anywhere.

Needs playwright and a Chromium on the path (`pip install playwright`, `apt-get install chromium`); skips without them.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from tests.audit.pages import audited, packed_page, photo_page
from visionpos.audit.atlas import atlas
from visionpos.audit.report import atlas_page, audit_page, stream_page
from visionpos.vlm import Text, Video, family

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no chromium on the path", allow_module_level=True)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as runner:
        # A container's root may not use the sandbox; the pages are this package's own.
        started = runner.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser, tmp_path):
    """Open a page from a file; whatever it says on the console or asks of a network fails the test at its end."""
    faults, asked, contexts = [], [], []

    def call(page_text: str, **options):
        path = tmp_path / "page.html"
        path.write_text(page_text, encoding="utf-8")
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda said: faults.append(said.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        return page

    yield call
    for context in contexts:
        context.close()
    assert faults == []
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def shown(page, table: str) -> int:
    return page.locator(f"#{table} [data-item]:visible").count()


def test_audit_filters(visit):
    result = audited()
    page = visit(audit_page(result))
    assert shown(page, "rows") == len(result.rows)
    page.get_by_label("Intervention", exact=True).select_option("S1")
    assert shown(page, "rows") == len(result.of("S1"))
    page.get_by_label("Layer", exact=True).select_option("layer 1")
    assert shown(page, "rows") == len(result.of("S1", where="layer 1"))
    said = page.locator("form.filters output").inner_text()
    assert said == f"{len(result.of('S1', where='layer 1'))} of {len(result.rows)} shown"
    page.get_by_role("button", name="Show all").click()
    page.wait_for_function("document.querySelectorAll('#rows [data-item][hidden]').length === 0")
    page.get_by_label("Verdict", exact=True).select_option("failed")
    assert shown(page, "rows") == sum(row.verdict == "failed" for row in result)
    page.get_by_label("Search", exact=True).fill("no such word at all")
    assert shown(page, "rows") == 0
    assert page.locator("#rows-empty").is_visible()


def test_audit_shows_surprises_before_all_else_and_hostile_names_as_text(visit):
    page = visit(audit_page(audited()))
    heads = page.locator("h2").all_inner_texts()
    assert [head.lstrip("✕ ") for head in heads][:4] == [
        "Incomplete", "Summary", "Surprises", "Detectors",
    ]  # fmt: skip
    assert "<script>" in page.locator("h1").inner_text()
    assert page.evaluate("window.hit") is None


def test_skip_link_comes_first_and_focus_is_seen(visit):
    page = visit(audit_page(audited()))
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    assert focused.inner_text() == "Skip to content"
    assert focused.bounding_box()["x"] >= 0
    assert focused.evaluate("one => getComputedStyle(one).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


@pytest.mark.parametrize("system", ["light", "dark"])
def test_themes_follow_the_system_until_the_button_is_pressed(visit, system):
    page = visit(audit_page(audited()), color_scheme=system)

    def brightness() -> float:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour))) / 3

    button = page.get_by_role("button", name="Dark theme")
    assert (brightness() < 128) == (system == "dark")
    assert button.get_attribute("aria-pressed") == str(system == "dark").lower()
    button.click()
    assert (brightness() < 128) == (system == "light")
    assert button.get_attribute("aria-pressed") == str(system == "light").lower()


def contrast(page, selector: str) -> float:
    """WCAG contrast of the text of an element against the nearest painted background."""
    return page.evaluate(
        """selector => {
          const light = (colour) => { const c = colour.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
            .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
            return 0.2126 * c[0] + 0.7152 * c[1] + 0.0722 * c[2]; };
          const one = document.querySelector(selector);
          let back = one;
          while (back && /, 0\\)$/.test(getComputedStyle(back).backgroundColor)) back = back.parentElement;
          const a = light(getComputedStyle(one).color);
          const b = light(getComputedStyle(back ?? document.body).backgroundColor);
          return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); }""",
        selector,
    )


@pytest.mark.parametrize("system", ["light", "dark"])
def test_text_is_readable_in_both_themes(visit, system):
    """WCAG AA asks for 4.5 to 1."""
    page = visit(audit_page(audited()), color_scheme=system)
    for selector in ("h1", "tr.surprise td", ".bad", ".good", ".soft", ".banner p", "thead th"):
        assert contrast(page, selector) >= 4.5, selector


def test_print_hides_controls_and_is_black_on_white(visit):
    page = visit(audit_page(audited()), color_scheme="dark")
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.locator("form.filters").is_visible()
    assert not page.locator("#theme").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def facts(page) -> dict[str, str]:
    keys, values = (page.locator(f"#token {tag}").all_inner_texts() for tag in ("dt", "dd"))
    return dict(zip(keys, values, strict=True))


def test_stream_shows_name_ids_and_rectangle_of_a_token(visit):
    """Every rectangle of the page is the plan's own."""
    text, stream, pos, plan = photo_page()
    page = visit(text)
    cells = stream.is_feature.nonzero().flatten().tolist()
    for number in (0, 7, len(cells) - 1):
        place = cells[number]
        page.locator(f"[data-i='{place}']").focus()
        said = facts(page)
        assert said["Token"] == f"{place} of {stream.length}"
        assert said["Name"] == stream.names[place]
        assert [said[f"Id, {axis}"] for axis in ("time", "row", "col")] == [
            str(one) for one in pos.ids[:, place].tolist()
        ]
        top, left, bottom, right = plan.token_rects()[number].tolist()
        hit = page.locator("figure:visible .hit")
        drawn = [float(hit.get_attribute(key)) for key in ("y", "x", "height", "width")]
        assert drawn == pytest.approx([top, left, bottom - top, right - left], abs=0.02)


def test_stream_point_of_the_photo_chooses_its_token(visit):
    text, stream, _, plan = photo_page()
    page = visit(text)
    sheet = page.locator("figure:visible .sheet")
    box = sheet.bounding_box()
    rect = plan.token_rects()[7]
    y, x = ((rect[:2] + rect[2:]) / 2).tolist()
    where = {"x": x / plan.size_hw[1] * box["width"], "y": y / plan.size_hw[0] * box["height"]}
    sheet.hover(position=where)
    wanted = stream.is_feature.nonzero().flatten().tolist()[7]
    assert facts(page)["Token"] == f"{wanted} of {stream.length}"
    sheet.click(position=where)
    assert page.evaluate("document.activeElement.dataset.i") == str(wanted)


def test_stream_hover_shows_a_token(visit):
    text, stream, _, _ = photo_page()
    page = visit(text)
    page.locator("[data-i='0']").hover()
    assert facts(page)["Name"] == stream.names[0] == "<script>window.hit=1</script>"
    assert page.evaluate("window.hit") is None


def test_stream_keyboard(visit):
    """One tab stop; arrows go by tokens, rows and spans, within what is shown."""
    text, stream, _, plan = photo_page()
    page = visit(text)
    assert page.locator("#board [tabindex='0']").count() == 1
    page.locator("#board [tabindex='0']").focus()
    where = lambda: int(page.evaluate("document.activeElement.dataset.i"))  # noqa: E731
    for key, wanted in (
        ("ArrowRight", 1),
        ("ArrowLeft", 0),
        ("End", stream.length - 1),
        ("Home", 0),
    ):
        page.keyboard.press(key)
        assert where() == wanted
    first = int(stream.is_feature.nonzero()[0])
    page.locator(f"[data-i='{first}']").focus()
    above = page.locator(":focus").bounding_box()
    page.keyboard.press("ArrowDown")
    assert where() == first + plan.views[0].tokens.width
    below = page.locator(":focus").bounding_box()
    assert below["x"] == pytest.approx(above["x"], abs=1)
    assert below["y"] > above["y"]
    page.keyboard.press("ArrowUp")
    assert where() == first
    page.keyboard.press("PageDown")
    assert where() == next(at for at in range(first, stream.length) if stream.modality[at] != 1)
    assert page.locator("#board [tabindex='0']").count() == 1
    assert page.locator(":focus").get_attribute("aria-selected") == "true"
    page.get_by_label("Kind", exact=True).select_option("image")
    page.locator("#board [tabindex='0']").focus()
    page.keyboard.press("Home")
    assert where() == first
    page.keyboard.press("ArrowLeft")
    assert where() == first


def test_stream_filters_hide_spans_and_their_tokens(visit):
    text, stream, _, _ = photo_page()
    page = visit(text)
    assert page.locator("#board .token:visible").count() == stream.length
    page.get_by_label("Kind", exact=True).select_option("image")
    assert page.locator("#board .token:visible").count() == int(stream.is_feature.sum())
    page.get_by_label("Go to token", exact=True).fill("0")
    page.keyboard.press("Enter")
    page.wait_for_function("document.activeElement.dataset.i === '0'")
    assert page.locator("#board .token:visible").count() == stream.length


def test_packed_documents_have_colours_and_labels(visit):
    text, row, counts = packed_page()
    page = visit(text)
    groups = page.locator("#board .span")
    colours = {}
    for group in groups.all():
        label = group.get_attribute("aria-label")
        document = re.match(r"document (\d+)", label)
        if document:
            colours.setdefault(document[1], set()).add(
                group.evaluate("one => getComputedStyle(one).borderLeftColor")
            )
            assert group.locator("p").inner_text().startswith(f"D{document[1]} ")
    assert sorted(colours) == ["0", "1", "2"]
    assert len({next(iter(found)) for found in colours.values()}) == 3
    assert all(len(found) == 1 for found in colours.values())
    page.get_by_label("Document", exact=True).select_option("1")
    assert page.locator("#board .token:visible").count() == counts[1]
    place = int((row.documents == 1).nonzero()[0])
    page.locator(f"[data-i='{place}']").focus()
    assert facts(page)["Document"] == "D1, token 0 of it"
    page.get_by_label("Document", exact=True).select_option("")
    page.get_by_label("Kind", exact=True).select_option("padding")
    assert page.locator("#board .token:visible").count() == int((row.documents < 0).sum())


def test_long_stream_stays_usable(visit):
    """20 000 tokens: one tab stop, and a key answers at once."""
    fam = family("qwen2_vl")
    clip = Video(size_hw=(560, 560), seconds=[0.5 * at for at in range(100)])
    stream = fam.stream([Text("Describe"), clip])
    assert stream.length > 20_000
    page = visit(stream_page(stream, fam.position_ids(stream), plan=fam.plan(clip)))
    assert page.locator("#board [tabindex='0']").count() == 1
    page.locator("#board [tabindex='0']").focus()
    page.keyboard.press("End")
    assert page.evaluate("Number(document.activeElement.dataset.i)") == stream.length - 1
    took = page.evaluate(
        """() => { const start = performance.now();
          for (let at = 0; at < 20; at++)
            document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowLeft", bubbles: true}));
          return (performance.now() - start) / 20; }"""
    )
    assert page.evaluate("Number(document.activeElement.dataset.i)") == stream.length - 21
    assert took < 250  # milliseconds a key: a person would not wait; about 5 in practice


def test_atlas_filters(visit):
    entries = atlas()
    page = visit(atlas_page(entries))
    assert shown(page, "atlas") == len(entries)
    page.get_by_label("Model", exact=True).select_option("DINOv3")
    assert shown(page, "atlas") == sum("DINOv3" in entry.models for entry in entries)
    page.get_by_label("Family", exact=True).select_option("Rotary")
    wanted = [e for e in entries if "DINOv3" in e.models and "Rotary" in e.families]
    assert shown(page, "atlas") == len(wanted) > 0
    page.get_by_role("button", name="Show all").click()
    page.wait_for_function("document.querySelectorAll('#atlas [data-item][hidden]').length === 0")
    page.get_by_label("Scheme", exact=True).select_option("Axial 2-D RoPE")
    assert shown(page, "atlas") == sum("Axial 2-D RoPE" in entry.schemes for entry in entries)
    page.get_by_label("Scheme", exact=True).select_option("")
    for word in ("ALiBi", "2D RoPE", "tiling"):
        page.get_by_label("Keyword", exact=True).fill(word)
        assert 0 < shown(page, "atlas") < len(entries)


def test_atlas_link_to_what_is_filtered_out_shows_it(visit):
    page = visit(atlas_page())
    page.get_by_label("Keyword", exact=True).fill("interpolated position table")
    link = page.locator("#atlas a[href='#encoding-mae_interpolated']:visible").first
    link.click()
    page.wait_for_function("!document.getElementById('encoding-mae_interpolated').hidden")


def test_atlas_yaml_opens_by_keyboard(visit):
    page = visit(atlas_page())
    entry = page.locator("#encoding-dinov3")
    summary = entry.locator("summary", has_text="configs/encodings/dinov3.yaml")
    summary.focus()
    page.keyboard.press("Enter")
    assert "kind: axial_rope" in entry.locator("pre:visible").inner_text()


def test_pages_work_without_a_word_from_a_script(visit):
    """Without scripts every row is there, and no control that does nothing."""
    page = visit(audit_page(audited()), java_script_enabled=False)
    assert page.locator("form.filters:visible").count() == 0
    assert page.locator("#rows tbody tr:visible").count() == len(audited().rows)


def test_data_of_the_page_is_the_streams(visit):
    text, stream, pos, _ = photo_page()
    page = visit(text)
    data = json.loads(page.locator("#data").text_content())
    assert tuple(data["names"][at] for at in data["name"]) == stream.names
    assert torch.equal(torch.tensor(data["ids"]), pos.ids)
