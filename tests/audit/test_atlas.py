"""The atlas: everything that is shipped and every scheme of the field stands in it, and what it says can be typed."""

from __future__ import annotations

import json
import shlex

import numpy as np
import pytest
from PIL import Image as Pillow

from visionpos import config
from visionpos.audit.atlas import STREAMS, atlas, select
from visionpos.audit.guide import guide
from visionpos.dialects import dialect_rows
from visionpos.encodings import spec_types
from visionpos.errors import PositionError
from visionpos.retrofit import attach, create, detach
from visionpos.vlm import family, family_names

ENTRIES = atlas()
BY_ID = {entry.id: entry for entry in ENTRIES}

# The schemes and models that the field guide names, chapter by chapter, in its own words.
FIELD = """
BERT|GPT-2|ViT|CLIP|TUPE|DeBERTa|SigLIP|Gemma 3|Whisper|DETR|MAE|Shaw|Transformer-XL|T5|ALiBi|BLOOM
MPT|KERPLE|Sandwich|FIRE|RoPE|p-RoPE|GPT-NeoX|Phi|MLA|Position interpolation|NTK|Llama 3|YaRN
LongRoPE|PoSE|SelfExtend|NoPE|Llama 4|iRoPE|Command A|RNoPE-SWA|Gemma 2|StreamingLLM|sinks|DINOv2
antialias|NaFlex|2-D sin-cos|Swin|Swin V2|CPVT|Axial 2-D RoPE|RoPE-Mixed|EVA-02|Pixtral|Qwen2-VL
Qwen2.5-VL|SAM 2|DINOv3|jitter|Fourier|NeRF|Perceiver|SAM|Learnable Fourier|M-RoPE|mrope_section
Qwen3-VL|interleaved|VideoRoPE|LLaVA-1.5|AnyRes|LLaVA-NeXT|InternVL|NaViT|fractional|Idefics2
Idefics3|IMG_BREAK|Fuyu|Molmo|V2PE|Chameleon|Emu3|CoPE|DAPE|Randomized|Packed documents|tiling
2D RoPE
"""


@pytest.mark.parametrize(
    "word", [one for line in FIELD.split("\n") for one in line.split("|") if one]
)
def test_every_word_of_the_field_guide_is_found(word):
    assert select(ENTRIES, match=word)


def test_everything_shipped_has_an_entry():
    for sort, names in (("encoding", config.shipped("encodings")), ("stream", family_names())):
        entries = {entry.name: entry for entry in ENTRIES if entry.sort == sort}
        assert set(entries) == set(names)
        assert all(entry.models and entry.title and entry.commands for entry in entries.values())


def test_data_names_nothing_that_is_not_shipped():
    """Every kind is grouped, every model line is of a shipped encoding, and none is missing."""
    found = guide()
    assert set(found.kinds) == set(spec_types())
    assert set(found.models) == set(config.shipped("encodings"))
    assert set(found.unattached) <= set(config.shipped("encodings"))
    assert len(BY_ID) == len(ENTRIES)


def test_entries_hold_their_yaml():
    for entry in ENTRIES:
        if entry.sort == "scheme":
            assert entry.see or entry.outside
            assert all(name in BY_ID for name in entry.see)
            continue
        _, folder, name = entry.file.split("/")
        assert entry.yaml == config.shipped(folder)[name.removesuffix(".yaml")].read_text("utf-8")


def test_entries_name_their_dialects():
    """A stream names the dialects of its family; an encoding the rows of docs/dialects.md that name it."""
    for name in family_names():
        lines = BY_ID[f"stream-{name}"].dialects
        assert [one for one in lines if one.startswith("dialect ")] == [
            f"dialect {one}" for one in family(name).dialects
        ]
    for row in dialect_rows():
        named = {name for reading in row.readings for name in reading.names}
        for name in named & set(config.shipped("encodings")):
            assert any(row.what in line for line in BY_ID[f"encoding-{name}"].dialects)


