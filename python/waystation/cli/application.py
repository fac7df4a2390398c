"""Declares every command: its arguments, options and help. Nothing is done here.

Exit codes are the same everywhere: 0 all is well; 1 the command worked and what it looked for is not well (a
difference, damage); 2 it could not do its work, or was called wrongly; 130 it was interrupted;
141 whoever read its output closed the pipe. Modules of commands are imported when they run, and help is plain
text, so that help and completion stay quick.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from waystation.cli import memory_application, runtime_application, safetensors_application
from waystation.cli.arguments import (
    CHECKPOINTS,
    GETTING_STARTED,
    PROGRAMS,
    AgentDirectory,
    AgentHosts,
    AgentMetrics,
    AgentMetricsPort,
    AsJson,
    GroupByTopic,
    Storage,
    Traceback,
    complete_path,
    local_path,
    place,
)
from waystation.cli.reporting import reporting

application: typer.Typer = typer.Typer(
    name="waystation",
    cls=GroupByTopic,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich takes longer to import than everything else that help needs
    context_settings={"help_option_names": ["-h", "--help"]},
)


Checkpoint = Annotated[
    str,
    typer.Argument(
        metavar="PATH",
        help="The checkpoint: a path, or a location such as s3://bucket/run/1200.",
        parser=place,
        autocompletion=complete_path,
    ),
]
Directory = Annotated[
    str,
    typer.Argument(
        metavar="DIRECTORY",
        help="A directory that holds checkpoints, or a location such as s3://bucket/run.",
        parser=place,
        autocompletion=complete_path,
    ),
]
Checkpointable = Annotated[
    str | None,
    typer.Option(
        "--checkpointable",
        metavar="NAME",
        help="The checkpointable to export; by default 'state', or the first state by name.",
    ),
]


BytesPerSecond = Annotated[
    str | None,
    typer.Option(
        "--bytes-per-second", metavar="SIZE", help="Read no more than this in a second, such as 50MB."
    ),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        import waystation

        typer.echo(f"waystation {waystation.__version__}")
        raise typer.Exit


@application.callback()
def _all(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Inspect, verify, compare and convert checkpoints, and run programs that save them.

    Exit codes: 0 success, 1 a difference or damage was found, 2 the command failed.
    """


@application.command("inspect", rich_help_panel=CHECKPOINTS)
def _inspect(
    path: Checkpoint,
    checkpointable: Annotated[
        str | None, typer.Option("--checkpointable", metavar="NAME", help="Show only this checkpointable.")
    ] = None,
    depth: Annotated[
        int | None, typer.Option("--depth", min=1, help="Summarise containers below this many levels.")
    ] = None,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Show what a checkpoint holds: its tree with shapes, dtypes, shardings and sizes."""
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import inspect

        inspect.run(output, path, checkpointable, depth)


@application.command("ls", rich_help_panel=CHECKPOINTS)
def _ls(
    directory: Directory = ".",
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """List the checkpoints and unfinished saves of a directory.

    Exits with 1 if the record of a checkpoint is damaged.
    """
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import ls

        ls.run(output, directory)


@application.command("sum", rich_help_panel=CHECKPOINTS)
def _sum(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A safetensors file, an index, or their directory.",
            parser=place,
            autocompletion=complete_path,
        ),
    ],
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Write checksums of a published model beside its files; loads and 'verify' then check them."""
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import published

        published.run_sum(output, path)


@application.command("verify", rich_help_panel=CHECKPOINTS)
def _verify(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="The checkpoint, or published model: a path or a location.",
            parser=place,
            autocompletion=complete_path,
        ),
    ],
    every: Annotated[
        bool, typer.Option("--all", help="Verify each checkpoint in the directory PATH.")
    ] = False,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Read all of a checkpoint, or of a model that has checksums from 'sum', and check every checksum.

    Exits with 1 if something is damaged.
    """
    with reporting(as_json, traceback, storage, verifies=True) as output:
        from waystation.cli.commands import published, verify

        if not every and published.is_model(path):
            published.run_verify(output, path)
        else:
            verify.run(output, path, every=every)


@application.command("diff", rich_help_panel=CHECKPOINTS)
def _diff(
    first: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A checkpoint: a path or a location.",
            parser=place,
            autocompletion=complete_path,
        ),
    ],
    second: Annotated[
        str,
        typer.Argument(metavar="B", help="The other checkpoint.", parser=place, autocompletion=complete_path),
    ],
    atol: Annotated[
        float, typer.Option("--atol", min=0, help="Tolerate absolute differences up to this value.")
    ] = 0.0,
    rtol: Annotated[
        float,
        typer.Option("--rtol", min=0, help="Tolerate differences up to this fraction of the larger number."),
    ] = 0.0,
    structure_only: Annotated[
        bool, typer.Option("--structure-only", help="Compare structures only; read no arrays.")
    ] = False,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Compare two checkpoints, in structure and values, bit by bit unless a tolerance is given.

    Frameworks and shardings are not compared. Exits with 1 if the checkpoints differ.
    """
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import diff

        diff.run(output, first, second, atol, rtol, structure_only=structure_only)


