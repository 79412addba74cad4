"""Pages: they parse, tables say what they are, hostile names stay text, nothing is fetched, nothing is hidden."""

from __future__ import annotations

import json
from collections import Counter
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

from tests.audit.pages import HOSTILE, audited, packed_page, photo_page
from visionpos.audit.report import atlas_page, audit_page, stream_page
from visionpos.audit.result import AuditResult, Measured
from visionpos.errors import PositionError
from visionpos.vlm import Audio, Image, Text, Video, family, family_names, pack

VOID = {"meta", "link", "img", "input", "br", "hr"}
PAGES = {
    "audit": lambda: audit_page(audited()),
    "stream": lambda: photo_page()[0],
    "packed": lambda: packed_page()[0],
    "atlas": atlas_page,
}


class Reader(HTMLParser):
    """Elements with their attributes, texts of each, and what is not closed where it should be."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.faults: list[str] = []
        self.texts: list[tuple[str, str]] = []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}>")

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


@pytest.fixture(scope="module")
def read():
    kept: dict[str, Reader] = {}

    def call(name: str) -> Reader:
        if name not in kept:
            kept[name] = Reader()
            kept[name].feed(PAGES[name]())
        return kept[name]

    return call


@pytest.mark.parametrize("name", PAGES)
def test_page_is_well_formed(read, name):
    reader = read(name)
    assert reader.faults == []
    assert reader.open == []
    ids = Counter(attributes["id"] for _, attributes in reader.elements if "id" in attributes)
    assert [one for one, count in ids.items() if count > 1] == []
    assert ("html", {"lang": "en"}) in reader.elements


@pytest.mark.parametrize("name", PAGES)
def test_page_fetches_nothing(read, name):
    """No address in what a browser loads, follows or paints, and a policy that would refuse it."""
    reader = read(name)
    for _, attributes in reader.elements:
        for key in ("src", "href", "action", "srcset", "poster", "data"):
            assert (attributes.get(key) or "#").startswith(("#", "data:")), attributes
    code = "".join(text for tag, text in reader.texts if tag in ("style", "script"))
    for word in ("://", "url(", "@import", "fetch(", "XMLHttpRequest", "WebSocket", "import("):
        assert word not in code
    policies = [a["content"] for tag, a in reader.elements if "http-equiv" in a]
    assert "default-src 'none'" in policies[0]


@pytest.mark.parametrize("name", PAGES)
def test_tables_and_fields_say_what_they_are(read, name):
    reader = read(name)
    tags = [tag for tag, _ in reader.elements]
    assert tags.count("table") == tags.count("caption") > 0
    assert all(a.get("scope") in ("col", "row") for tag, a in reader.elements if tag == "th")
    labelled = {a["for"] for tag, a in reader.elements if tag == "label"}
    fields = {a["id"] for tag, a in reader.elements if tag in ("select", "input")}
    assert labelled == fields
    targets = {a["aria-labelledby"] for _, a in reader.elements if "aria-labelledby" in a}
    assert targets <= {a.get("id") for _, a in reader.elements}
    assert all(a.get("alt") for tag, a in reader.elements if tag == "img")
    drawn = [a for tag, a in reader.elements if tag == "svg"]
    assert all(a.get("aria-label") or a.get("aria-hidden") == "true" for a in drawn)
    links = {a["href"] for tag, a in reader.elements if tag == "a"}
    made = {f"#section-{at}" for at in range(100)}  # by the script of the stream page
    assert {
        link for link in links - made if link[1:] not in {a.get("id") for _, a in reader.elements}
    } == set()


@pytest.mark.parametrize("name", ["audit", "stream"])
def test_hostile_names_stay_text(read, name):
    """A name that is markup makes no element, no attribute, and does not end the page's own data."""
    reader = read(name)
    scripts = [a for tag, a in reader.elements if tag == "script"]
    assert len(scripts) == (1 if name == "audit" else 3)
    shown = [text for tag, text in reader.texts if HOSTILE in text]
    assert shown
    assert not any(tag == "b" for tag, _ in reader.elements)
    code = [text for tag, text in reader.texts if tag == "script"]
    assert not any("<script" in text for text in code)


def texts_of(reader: Reader) -> str:
    return " ".join(text for tag, text in reader.texts if tag not in ("style", "script"))


