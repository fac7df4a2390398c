"""Declares the commands of the memory tier, as `application` does the others. Nothing is done here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from waystation.cli import topics
from waystation.cli.arguments import AsJson, Traceback
from waystation.cli.reporting import reporting

_COMMANDS = typer.Typer()


def declare(application: typer.Typer) -> None:
    """Adds them to all others."""
    application.registered_commands.extend(_COMMANDS.registered_commands)


@_COMMANDS.command("placement", rich_help_panel=topics.MEMORY)
def _placement(
    hosts: Annotated[int | None, typer.Option("--hosts", min=1, help="How many hosts there are.")] = None,
    copies: Annotated[
        int, typer.Option("--copies", min=1, help="Copies of each shard, that of its own host included.")
    ] = 2,
    domains: Annotated[
        Path | None,
        typer.Option("--domains", metavar="FILE", help="Lines of a host and its failure domain."),
    ] = None,
    hosts_per_domain: Annotated[
        int | None,
        typer.Option("--hosts-per-domain", min=1, help="So many hosts in order share a failure domain."),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Plan which hosts keep copies of whose shards in memory, and show what losses that survives."""
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import placement

        placement.run(output, placement.Request(hosts, copies, domains, hosts_per_domain))


@_COMMANDS.command(
    "agent",
    rich_help_panel=topics.MEMORY,
    # The options are the agent's, its --help included.
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
)
def _agent(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="run|discard [OPTION...]", help="What the agent is told.")
    ] = None,
) -> None:
    """Run the agent that keeps checkpoints in this host's memory, or remove what one has left.

    It is a program of its own, which this command becomes; 'waystation agent --help' tells of its options.
    """
    with reporting(as_json=False, show_traceback=False) as output:
        from waystation.cli.commands import agent

        agent.run(output, arguments or [])


@_COMMANDS.command("top", rich_help_panel=topics.MEMORY)
def _top(
    directory: Annotated[
        Path | None,
        typer.Option("--directory", metavar="DIR", help="The agent of this store on this host."),
    ] = None,
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics", metavar="HOST:PORT", help="An agent that serves metrics there; repeatable."
        ),
    ] = None,
    hosts: Annotated[
        Path | None, typer.Option("--hosts", metavar="FILE", help="The agents of this file of hosts.")
    ] = None,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", help="Where each agent of the file serves metrics.")
    ] = 9464,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="How often to look.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Watch the agents that keep checkpoints in memory: slots, versions, replication, recovery.

    By default the agent that the environment names. With --json it looks once. An agent that does not answer
    exits with 1.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import top

        request = top.Request(directory, metrics or [], hosts, metrics_port, interval, once)
        top.run(output, request)