@application.command("view", rich_help_panel=CHECKPOINTS)
def _view(
    paths: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH...",
            help="Checkpoints, directories that hold them, or locations such as s3://bucket/run; timelines "
            "(.json, .jsonl) and logs of programs, whose waits are then shown.",
            parser=place,
            autocompletion=complete_path,
        ),
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of the page; 0 takes one that is free.")
    ] = 0,
    no_browser: Annotated[
        bool, typer.Option("--no-browser", help="Print the address, and open no browser.")
    ] = False,
    directory: AgentDirectory = None,
    metrics: AgentMetrics = None,
    hosts: AgentHosts = None,
    metrics_port: AgentMetricsPort = 9464,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Show checkpoints, runs, timelines and agents in a web page that only this machine can open.

    Runs until Ctrl-C, and changes nothing. --json prints the address as a document, and opens no browser.
    With --directory, --metrics or --hosts the page also watches agents, as 'top' does. Without PATH it shows
    the working directory.
    """
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import top, view

        agents = top.Request(directory, metrics or [], hosts, metrics_port, interval_s=1.0, once=False)
        view.run(output, view.Request(paths or ["."], port, not no_browser, agents))


@application.command("export", rich_help_panel=CHECKPOINTS)
def _export(
    path: Checkpoint,
    output_path: Annotated[
        Path,
        typer.Argument(
            metavar="OUTPUT",
            help="A directory for model.safetensors, or a name that ends in .safetensors or .npz.",
            parser=local_path,
            autocompletion=complete_path,
        ),
    ],
    file_format: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="safetensors|npz", help="The format; by default that of OUTPUT's suffix."
        ),
    ] = None,
    max_shard_bytes: Annotated[
        str,
        typer.Option(
            "--max-shard-bytes",
            metavar="SIZE",
            help="Most bytes of arrays in a file; a larger array has its own.",
        ),
    ] = "5GB",
    checkpointable: Checkpointable = None,
    select: Annotated[
        str | None,
        typer.Option("--select", metavar="REGEX", help="Export only arrays whose dotted name matches."),
    ] = None,
    cast: Annotated[
        list[str] | None,
        typer.Option("--cast", metavar="FROM=TO", help="Convert one dtype to another; may be repeated."),
    ] = None,
    allow_lossy_casts: Annotated[
        bool, typer.Option("--allow-lossy-casts", help="Allow --cast to lose more than rounding does.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier export.")] = False,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Write arrays to safetensors files, with the index of Hugging Face tools, or to npz."""
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import export

        request = export.Request(
            path,
            output_path,
            file_format,
            max_shard_bytes,
            checkpointable,
            select,
            cast or [],
            allow_lossy_casts,
            overwrite,
        )
        export.run(output, request)


@application.command("cp", rich_help_panel=CHECKPOINTS)
def _cp(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="The checkpoint: a path or a location.",
            parser=place,
            autocompletion=complete_path,
        ),
    ],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DESTINATION",
            help="The path or location that the copy is to have.",
            parser=place,
            autocompletion=complete_path,
        ),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a checkpoint at DESTINATION.")
    ] = False,
    bytes_per_second: BytesPerSecond = None,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Copy a checkpoint between disks and object stores. Every block is verified on the way.

    The copy is visible only once it is whole. A copy that was interrupted goes on where the same command is
    given again.
    """
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import cp

        cp.run(output, source, destination, overwrite=overwrite, bytes_per_second=bytes_per_second)


@application.command("mirror", rich_help_panel=CHECKPOINTS)
def _mirror(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A directory that holds checkpoints, or a location.",
            parser=place,
            autocompletion=complete_path,
        ),
    ],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DESTINATION",
            help="The directory or location that is to have them.",
            parser=place,
            autocompletion=complete_path,
        ),
    ],
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace checkpoints at DESTINATION that differ.")
    ] = False,
    delete: Annotated[
        bool, typer.Option("--delete", help="Remove checkpoints at DESTINATION that SOURCE does not have.")
    ] = False,
    bytes_per_second: BytesPerSecond = None,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Copy the checkpoints that another directory lacks, the newest first.

    Each is copied as by 'cp'. Those that are there and equal are passed over. Exits with 1 if one differs or
    is damaged.
    """
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import cp

        cp.run_mirror(
            output,
            source,
            destination,
            overwrite=overwrite,
            delete=delete,
            bytes_per_second=bytes_per_second,
        )


