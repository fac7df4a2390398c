"""Programs: the high form that clients trace, the low form that hosts run, and the passes between them.

Pure data and functions. What drives this: a tracer builds a `Program`, `prepare` makes it ready, and each
time the resource manager has moved a slice of it, `lower` makes a new `LowProgram`, whose lists go to the
hosts. Programs travel as bytes (`encode`), are known by their `fingerprint`, and are shown as text that
`parse` reads back.
"""

from waystation.runtime.ir.low import (
    Copy,
    Exec,
    HostProgram,
    Instruction,
    LowProgram,
    Recv,
    Send,
    show_low,
)
from waystation.runtime.ir.parse import parse
from waystation.runtime.ir.passes import (
    JoinedProgram,
    PlacedProgram,
    can_be_joined,
    expand,
    insert_frees,
    insert_reshards,
    join_chains,
    lower,
    mark_donations,
    place,
    prepare,
    refine_shapes,
    show_placed,
)
from waystation.runtime.ir.program import (
    Arg,
    Compute,
    Free,
    HostCall,
    Node,
    Program,
    Reshard,
    Result,
    SliceShape,
    Value,
)
from waystation.runtime.ir.shardings import Sharding, replicated
from waystation.runtime.ir.subgraphs import Subgraph, islands_of, static_subgraphs
from waystation.runtime.ir.text import show
from waystation.runtime.ir.verify import Form, verify
from waystation.runtime.ir.verify_low import verify_low
from waystation.runtime.ir.wire import decode, encode, fingerprint

__all__ = [
    "Arg",
    "Compute",
    "Copy",
    "Exec",
    "Form",
    "Free",
    "HostCall",
    "HostProgram",
    "Instruction",
    "JoinedProgram",
    "LowProgram",
    "Node",
    "PlacedProgram",
    "Program",
    "Recv",
    "Reshard",
    "Result",
    "Send",
    "Sharding",
    "SliceShape",
    "Subgraph",
    "Value",
    "can_be_joined",
    "decode",
    "encode",
    "expand",
    "fingerprint",
    "insert_frees",
    "insert_reshards",
    "islands_of",
    "join_chains",
    "lower",
    "mark_donations",
    "parse",
    "place",
    "prepare",
    "refine_shapes",
    "replicated",
    "show",
    "show_low",
    "show_placed",
    "static_subgraphs",
    "verify",
    "verify_low",
]
