"""Declares the commands for published models, as `application` does the others. Nothing is done here."""

from __future__ import annotations

import itertools
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from waystation.cli.arguments import (
    CHECKPOINTS,
    AsJson,
    GroupByTopic,
    Storage,
    Traceback,
    complete_path,
    place,
)
from waystation.cli.reporting import reporting

_COMMANDS = typer.Typer(cls=GroupByTopic, no_args_is_help=True, rich_markup_mode=None)
_TO = "--to"


def declare(application: typer.Typer) -> None:
    """Adds them, under a name of their own."""
    application.add_typer(
        _COMMANDS,
        name="safetensors",
        help="Spread a published model over several disks.",
        rich_help_panel=CHECKPOINTS,
    )


class _SeveralFolders(TyperCommand):
    """A command whose `--to` takes all up to the next option, as shells expand `/disk{1,2}/model`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Gives each folder an option of its own."""
        options = list(itertools.takewhile(lambda part: part != "--", args))
        spelled: list[str] = []
        is_folder = False
        for part in options:
            if part.startswith("-") and part != "-":
                is_folder = part.partition("=")[0] == _TO
                if not is_folder:
                    spelled.append(part)
                elif part != _TO:
                    spelled += [_TO, part.partition("=")[2]]
            else:
                spelled += [_TO, part] if is_folder else [part]
        if options[-1:] == [_TO]:
            spelled.append(_TO)  # for which an argument is missing
        return super().parse_args(ctx, [*spelled, *args[len(options) :]])


@_COMMANDS.callback()
def _safetensors() -> None:
    """Work on published models in safetensors files. 'sum' and 'verify' do as well."""


@_COMMANDS.command("spread", cls=_SeveralFolders)
def _spread(
    path: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A safetensors file, an index, their directory, or a location such as s3://bucket/model.",
            parser=place,
            autocompletion=complete_path,
        ),
    ],
    to: Annotated[
        list[str],
        typer.Option(
            _TO,
            metavar="FOLDER...",
            help="Two folders or more, one on each disk, such as /disk{1,2,3}/model. The first becomes the "
            "model: it must not exist yet, or be empty.",
            autocompletion=complete_path,
        ),
    ],
    max_shard_bytes: Annotated[
        str,
        typer.Option(
            "--max-shard-bytes",
            metavar="SIZE",
            help="Most bytes of arrays in a file; a larger array has its own.",
        ),
    ] = "5GB",
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a model that was spread there before.")
    ] = False,
    relative_links: Annotated[
        bool,
        typer.Option(
            "--relative-links",
            help="Make links relative, for disks that are mounted elsewhere together; by default the first "
            "folder can be moved.",
        ),
    ] = False,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Write a model's tensors to files on several disks, which loads read at the same time.

    The first folder is the model that programs load: it has the index, the configuration, and links to the
    files on the other disks. What is written is compared before it appears; MODEL stays as it is.
    """
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import spread

        spread.run(output, spread.Request(path, to, max_shard_bytes, overwrite, relative_links))
