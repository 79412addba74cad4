"""The `visionpos` command: look at encodings, families and models, retrofit and resize models, plan token streams.

Every command prints a table, or JSON with --json; writes only where --output says; exits 2 with one line on bad input.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from visionpos import config
from visionpos.cli.inputs import model_of, origin, segment, size_hw_of
from visionpos.cli.show import show, show_stream, steps, write_line
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
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option("--diff", help="Two encodings, or two resampling recipes, to compare."),
    ] = None,
    grid: Annotated[
        str, typer.Option(help="Token grid that tables are trained on, ROWSxCOLUMNS.")
    ] = "14x14",
    to: Annotated[
        str | None, typer.Option(help="Token grid to compare on; --grid when absent.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the shipped encodings, print one resolved spec, or show where two dialects part."""
    if diff is not None:
        show([_difference(diff, grid, to or grid)], as_json=as_json, title=" | ".join(diff))
        return
    if name is not None:
        spec = config.load_encoding(name, overrides=overrides or ())
        write_line(
            json.dumps({"encoding": config.plain(spec)})
            if as_json
            else config.dump_encoding(spec).rstrip()
        )
        return
    rows = []
    for key, file in config.shipped("encodings").items():
        about = config.read_yaml(file.read_text(encoding="utf-8"), source=f"{key}.yaml").get(
            "about", {}
        )
        rows.append(
            {"name": key, "kind": config.load_encoding(key).kind, "source": about.get("source", "")}
        )
    show(rows, as_json=as_json, title="Encodings")


def _difference(pair: tuple[str, str], grid: str, to: str) -> dict[str, Any]:
    """Return how far two encodings or recipes are apart, on a ViT-S."""
    from visionpos import Dims, Grid
    from visionpos.dialects import compare
    from visionpos.geometry import RECIPES

    dims = Dims(embed_dim=384, num_heads=6, depth=12)
    shipped, both = config.shipped("encodings"), all(name in RECIPES for name in pair)
    first, second = (
        name if both or (name in RECIPES and name not in shipped) else config.load_encoding(name)
        for name in pair
    )
    here, there = Grid(*size_hw_of(grid)), Grid(*size_hw_of(to))
    return {"to": to, **asdict(compare(first, second, dims=dims, grid=here, to=there))}


@app.command()
def families(
    as_json: Json = False,
) -> None:
    """List the VLM families, with their dialects and position rules."""
    from visionpos.vlm import family, family_names

    rows = []
    for name in family_names():
        fam = family(name)
        language = fam.spec.language
        rows.append(
            {
                "name": name,
                "default dialect": fam.dialect,
                "dialects": list(fam.dialects),
                "axes": list(fam.spec.rule.axes),
                "sections": ""
                if language is None or language.sections is None
                else f"{language.order} {list(language.sections)}",
            }
        )
    show(rows, as_json=as_json, title="Families")


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
    model: Model,
    output: Output,
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
    as_json: Json = False,
) -> None:
    """Put an encoding on a model and write its weights with their lineage."""
    from visionpos import retrofit

    spec = config.load_encoding(encoding, overrides=overrides or ())
    with steps() as step:
        step(f"building {model}")
        found = model_of(model, None, weights)
        step(f"attaching {spec.kind}")
        retrofit.attach(found, spec, strength=strength, learn_strength=learn_strength)
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
    as_json: Json = False,
) -> None:
    """Move a model to a new image size and write its weights with their lineage."""
    from visionpos import retrofit

    wanted: Any = extent
    with steps() as step:
        step(f"building {model}")
        found = model_of(model, None, weights)
        step(f"resizing to {size}")
        retrofit.resize(found, size_hw_of(size), recipe=recipe, extent=wanted)
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
    text: Annotated[str, typer.Option(help="Text before the media, one token a word.")] = "",
    fps: Annotated[
        float | None, typer.Option(help="Frames a second to sample from videos.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the token stream and position ids of a prompt made of text, photos and videos."""
    from visionpos.vlm import Text, family

    fam = family(family_name, dialect=dialect)
    segments: list[Any] = [Text(text)] if text else []
    with steps() as step:
        for path in media or []:
            step(f"reading {path}")
            segments.append(segment(path, fam, fps))
    if not segments:
        raise PositionError("media and --text are both empty; give a photo, a video or a text.")
    tokens = fam.stream(segments)
    show_stream(
        tokens,
        fam.position_ids(tokens),
        as_json=as_json,
        title=f"{fam.name}, dialect {fam.dialect}",
    )
