"""The `visionpos` command: look at encodings, families and models, retrofit and resize models, plan token streams.

Every command prints a table, or JSON with --json; writes only where --output or --draw says; exits 2 with one line on
bad input.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from visionpos import config
from visionpos.cli.atlas import atlas
from visionpos.cli.auditing import audit
from visionpos.cli.covered import show_coverage
from visionpos.cli.drawing import draw_photos
from visionpos.cli.fillings import check_company, difference, shipped_rows
from visionpos.cli.inputs import hushed, model_of, origin, segment, size_hw_of
from visionpos.cli.lineages import lineage_app
from visionpos.cli.pages import check_page, stream_html, write_page
from visionpos.cli.planned import family_rows, family_table, plan_rows
from visionpos.cli.show import show, show_stream, steps, write_json, write_line
from visionpos.cli.stretching import stretch
from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Callable


app = typer.Typer(
    help="Positional encodings for vision and multimodal transformers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Override, such as encoding.theta=100.")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="File to write.")]
Size = Annotated[str | None, typer.Option("--size", help="Image size, HEIGHTxWIDTH in pixels.")]
Weights = Annotated[
    Path | None,
    typer.Option(help="State dict of the model (safetensors, no head); random weights without it."),
]
Model = Annotated[
    str, typer.Argument(help="A timm model name, or a .safetensors file written by visionpos.")
]


def main() -> None:
    """Run the command line; bad input ends with one line on standard error and exit code 2."""
    try:
        app(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except (PositionError, ImportError, OSError, RecursionError) as error:
        _fail(str(error))
    except Exception as error:
        # Usage errors of the parser carry their own message and exit code.
        show: Callable[[], str] | None = getattr(error, "format_message", None)
        if show is None:
            raise
        if not show():  # the help was printed
            sys.exit(2)
        _fail(show())


def _fail(message: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False, markup=False).print(
        f"visionpos: {' '.join(message.split())}"
    )
    sys.exit(2)


@app.command()
def encodings(
    name: Annotated[
        str | None, typer.Argument(help="One shipped encoding, or a YAML file.")
    ] = None,
    overrides: Set = None,
    kind: Annotated[str | None, typer.Option(help="List only this kind.")] = None,
    match: Annotated[
        str | None, typer.Option(help="List only what has this text in its name, kind or source.")
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", help="Two encodings or dialects, or two recipes, to compare."),
    ] = None,
    grid: Annotated[
        str, typer.Option(help="Token grid that tables are trained on, ROWSxCOLUMNS.")
    ] = "14x14",
    to: Annotated[
        str | None,
        typer.Option(
            help="Token grid to compare on, [FRAMESx]ROWSxCOLUMNS; --grid when absent, or one that both serve."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the shipped encodings, print one resolved spec, or show where two dialects part."""
    filters = {"--kind": kind, "--match": match}
    if diff is not None:
        check_company("--diff", {"NAME": name, "--set": overrides, **filters})
        show([difference(diff, grid, to)], as_json=as_json, title=" | ".join(diff))
        return
    if name is not None:
        check_company("NAME", {"--to": to, **filters})
        spec = config.load_encoding(name, overrides=overrides or ())
        if as_json:
            write_json({"encoding": config.plain(spec)})
        else:
            write_line(config.dump_encoding(spec).rstrip())
        return
    check_company("a list", {"--to": to, "--set": overrides})
    show(shipped_rows(kind, match), as_json=as_json, title="Encodings")


@app.command()
def families(
    as_json: Json = False,
) -> None:
    """List the VLM families, with their dialects, variants and position rules."""
    rows = family_rows()
    show(rows if as_json else family_table(rows), as_json=as_json, title="Families")


@app.command()
def describe(
    model: Model,
    size: Size = None,
    as_json: Json = False,
) -> None:
    """Print the position parts of a model: tables, rotary encodings, attachments, ports."""
    from visionpos import retrofit

    with steps() as step:
        step(f"building {model}")
        found = model_of(model, size)
    rows = [asdict(part) for part in retrofit.describe(found)]
    show(rows, as_json=as_json, title=model)


