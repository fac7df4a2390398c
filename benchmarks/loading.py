"""`python -m benchmarks.loading`: published models, loaded by Waystation and by what else loads them.

Models of several sizes in bfloat16, in one file, in several with an index, and with tensors at multiples of
64 bytes; a real one; and many small tensors. All libraries load the same files, in turns, cold and warm, each
in a fresh process: everything at once, and one array after another. Prints the tables and the targets, keeps
the JSON, draws the chart.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.chart import LOADING, draw
from benchmarks.command import add_charts_argument, measured, session_parser, wide_console
from benchmarks.loading_targets import PUBLISHED
from benchmarks.plan import Selection
from benchmarks.report import show
from benchmarks.worker import STREAM_OPERATIONS

PUBLISHERS = {
    "llama-half-gb": "published",
    "llama-1gb": "published",
    "llama": "published",
    "llama-in-files": "published-in-files",
    "llama-aligned": "published-aligned",
    "small": "published",
    "small-20000": "published",
    "minilm": "published-original",
}
"""The models, and who publishes each."""
LOADS = ("load-cold", "load-warm")
JAX_SYSTEMS = ("waystation-safetensors-jax", "safetensors-jax")
PEERS = ("safetensors-jax", "safetensors-torch", "fastsafetensors", "runai", "instanttensor")
SYSTEMS = ("limit", "waystation-safetensors-jax", "waystation-safetensors-torch", *PEERS)
# Where the alignment decides, or what another model shows already is not measured again.
SYSTEMS_OF = {"llama-in-files": SYSTEMS[1:], "llama-aligned": JAX_SYSTEMS}
OPERATIONS_OF = dict.fromkeys(("llama-half-gb", "llama-1gb", "llama-aligned"), LOADS)
# Those that win somewhere: from the disk or from the page cache, with and without io_uring.
LIMIT_WAYS = frozenset(
    {
        "threads direct 1 MiB x4",
        "ring direct 4 MiB x1 depth 8",
        "threads buffered 8 MiB x4",
        "ring buffered 1 MiB x2 depth 8",
    }
)


def main() -> None:
    arguments = _parse()
    console = wide_console()
    selection = chosen(arguments.states, arguments.systems, arguments.operations)
    document = measured(arguments, selection, "loading", console, PUBLISHED)
    show(document, console, PUBLISHED)
    if arguments.charts is not None:
        draw(document, arguments.charts / "loading.svg", LOADING)


def chosen(states: Sequence[str], systems: Sequence[str], operations: Sequence[str]) -> Selection:
    """What is measured of the states, systems and operations that are asked for."""
    return Selection(
        states,
        systems,
        operations,
        LIMIT_WAYS,
        systems_of={state: _both(systems, some) for state, some in SYSTEMS_OF.items()},
        operations_of={state: _both(operations, some) for state, some in OPERATIONS_OF.items()},
        publishers=PUBLISHERS,
    )


def _both(asked: Sequence[str], some: Sequence[str]) -> list[str]:
    return [name for name in asked if name in some]


def _parse() -> argparse.Namespace:
    parser = session_parser("benchmarks.loading", 3, __doc__)
    operations = (*LOADS, *STREAM_OPERATIONS)
    for option, every in (("states", tuple(PUBLISHERS)), ("systems", SYSTEMS), ("operations", operations)):
        parser.add_argument(f"--{option}", nargs="+", choices=every, default=every, metavar="NAME")
    add_charts_argument(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