def test_audit_states_expected_beside_measured(read):
    """Surprises stand first; all seeds of a row are one line; a remedy stands as it was written."""
    whole = texts_of(read("audit"))
    assert whole.index("Surprises") < whole.index("Detectors") < whole.index("All measurements")
    remedy = "Call update_feat_shape & <b>rebuild</b>."
    for words in ("0.3", "NaN", "1e-07 to 2e-07", remedy, "does not apply", "alarm", "healthy"):
        assert words in whole
    # stale_cache raises the alarm and stands first, though it was found second.
    assert whole.index("stale_cache") < whole.index("precision")


def row(**fields) -> Measured:
    return Measured(
        **{
            "intervention": "S1",
            "metric": "A",
            "value": 0.0,
            "verdict": "zero",
            "dtype": "float64",
            **fields,
        }
    )


@pytest.mark.parametrize(
    ("result", "marked"),
    [
        (AuditResult(target="x", scheme="none", rows=(row(),)), False),
        (AuditResult(target="x", scheme="none", rows=(row(),), complete=False), True),
        (AuditResult(target="x", scheme="none", rows=(row(verdict="failed", value=None),)), True),
        (AuditResult(target="x", scheme="none", rows=()), False),
    ],
)
def test_incomplete_is_marked_and_never_reads_as_a_pass(result, marked):
    page = audit_page(result)
    assert ("incomplete" in page.lower().partition("<style>")[0]) == marked
    assert ("nothing below may be read as a pass" in page) == marked
    assert "no measurement contradicts" not in page  # none has an expectation, or all is missing


@pytest.mark.parametrize(
    "value", [1e-30, 0.0, 1e5, -1.0, float("inf"), float("-inf"), float("nan"), None]
)
def test_charts_take_every_value(value):
    """Every dot lies inside the drawing, whatever was measured."""
    rows = tuple(row(where=f"layer {at}", value=value, verdict="failed") for at in range(3))
    reader = Reader()
    reader.feed(audit_page(AuditResult(target="x", scheme="y", rows=rows)))
    assert reader.faults == []
    paths = [a["d"] for tag, a in reader.elements if tag == "path"]
    assert len(paths) == 3
    for path in paths:
        x, y = map(float, path[1:].partition("l")[0].split())
        assert 0 <= x <= 260
        assert 0 <= y <= 120


def test_to_html_writes_the_page(tmp_path):
    audited().to_html(tmp_path / "a.html")
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == audit_page(audited())


def data_of(page: str) -> dict:
    reader = Reader()
    reader.feed(page)
    code = [text for tag, text in reader.texts if tag == "script"]
    return next(json.loads(text) for text in code if text.startswith("{"))


@pytest.mark.parametrize("name", family_names())
def test_every_family_has_a_page(name):
    """Names, ids and rectangles are the family's own for every feature of a wide and a tall picture."""
    fam = family(name)
    for size_hw in ((150, 610), (620, 170)):
        image = Image(size_hw=size_hw)
        try:
            stream, plan = fam.stream([Text("a b"), image]), fam.plan(image)
        except PositionError:  # a size that the family refuses
            continue
        pos = None if fam.spec.rule is None else fam.position_ids(stream)
        data = data_of(stream_page(stream, pos, plan=plan))
        rects = [rect for rect in data["rect"] if rect is not None]
        assert torch.allclose(
            torch.tensor(rects, dtype=torch.float64), plan.token_rects(), atol=0.006, rtol=0
        )
        assert [rect is not None for rect in data["rect"]] == stream.is_feature.tolist()
        assert tuple(data["names"][at] for at in data["name"]) == stream.names
        assert pos is None or data["ids"] == pos.ids.tolist()
        assert sum(one["stop"] - one["start"] for one in data["sections"]) == stream.length


def test_cells_of_a_clip_count_steps_rows_and_columns():
    fam = family("qwen2_vl")
    clip = Video(size_hw=(84, 140), seconds=[0.0, 0.5, 1.0, 1.5])
    stream = fam.stream([clip])
    plan = fam.plan(clip)
    frames, height, width = plan.views[0].tokens.shape
    assert frames == 2
    assert height != width
    data = data_of(stream_page(stream, fam.position_ids(stream), plan=plan))
    cells = [cell for cell in data["cell"] if cell is not None]
    assert cells == [
        [0, t, y, x] for t in range(frames) for y in range(height) for x in range(width)
    ]


