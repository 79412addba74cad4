"""The `visionpos` command: look at encodings, families and models, retrofit and resize models, plan token streams.

Every command prints a table, or JSON with --json; writes only where --output says; exits 2 with one line on bad input.
"""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from visionpos import config
from visionpos.errors import PositionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from visionpos.vlm import PositionIds, TokenStream

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
Model = Annotated[
    str, typer.Argument(help="A timm model name, or a .safetensors file written by visionpos.")
]


def main() -> None:
    """Run the command line; bad input ends with one line on standard error and exit code 2."""
    try:
        app(standalone_mode=False)
    except typer.Abort:
        sys.exit(130)
    except (PositionError, ImportError) as error:
        _fail(str(error))
    except Exception as error:
        # Usage errors of the parser carry their own message and exit code.
        show: Callable[[], str] | None = getattr(error, "format_message", None)
        if show is None:
            raise
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
        _show([_difference(diff, grid, to or grid)], as_json=as_json, title=" | ".join(diff))
        return
    if name is not None:
        spec = config.load_encoding(name, overrides=overrides or ())
        print_text(
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
    _show(rows, as_json=as_json, title="Encodings")


def _difference(pair: tuple[str, str], grid: str, to: str) -> dict[str, Any]:
    """Return how far two encodings or recipes are apart, on a ViT-S."""
    from visionpos import Dims, Grid
    from visionpos.dialects import compare
    from visionpos.geometry import RECIPES

    dims = Dims(embed_dim=384, num_heads=6, depth=12)
    shipped = config.shipped("encodings")
    first, second = (
        name if name in RECIPES and name not in shipped else config.load_encoding(name)
        for name in pair
    )
    here, there = Grid(*_size_hw(grid)), Grid(*_size_hw(to))
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
    _show(rows, as_json=as_json, title="Families")


@app.command()
def describe(
    model: Model,
    size: Size = None,
    as_json: Json = False,
) -> None:
    """Print the position parts of a model: tables, rotary encodings, attachments, ports."""
    from visionpos import retrofit

    with _steps() as step:
        step(f"building {model}")
        found = _model(model, size)
    rows = [asdict(part) for part in retrofit.describe(found)]
    _show(rows, as_json=as_json, title=model)


@app.command("retrofit")
def retrofit_command(
    model: Model,
    output: Output,
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
    with _steps() as step:
        step(f"building {model}")
        found = _model(model, None)
        step(f"attaching {spec.kind}")
        retrofit.attach(found, spec, strength=strength, learn_strength=learn_strength)
        if size is not None:
            step(f"resizing to {size}")
            retrofit.resize(found, _size_hw(size))
        step(f"writing {output}")
        retrofit.save(found, output)
    rows = [asdict(part) for part in retrofit.describe(found)]
    _show(rows, as_json=as_json, title=f"{model} -> {output}")


@app.command()
def resize(
    model: Model,
    size: Annotated[str, typer.Option("--size", help="New image size, HEIGHTxWIDTH in pixels.")],
    output: Output,
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
    with _steps() as step:
        step(f"building {model}")
        found = _model(model, None)
        step(f"resizing to {size}")
        retrofit.resize(found, _size_hw(size), recipe=recipe, extent=wanted)
        step(f"writing {output}")
        retrofit.save(found, output)
    rows = [asdict(part) for part in retrofit.describe(found)]
    _show(rows, as_json=as_json, title=f"{model} -> {output}")


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
    with _steps() as step:
        for path in media or []:
            step(f"reading {path}")
            segments.append(_segment(path, fam, fps))
    if not segments:
        raise PositionError("media and --text are both empty; give a photo, a video or a text.")
    tokens = fam.stream(segments)
    _show_stream(
        tokens,
        fam.position_ids(tokens),
        as_json=as_json,
        title=f"{fam.name}, dialect {fam.dialect}",
    )


def _segment(path: Path, fam: Any, fps: float | None) -> Any:
    """Return the Image or Video segment of a file, by what it decodes as."""
    from visionpos.vlm import Image, pixels

    try:
        return Image(size_hw=pixels.photo_size_hw(path))
    except PositionError as refusal:
        if not path.is_file():
            raise
        try:
            info = pixels.video_info(path)
        except PositionError:
            raise PositionError(
                f"{path} is neither a readable photo nor a readable video: {refusal}"
            ) from None
    if fps is None:
        count = fam.frame_count(info.frame_count, info.source_fps)
        spec = pixels.FrameSpec(count=count, multiple=1)
    else:
        spec = pixels.FrameSpec(fps=fps)
    return pixels.frames(info, spec=spec).video()


def _show_stream(tokens: TokenStream, pos: PositionIds, *, as_json: bool, title: str) -> None:
    """Print runs of equal tokens with the ids of their first and last token."""
    ids = pos.ids.T.tolist()
    rows, start = [], 0
    for name, run in groupby(tokens.names):
        stop = start + len(list(run))
        rows.append(
            {
                "token": name,
                "start": start,
                "count": stop - start,
                "first ids": ids[start],
                "last ids": ids[stop - 1],
            }
        )
        start = stop
    summary = {
        "length": tokens.length,
        "next_position": pos.next_position.item(),
        "delta": pos.delta.item(),
    }
    if as_json:
        spans = [_plain_span(span) for span in tokens.spans]
        print_text(
            json.dumps(
                {**summary, "spans": spans, "ids": pos.ids.tolist(), "names": list(tokens.names)}
            )
        )
        return
    _show(rows, as_json=False, title=title)
    print_text("  ".join(f"{key} {value}" for key, value in summary.items()))


def _plain_span(span: Any) -> dict[str, Any]:
    return {
        key: (asdict(value) if hasattr(value, "__dataclass_fields__") else value)
        for key, value in config.plain(span).items()
    }


def _model(name: str, size: str | None) -> Any:
    """Return a fresh timm model, or the one that a file holds."""
    from visionpos import retrofit

    if name.endswith(".safetensors"):
        model = retrofit.restore(name)
        if size is not None:
            retrofit.resize(model, _size_hw(size))
        return model
    return retrofit.create(name, size_hw=None if size is None else _size_hw(size))


def _size_hw(text: str) -> tuple[int, int]:
    """Return (height, width) of a text such as 320x448, in pixels or tokens."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.strip().isdecimal() for part in parts):
        raise PositionError(f"size is {text!r}; HEIGHTxWIDTH is required, such as 320x448.")
    return int(parts[0]), int(parts[1])


def _cell(value: Any) -> str:
    """Return a value as the text of a table cell."""
    if value is None or value == ():
        return ""
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return "x".join(map(str, value)) if isinstance(value, tuple) else " ".join(map(str, value))
    return str(value)


def _show(rows: Sequence[dict[str, Any]], *, as_json: bool, title: str) -> None:
    """Print rows as JSON or as a table."""
    if as_json:
        print_text(json.dumps(list(rows)))
        return
    table = Table(title=title, title_justify="left", highlight=False)
    for key in rows[0] if rows else ():
        table.add_column(key.replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(_cell(value) for value in row.values()))
    Console(markup=False, highlight=False).print(table)


def print_text(text: str) -> None:
    """Write one line to standard output, unwrapped."""
    sys.stdout.write(text + "\n")


@contextmanager
def _steps() -> Iterator[Callable[[str], None]]:
    """Show a progress line on a terminal while something takes its time."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)