@application.command("gc", rich_help_panel=CHECKPOINTS)
def _gc(
    directory: Directory = ".",
    older_than: Annotated[
        str,
        typer.Option(
            "--older-than",
            metavar="AGE",
            help="Minimum age of leftovers from other machines, such as 12h or 2w.",
        ),
    ] = "1d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    storage: Storage = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Remove leftovers of interrupted saves and exports. Checkpoints and running saves are never touched."""
    with reporting(as_json, traceback, storage) as output:
        from waystation.cli.commands import gc

        gc.run(output, directory, older_than, dry_run=dry_run, yes=yes)


@application.command("demo", rich_help_panel=GETTING_STARTED)
def _demo(
    output_path: Annotated[
        Path, typer.Option("--output", metavar="DIR", help="Directory for checkpoints, logs and the plot.")
    ] = Path("waystation-demo"),
    memory: Annotated[
        bool,
        typer.Option("--memory", help="Use four hosts, lose one, and resume from the memory of the others."),
    ] = False,
    runtime: Annotated[
        bool,
        typer.Option("--runtime", help="Run two programs on two islands of Ray hosts, and kill a host."),
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Train for fewer steps.")] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Train, kill the program, resume on other devices, and prove that nothing was lost."""
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import demo

        demo.run(output, output_path, memory=memory, runtime=runtime, quick=quick)


@application.command("doctor", rich_help_panel=GETTING_STARTED)
def _doctor(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH",
            help="A directory on the file system to examine.",
            parser=local_path,
            autocompletion=complete_path,
        ),
    ] = Path("."),
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Measure this file system for some seconds, and remember the fastest way to use it.",
        ),
    ] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Report what this machine and file system offer, and what would make saves and loads faster.

    Exits with 1 if something keeps Waystation from working here.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import doctor

        doctor.run(output, path, tune=tune)


@application.command("launch", rich_help_panel=PROGRAMS, context_settings={"allow_interspersed_args": False})
def _launch(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The program and its arguments.")],
    count: Annotated[
        int, typer.Option("-n", "--processes", min=1, help="Number of processes on each host.")
    ] = 1,
    jax: Annotated[bool, typer.Option("--jax", help="Set only what JAX reads.")] = False,
    torch: Annotated[bool, typer.Option("--torch", help="Set only what torch reads.")] = False,
    grace: Annotated[
        float | None,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            min=0,
            help="Time that the other processes have to end after one failed. "
            "[default: 30, and 1 where the program is started again]",
        ),
    ] = None,
    restarts: Annotated[
        int,
        typer.Option(
            "--restarts", metavar="N", min=0, help="Maximum number of restarts of the program or the agent."
        ),
    ] = 0,
    agent: Annotated[
        Path | None,
        typer.Option(
            "--agent",
            metavar="DIR",
            help="Keep checkpoints in memory: the directory of an agent, on a tmpfs such as /dev/shm.",
        ),
    ] = None,
    agent_memory: Annotated[
        str | None,
        typer.Option("--agent-memory", metavar="BYTES", help="Memory limit of a new agent, such as 8GiB."),
    ] = None,
    agent_versions: Annotated[
        int,
        typer.Option(
            "--agent-versions", metavar="N", min=1, help="Committed versions that a new agent keeps."
        ),
    ] = 2,
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="FILE|N",
            help="A JSON file that lists the hosts, or the number of hosts to emulate on this machine.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="NAME", help="Name of this host in the file.")
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            "--secret-file", metavar="FILE", help="File with the secret that the agents of all hosts share."
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option("--tls-certificate", metavar="FILE", help="Certificate of this host's agent."),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="Private key of that certificate.")
    ] = None,
    tls_authorities: Annotated[
        Path | None,
        typer.Option(
            "--tls-authorities", metavar="FILE", help="Authorities that sign the certificates of all hosts."
        ),
    ] = None,
    copies: Annotated[
        int, typer.Option("--copies", metavar="M", min=1, help="Number of copies of each shard.")
    ] = 2,
    port: Annotated[
        int,
        typer.Option("--port", min=1, max=65533, help="First of three rendezvous ports on the first host."),
    ] = 29500,
    wait: Annotated[
        float,
        typer.Option(
            "--wait",
            metavar="SECONDS",
            min=0,
            help="Time that launches of several hosts wait for each other.",
        ),
    ] = 600.0,
    standby: Annotated[
        bool,
        typer.Option(
            "--standby/--no-standby",
            help="With --restarts, keep a process ready for each one of a Python program, with its imports "
            "done.",
        ),
    ] = True,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Run the processes of one program on this machine, and name the one that failed first.

    Sets the environment variables of `torch.distributed` and `jax.distributed`. Exits with 1 if a process
    ended abnormally. The agent outlives the program and the launch, so a later launch resumes from its
    memory. With a file of hosts, run this command on each host; with --restarts, the hosts restart the
    program together.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import launch
        from waystation_launch.launch import Request

        either = jax or torch
        request = Request(
            command,
            count,
            jax=jax or not either,
            torch=torch or not either,
            grace_s=grace,
            restarts=restarts,
            agent=agent,
            agent_memory=agent_memory,
            agent_versions=agent_versions,
            hosts=hosts,
            host=host,
            secret_file=secret_file,
            tls=(tls_certificate, tls_key, tls_authorities),
            copies=copies,
            port=port,
            wait_s=wait,
            has_standbys=standby,
        )
        launch.run(output, request)


safetensors_application.declare(application)
memory_application.declare(application)
runtime_application.declare(application)
