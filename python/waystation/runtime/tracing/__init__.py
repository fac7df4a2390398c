"""From calls to programs: arrays that stand for results, and the records of the calls that make them.

`arrays` is what a program holds, `recordings` what calls go into, `recorder` what makes an `ir.Program` of
them. Nothing here runs or sends anything: the client does.
"""

from waystation.runtime.tracing.arrays import Array, Reference
from waystation.runtime.tracing.recorder import Callee, Kind, Recorder
from waystation.runtime.tracing.recordings import Batch, HostValue, Recording, Trace

__all__ = ["Array", "Batch", "Callee", "HostValue", "Kind", "Recorder", "Recording", "Reference", "Trace"]
