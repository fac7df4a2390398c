"""The program behind `warm_python.python()`: it has the server fork a program, and ends as that does.

Run by a Python without site-packages, as it has to start at once: `client.py PYTHON SERVER ARGUMENTS…`. What
the server does not know it leaves to `PYTHON`.
"""

import array
import json
import os
import signal
import socket
import sys

OPTIONS = {"-P", "-u"}  # without a value
FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}


def main() -> None:
    """Ends this process."""
    python, server, *arguments = sys.argv[1:]
    if not is_known(arguments):
        os.execv(python, [python, *arguments])
    end_with(status_of(server, arguments))


def is_known(arguments: list[str]) -> bool:
    """Whether the server knows what these mean."""
    while arguments and arguments[0] in OPTIONS:
        arguments = arguments[1:]
    if arguments and arguments[0] in ("-c", "-m"):
        return len(arguments) > 1
    return bool(arguments) and os.path.isfile(arguments[0])


def status_of(address: str, arguments: list[str]) -> int:
    """How a program ended, as `waitpid` says it."""
    told = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    content = json.dumps(told).encode()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        # A signal is a byte after the program's description, so none comes before.
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: server.sendall(bytes([number])))
        descriptors = array.array("i", (0, 1, 2))
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        server.sendmsg([len(content).to_bytes(4, "little")], ancillary)
        server.sendall(content)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        status = server.makefile("rb").read()
        signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    assert status, "the server of the tests' programs has ended"
    return int(status)


def end_with(status: int) -> None:
    """Ends this process by the same exit code or signal."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-code})
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    main()