def test_schemes_of_a_stream_are_read_off_its_data():
    assert "M-RoPE, 3 axes of ids" in BY_ID["stream-qwen2_vl"].schemes
    assert "Absolute time" in BY_ID["stream-qwen2_5_vl"].schemes
    assert "Absolute time" not in BY_ID["stream-qwen2_vl"].schemes
    assert "Sections, interleaved" in BY_ID["stream-qwen3_vl"].schemes
    assert "Tiling, joined" in BY_ID["stream-llava_next"].schemes
    assert "Tiling, per_view" in BY_ID["stream-internvl"].schemes
    assert "Steps of cells other than 1" in BY_ID["stream-internvl_v2pe"].schemes
    assert {"1-D ids", "One view"} <= set(BY_ID["stream-pixtral"].schemes)


def test_select_takes_all_filters_together():
    found = select(
        ENTRIES, family="rotary", model="dinov3", scheme="axial 2-d rope", match="PRETRAINING"
    )
    assert [entry.name for entry in found if entry.sort == "encoding"] == ["dinov3_pretraining"]
    assert all(STREAMS in entry.families for entry in ENTRIES if entry.sort == "stream")


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"model": "DINOv33"}, "models hold no 'DINOv33'.*dinov3"),
        ({"family": "Rotari"}, "families hold no 'Rotari'.*rotary"),
        ({"scheme": "nothing"}, "schemes hold no 'nothing'"),
        ({"match": "no such word"}, "no entry of the atlas fits"),
    ],
)
def test_select_refuses(filters, said):
    with pytest.raises(PositionError, match=said):
        select(ENTRIES, **filters)


def typed(what: str) -> list[str]:
    return sorted(
        {
            line
            for entry in ENTRIES
            for line in entry.commands
            if line.startswith(f"visionpos {what}")
        }
    )


def ran(run, lines: list[str]) -> None:
    for line in lines:
        code, out, err = run(*shlex.split(line)[1:])
        assert (code, err, bool(out)) == (0, "", True), line


SHOWN = typed("encodings")


def test_commands_that_show_encodings_run(run):
    """A part of them; all stand in the slow set."""
    ran(run, [line for line in SHOWN if "--diff" not in line][::4])
    ran(run, [line for line in SHOWN if "--diff" in line][::16])


@pytest.mark.slow
def test_all_commands_that_show_encodings_run(run):
    ran(run, SHOWN)


def test_commands_that_make_streams_run(run, monkeypatch, tmp_path):
    """A photo that every family takes and none cuts; each dialect and variant is asked for."""
    monkeypatch.chdir(tmp_path)
    Pillow.fromarray(np.zeros((300, 451, 3), dtype=np.uint8)).save("photo.jpg")
    pages = [line for line in typed("stream") if "--html" in line]
    assert len(pages) == len(family_names())
    others = [line for line in typed("stream") if "--html" not in line]
    ran(run, [*pages[::9], *others])
    assert (tmp_path / "stream.html").is_file()


@pytest.mark.slow
def test_retrofit_takes_what_the_atlas_says():
    """A filling has a retrofit command where, and only where, it can be put on the backbone that the command names."""
    model = None
    for name in config.shipped("encodings"):
        if model is None:
            model = create("vit_base_patch16_224")
        try:
            attach(model, config.load_encoding(name), strength=0.0)
            detach(model)
            taken = True
        except PositionError:
            model, taken = None, False
        commands = BY_ID[f"encoding-{name}"].commands
        assert any(line.startswith("visionpos retrofit") for line in commands) == taken, name


def test_command_answers_in_json_and_writes_a_page(run, tmp_path):
    page = tmp_path / "atlas.html"
    code, out, err = run("atlas", "--model", "SAM", "--json", "--output", page)
    assert (code, err) == (0, "")
    names = [entry["name"] for entry in json.loads(out)]
    assert names == [entry.name for entry in select(ENTRIES, model="SAM")]
    assert all(f">{name}</th>" in page.read_text("utf-8") for name in names)


def test_command_prints_a_table(run):
    code, out, err = run("atlas", "--match", "perceiver")
    assert (code, err) == (0, "")
    assert "perceiver_fourier" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--model", "DINOv33"), "models hold no"),
        (("--output", "atlas.txt"), "no HTML file"),
    ],
)
def test_command_refuses(run, monkeypatch, tmp_path, words, said):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("atlas", *words)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