def test_sound_of_a_clip_has_no_rectangle():
    """Sound is woven between frames: its cells look at no pixels, and each frame keeps its own."""
    fam = family("qwen2_5_omni")
    clip = Video(size_hw=(84, 140), seconds=[0.5 * at for at in range(8)], audio=Audio(4.0))
    stream, plan = fam.stream([clip]), fam.plan(clip)
    data = data_of(stream_page(stream, fam.position_ids(stream), plan=plan))
    for modality, rect in zip(stream.modality.tolist(), data["rect"], strict=True):
        assert (rect is not None) == (modality == 2)


def test_packed_row_names_documents_and_padding():
    page, packed, _ = packed_page()
    data = data_of(page)
    assert data["document"] == packed.documents.tolist()
    assert data["place"] == packed.text.tolist()
    padding = [data["names"][data["name"][at]] for at in (packed.documents < 0).nonzero().flatten()]
    assert set(padding) == {"padding"}
    assert data["ids"] == packed.ids.tolist()


def test_stream_of_nothing_has_a_page():
    fam = family("qwen2_vl")
    stream = fam.stream([])
    assert "0 tokens" in stream_page(stream)


def refused(**changes):
    fam = family("qwen2_vl")
    image = Image((84, 140))
    stream = fam.stream([image, Text("a"), image])
    given = {"stream": stream, "pos": fam.position_ids(stream), **changes}
    return stream_page(given.pop("stream"), given.pop("pos"), **given)


FAM = family("qwen2_vl")
PLAN = FAM.plan(Image((84, 140)))
ONE = FAM.stream([Image((84, 140))])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"plan": PLAN}, "plan is one and the stream has 2 pictures"),
        ({"plan": {1: PLAN}}, "plan has \\(0, 1\\), which is no picture"),
        ({"plan": {0: FAM.plan(Image((56, 56)))}}, "has 4 cells and the stream 15"),
        ({"photo": {0: torch.zeros(3, 84, 140, dtype=torch.uint8)}}, "without a plan"),
        ({"plan": {0: PLAN}, "photo": {0: torch.zeros(3, 140, 84, dtype=torch.uint8)}}, "plan is for \\(84, 140\\)"),
        ({"plan": {0: PLAN}, "photo": {0: torch.zeros(3, 84, 140)}}, "torch.uint8 is required"),
        ({"axes": ("time",)}, "axes are \\('time',\\) and pos has 3"),
        ({"stream": ONE}, "the stream 17 tokens"),
        ({"stream": [ONE, ONE], "pos": None}, "several streams need the PackedIds"),
        ({"stream": [ONE], "pos": pack([ONE, ONE], family=FAM)}, "pos packs documents of"),
    ],
)  # fmt: skip
def test_stream_page_refuses(changes, said):
    with pytest.raises(PositionError, match=said):
        refused(**changes)


def test_command_writes_a_stream_page(run, tmp_path):
    """The photo is inside the page, at its own size, and the rectangles are the plan's."""
    photo, page = tmp_path / "<b>photo.png", tmp_path / "s.html"
    Pillow.fromarray(np.zeros((84, 140, 3), dtype=np.uint8)).save(photo)
    code, out, err = run(
        "stream", photo, "--family", "qwen2_vl", "--text", HOSTILE, "--html", page, "--json"
    )
    assert (code, err) == (0, "")
    assert json.loads(out)["length"] == ONE.length + 1
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    images = [a for tag, a in reader.elements if tag == "img"]
    assert [(a["width"], a["height"]) for a in images] == [("140", "84")]
    assert images[0]["src"].startswith("data:image/jpeg;base64,")
    data = data_of(page.read_text(encoding="utf-8"))
    assert data["axes"] == ["time", "row", "col"]
    assert sum(rect is not None for rect in data["rect"]) == PLAN.cells


@pytest.mark.parametrize(
    ("name", "said"), [("page.png", "no HTML file"), ("no/such/page.html", "no existing folder")]
)
def test_command_refuses_a_page_before_the_work(run, tmp_path, name, said):
    code, out, err = run("stream", tmp_path / "missing.png", "--html", tmp_path / name)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
