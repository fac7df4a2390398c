"""`python -m benchmarks`: measures, prints the tables and the targets, keeps the JSON, draws the chart."""

from __future__ import annotations

import argparse

from benchmarks import markdown
from benchmarks.analysis import Results
from benchmarks.chart import draw
from benchmarks.command import add_charts_argument, measured, session_parser, wide_console
from benchmarks.plan import DEFAULT_STATES, Selection
from benchmarks.report import show
from benchmarks.states import STATES
from benchmarks.systems import SYSTEMS, USUAL_SYSTEMS
from benchmarks.systems.limit import Limit
from benchmarks.worker import OPERATIONS


def main() -> None:
    arguments = _parse()
    console = wide_console()
    ways = None if arguments.limit_ways is None else frozenset(arguments.limit_ways)
    selection = Selection(
        arguments.states, arguments.systems, arguments.operations, ways, maps=not arguments.no_mapped
    )
    document = measured(arguments, selection, "all", console)
    if arguments.markdown:
        results = Results(document)
        for state in results.states():
            for line in markdown.lines(results, state):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    else:
        show(document, console)
    if arguments.charts is not None:
        draw(document, arguments.charts / "benchmark.svg")


def _parse() -> argparse.Namespace:
    parser = session_parser("benchmarks", 5, __doc__)
    parser.add_argument("--states", nargs="+", choices=STATES, default=DEFAULT_STATES, metavar="STATE")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=USUAL_SYSTEMS, metavar="SYSTEM")
    parser.add_argument("--operations", nargs="+", choices=OPERATIONS, default=OPERATIONS, metavar="NAME")
    parser.add_argument(
        "--limit-ways",
        nargs="+",
        choices=sorted({*Limit.save_ways, *Limit.load_ways}),
        metavar="WAY",
        help="the raw loops to try, by the names in the tables (default: all, which takes most of the time)",
    )
    parser.add_argument(
        "--no-mapped", action="store_true", help="leave out loads that map the files of a checkpoint"
    )
    parser.add_argument(
        "--markdown", action="store_true", help="print the tables of the documentation instead"
    )
    add_charts_argument(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
