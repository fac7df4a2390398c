"""Declares the commands of the memory tier, as `application` does the others. Nothing is done here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from waystation.cli.arguments import (
    MEMORY,
    AgentDirectory,
    AgentHosts,
    AgentMetrics,
    AgentMetricsPort,
    AsJson,
    Traceback,
)
from waystation.cli.reporting import reporting

_COMMANDS = typer.Typer()


def declare(application: typer.Typer) -> None:
    """Adds them to all others."""
    application.registered_commands.extend(_COMMANDS.registered_commands)


@_COMMANDS.command("placement", rich_help_panel=MEMORY)
def _placement(
    hosts: Annotated[int | None, typer.Option("--hosts", min=1, help="Number of hosts.")] = None,
    copies: Annotated[
        int, typer.Option("--copies", min=1, help="Copies of each shard, including that of its own host.")
    ] = 2,
    domains: Annotated[
        Path | None,
        typer.Option(
            "--domains", metavar="FILE", help="File with a host and its failure domain on each line."
        ),
    ] = None,
    hosts_per_domain: Annotated[
        int | None,
        typer.Option("--hosts-per-domain", min=1, help="Number of consecutive hosts in each failure domain."),
    ] = None,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Plan which hosts keep copies of each shard in memory, and show which losses the plan survives."""
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import placement

        placement.run(output, placement.Request(hosts, copies, domains, hosts_per_domain))


@_COMMANDS.command(
    "agent",
    rich_help_panel=MEMORY,
    # The options are the agent's, its --help included.
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": [],
    },
)
def _agent(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="run|discard [OPTION...]", help="Arguments of the agent.")
    ] = None,
) -> None:
    """Run the agent that keeps checkpoints in this host's memory, or remove the store of an earlier agent.

    The agent is a separate program, which replaces this command; 'waystation agent --help' lists its options.
    """
    with reporting(as_json=False, show_traceback=False) as output:
        from waystation.cli.commands import agent

        agent.run(output, arguments or [])


@_COMMANDS.command("top", rich_help_panel=MEMORY)
def _top(
    directory: AgentDirectory = None,
    metrics: AgentMetrics = None,
    hosts: AgentHosts = None,
    metrics_port: AgentMetricsPort = 9464,
    interval: Annotated[
        float, typer.Option("--interval", metavar="SECONDS", min=0.1, help="Time between two updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False,
    as_json: AsJson = False,
    traceback: Traceback = False,
) -> None:
    """Watch the agents that keep checkpoints in memory: slots, versions, replication, recovery.

    By default it watches the agent of WAYSTATION_AGENT_DIRECTORY. --json prints the state once. Exits with 1
    if an agent does not answer.
    """
    with reporting(as_json, traceback) as output:
        from waystation.cli.commands import top

        request = top.Request(directory, metrics or [], hosts, metrics_port, interval, once)
        top.run(output, request)