@app.command("retrofit")
def retrofit_command(
    model: Annotated[
        str | None,
        typer.Argument(help="A timm model name, or a .safetensors file written by visionpos."),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write.")] = None,
    weights: Weights = None,
    encoding: Annotated[
        str, typer.Option(help="A shipped encoding, or a YAML file.")
    ] = "rope_mixed",
    strength: Annotated[float, typer.Option(help="0 leaves outputs unchanged, 1 is full.")] = 0.0,
    learn_strength: Annotated[
        bool, typer.Option("--learn-strength", help="Make the strength a parameter.")
    ] = False,
    size: Size = None,
    overrides: Set = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Accept that attentions without a port are left out."),
    ] = False,
    coverage: Annotated[
        bool,
        typer.Option(
            "--coverage",
            help="Print what can be attached to MODEL, or what can be done for every model class; and stop.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Put an encoding on a model and write its weights with their lineage."""
    from visionpos import retrofit

    if coverage:
        show_coverage(model, as_json=as_json)
        return
    if model is None or output is None:
        raise PositionError(f"Missing {'argument MODEL' if model is None else 'option --output'}.")
    spec = config.load_encoding(encoding, overrides=overrides or ())
    with steps() as step:
        step(f"building {model}")
        found = model_of(model, None, weights)
        step(f"attaching {spec.kind}")
        retrofit.attach(
            found, spec, strength=strength, learn_strength=learn_strength, partial=partial
        )
        if size is not None:
            step(f"resizing to {size}")
            retrofit.resize(found, size_hw_of(size))
        step(f"writing {output}")
        retrofit.save(found, output)
    rows = [asdict(part) for part in retrofit.describe(found)]
    show(rows, as_json=as_json, title=f"{model} ({origin(model, weights)}) -> {output}")


@app.command()
def resize(
    model: Model,
    size: Annotated[str, typer.Option("--size", help="New image size, HEIGHTxWIDTH in pixels.")],
    output: Output,
    weights: Weights = None,
    recipe: Annotated[
        str | None, typer.Option(help="Resampling recipe; the checkpoint's own by default.")
    ] = None,
    extent: Annotated[
        str | None, typer.Option(help="trained (same view) or index (wider view).")
    ] = None,
    patch: Annotated[
        str | None, typer.Option(help="New patch size, HEIGHTxWIDTH in pixels.")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="keep or scale the windows of attention, or ROWSxCOLUMNS in cells."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Move a model to a new image size and write its weights with their lineage."""
    from visionpos import retrofit

    options: Any = {"recipe": recipe, "extent": extent}
    options["patch"] = None if patch is None else size_hw_of(patch)
    options["windows"] = size_hw_of(windows) if windows and windows[0].isdigit() else windows
    with steps() as step:
        step(f"building {model}")
        found = model_of(model, None, weights)
        step(f"resizing to {size}")
        retrofit.resize(found, size_hw_of(size), **options)
        step(f"writing {output}")
        retrofit.save(found, output)
    rows = [asdict(part) for part in retrofit.describe(found)]
    show(rows, as_json=as_json, title=f"{model} ({origin(model, weights)}) -> {output}")


@app.command()
def stream(
    media: Annotated[
        list[Path] | None, typer.Argument(help="Photos and video files, in reading order.")
    ] = None,
    family_name: Annotated[
        str, typer.Option("--family", help="See `visionpos families`.")
    ] = "qwen2_5_vl",
    dialect: Annotated[
        str | None, typer.Option(help="Whose rules; the vendor's by default.")
    ] = None,
    variant: Annotated[str | None, typer.Option(help="A named variant of the family.")] = None,
    text: Annotated[str, typer.Option(help="Text before the media, one token a word.")] = "",
    fps: Annotated[
        float | None, typer.Option(help="Frames a second to sample from videos.")
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(help="PNG to write: photos with views, rows, breaks and token numbers."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="HTML page to write: every token, its ids and its place on the photo."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the plan, token stream and position ids of a prompt made of text, photos and videos."""
    from visionpos.vlm import Text, family

    if html is not None:
        check_page(html)
    fam = family(family_name, dialect=dialect, variant=variant)
    segments: list[Any] = [Text(text)] if text else []
    with steps() as step, hushed():
        for path in media or []:
            step(f"reading {path}")
            segments.append(segment(path, fam, fps))
    if not segments:
        raise PositionError("media and --text are both empty; give a photo, a video or a text.")
    tokens = fam.stream(segments)
    drawing = None
    if draw is not None:
        with hushed():
            drawing = draw_photos(draw, media or [], segments, fam, tokens)
    pos = None if fam.spec.rule is None else fam.position_ids(tokens)
    title = f"{fam.name}, dialect {fam.dialect}" + (f", variant {variant}" if variant else "")
    if html is not None:
        with hushed():
            write_page(html, stream_html(media or [], segments, fam, tokens, pos, title=title))
    show_stream(tokens, pos, plan_rows(fam, segments), drawing, as_json=as_json, title=title)
    if html is not None and not as_json:
        write_line(f"wrote {html}")


app.command()(atlas)
app.command()(audit)
app.command()(stretch)
app.add_typer(lineage_app, name="lineage")
