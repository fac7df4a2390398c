"""One of the agents of several hosts, as one sequence of checkpoints uses it.

Agents decide together what is committed and what a program goes on from; its processes tell them that it
begins, and follow the epochs that they agree upon. A *program* here is one start of the user's, known by a
token: whatever an earlier one still runs is refused. Epochs change beneath a program, too: an agent that was
lost has come back, or the one that coordinates was replaced. The processes go on then, and save in the new
epoch.

What can go wrong, in order: an agent has not been heard of by all, or the agents do not agree in time (what
the hosts of this program have whole is restored all the same, and saves begin once the agents agree, under
the same token, so that the recovery that is under way goes on); a newer program has begun (Fenced); epochs
change while a step is saved (that save fails, the next is in the new epoch); copies on other hosts take too
long (the version counts as not saved, and the agents give it up). Invariants: all processes save a step in
the same epoch; a version is offered only as agents have decided, or, where they do not agree, if every shard
of it is with the agents of this program's hosts.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from waystation import _native
from waystation._errors import Fenced, Unavailable, WaystationError
from waystation.coordination import Session
from waystation.memory.agent import PATIENCE_S, OwnAgent, check_room
from waystation.memory.exposition import samples_of
from waystation.memory.opened import ShardSource
from waystation.memory.versions import Version, Whole, offers, take_stock

# How long a save waits for the agents to be of one mind before it is left out.
AGREEMENT_S = 1.0
# How long it may take until a version that is sealed is committed: so long, and a second for each so many
# bytes.
COMMIT_S = 3.0
COPIED_BYTES_PER_S = 64 << 20
_RECOVERY = "waystation_agent_last_recovery_phase_seconds"
_PAUSES_S = 0.002, 0.1  # between two looks: the first, and the longest


class ManyHostsStore:
    """The agent of this host, which is one of several.

    Args:
        agent: It.
        sequence: The sequence of checkpoints, see `versions.shard_name`.
        owners: For each process of the program the name of its host.
        program: The token of the program.
        versions: How many commits the agents keep.

    Attributes:
        epoch: The one that all processes have last agreed upon; 0 before the first.
        kept: See `VersionStore`.
        kept_while_saving: See `VersionStore`.
        doubted: See `VersionStore`.
        lost: See `VersionStore`.
        disagreement: See `VersionStore`: which agents are missing.
        program: The token of the program.
    """

    kept_while_saving: int

    def __init__(
        self, agent: OwnAgent, sequence: str, owners: Sequence[str], program: int, versions: int
    ) -> None:
        self.epoch: int = 0
        self.kept = self.kept_while_saving = versions
        self.doubted: frozenset[Version] = frozenset()
        self.lost: Version | None = None
        self.disagreement: str | None = None
        self.program: int = program
        self._agent = agent
        self._sequence = sequence
        self._owners = list(owners)
        self._first_epoch: int | None = None  # of this program; None until agents have recovered for it

    @property
    def sequence(self) -> str:
        """See `VersionStore`."""
        return self._sequence

    @property
    def saver(self) -> _native.AgentClient:
        """See `VersionStore`."""
        return self._agent.saver

    @property
    def source(self) -> ShardSource:
        """See `VersionStore`."""
        return self._agent.client

    # ---- beginning -----------------------------------------------------------------------------

    def begin(self, session: Session, timeout_s: float) -> list[Whole]:
        """Has the agents recover for this program, and waits until they have; returns the versions that can
        be loaded, the newest first. Where they do not agree, a version of which the hosts of this program
        have every shard proves itself.

        Raises:
            Unavailable: They do not agree, and there is none.
        """
        self._recover(session, timeout_s)
        if self.disagreement is None:
            session.round(self._check_room, lambda _: b"")
            return self.offered(session)
        if not (whole := self._whole_here(session)):
            raise Unavailable(self.disagreement)
        return whole

    def _check_room(self) -> bytes:
        """Whether the agent of this host has as many slots as it is to keep versions, and one for the next.

        Raises:
            MemoryTooSmall: It has not.
        """
        client = self._agent.client
        status = client.status()
        holders = self._standing(client)["holders"]
        shards = sum(status["host"] in of_shard for of_shard in holders)
        check_room(status, shards)
        return b""

    def transfer_s(self) -> float:
        """See `VersionStore`. All agents wait for each other, so that any of them can say it."""
        with contextlib.suppress(WaystationError):
            for sample in samples_of(self.saver.metrics()):
                if sample.name == _RECOVERY and sample.labels == {"phase": "transfer"}:
                    return float(sample.value)
        return 0.0

    def _recover(self, session: Session, timeout_s: float) -> None:
        """Has the agents recover for this program; if they have not in time, `disagreement` says why."""
        client = self._agent.waiting(timeout_s) if timeout_s else self._agent.saver

        def work() -> bytes:
            standing = self._awaited(client, _is_training, timeout_s)
            silent = [name for name, is_heard in standing["hosts"].items() if not is_heard]
            epoch = standing["epoch"] if _is_training(standing) else 0
            return json.dumps([epoch, silent, len(standing["hosts"])]).encode()

        def decide(parts: Sequence[bytes]) -> bytes:
            told = [json.loads(part) for part in parts]
            if all(epoch for epoch, _, _ in told):
                return json.dumps([min(epoch for epoch, _, _ in told), None]).encode()
            silent = {name for epoch, names, _ in told if not epoch for name in names}
            return json.dumps([None, _disagreement(sorted(silent), told[0][2], timeout_s)]).encode()

        self._first_epoch, self.disagreement = json.loads(session.round(work, decide))

    def _agree(self, session: Session) -> None:
        """Has the agents recover, for saves.

        Raises:
            Unavailable: They do not agree in time.
        """
        self._recover(session, min(self._agent.deadline_s, PATIENCE_S))
        if self.disagreement is not None:
            raise Unavailable(self.disagreement)

    def _whole_here(self, session: Session) -> list[Whole]:
        """The versions of which the agents of this program's hosts have every shard, the newest first."""

        def work() -> bytes:
            return json.dumps(self._agent.client.inventory()).encode()

        def decide(parts: Sequence[bytes]) -> bytes:
            stock = take_stock(self._sequence, map(json.loads, parts))
            return json.dumps([entry.to_json() for entry in stock.whole]).encode()

        return [Whole.from_json(entry) for entry in json.loads(session.round(work, decide))]

    def _awaited(
        self, client: _native.AgentClient, is_enough: Callable[[dict[str, Any]], bool], timeout_s: float
    ) -> dict[str, Any]:
        """The standing once it is as it should be, or after so long."""
        until, (pause_s, longest_s) = time.monotonic() + timeout_s, _PAUSES_S
        while True:
            standing = self._standing(client)
            if is_enough(standing) or time.monotonic() >= until:
                return standing
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)

    def _standing(self, client: _native.AgentClient) -> dict[str, Any]:
        """How things stand. Agents that do not know of this program yet, or not any more, are told."""
        standing = client.standing()
        if standing["program"] < self.program:
            standing = client.begin(self.program, self._sequence, self._owners)
        if standing["program"] > self.program:
            raise superseded()
        own = standing["program"] == self.program
        return standing if own else standing | {"is_training": False, "is_open": False}

    # ---- saving --------------------------------------------------------------------------------

    def before_save(self, session: Session, *, goes_back: bool, waits: bool) -> bool:
        """See `VersionStore`."""
        if goes_back:
            self._go_back(session)
        elif self._first_epoch is None:
            if not waits:
                return False
            self._agree(session)
            session.round(self._check_room, lambda _: b"")
        epoch = self._agreed_epoch(session, waits=waits)
        self.epoch = epoch or self.epoch
        return epoch != 0

    def ask(self, session: Session) -> None:
        """See `VersionStore`."""
        self.before_save(session, goes_back=False, waits=True)

    def _go_back(self, session: Session) -> None:
        """Begins anew, as another start of the program would: what it saves from now on replaces later
        steps."""
        if self._first_epoch is not None:
            program = session.broadcast(lambda: str(new_program(self.program)).encode())
            self.program, self._first_epoch = int(program), None
        self._agree(session)

    def _agreed_epoch(self, session: Session, *, waits: bool) -> int:
        """The epoch in which all agents take versions; 0 if there is none now and that is not waited for."""
        until = time.monotonic() + AGREEMENT_S

        def work() -> bytes:
            standing = self._standing(self.saver)
            is_ready = standing["is_training"] and standing["is_open"]
            return str(standing["epoch"] if is_ready else 0).encode()

        def decide(parts: Sequence[bytes]) -> bytes:
            epochs = {int(part) for part in parts}
            if len(epochs) == 1 and epochs != {0}:
                return parts[0]
            if not waits:
                return b"0"
            if time.monotonic() >= until:
                raise Unavailable(
                    "the agents of the hosts are recovering, and take no versions yet; this save is left out"
                )
            return b""

        while not (agreed := session.round(work, decide)):
            time.sleep(_PAUSES_S[0])
        return int(agreed)

    def confirm(self, session: Session, version: Version, shard_bytes: int, *, is_awaited: bool) -> None:
        """Waits until it is committed: every shard has its copies on other hosts, verified there. That does
        not happen any more once agents have gone on to another epoch."""
        timeout_s = COMMIT_S + shard_bytes / COPIED_BYTES_PER_S
        if not is_awaited:
            timeout_s = max(timeout_s, self._agent.deadline_s)

        def is_known(standing: dict[str, Any]) -> bool:
            return (version.epoch, version.step) in map(tuple, standing["commits"])

        def is_decided(standing: dict[str, Any]) -> bool:
            return is_known(standing) or (_is_training(standing) and standing["epoch"] > version.epoch)

        def work() -> bytes:
            try:
                return b"yes" if is_known(self._awaited(self.saver, is_decided, timeout_s)) else b""
            except Fenced:
                raise
            except WaystationError:
                return b""  # that the others know is enough

        def decide(parts: Sequence[bytes]) -> bytes:
            if not any(parts):
                raise Unavailable(
                    f"step {version.step} is sealed on all hosts, but has not got its copies on others "
                    f"within {timeout_s:.0f} s, or before agents recovered; is an agent lost, or the network "
                    "too slow for the saves?"
                )
            return b""

        session.round(work, decide)

    # ---- what is there -------------------------------------------------------------------------

    def offered(self, session: Session) -> list[Whole]:
        """See `VersionStore`. Agents that are recovering are waited for: an agent that was killed knows of
        no version until the others have told it."""
        if self._first_epoch is None:
            self._recover(session, 0.0)
        if self.disagreement is not None:
            return self._whole_here(session)

        def work() -> bytes:
            client = self._agent.client
            try:
                standing = self._awaited(client, _is_training, self._agent.deadline_s)
                slots = client.inventory()
            except Fenced:
                raise
            except WaystationError:
                standing, slots = {}, []
            return json.dumps([standing, [slot for slot in slots if "digest" in slot]]).encode()

        def decide(parts: Sequence[bytes]) -> bytes:
            told = [json.loads(part) for part in parts]
            if not any(standing and _is_training(standing) for standing, _ in told):
                raise Unavailable(
                    "the agents of the hosts are recovering, and did not say within "
                    f"{self._agent.deadline_s:g} s what they have in memory"
                )
            found = offers(self._sequence, told)
            # Of agents that are in different epochs the last one has heard what is so now.
            newest = max((standing for standing, _ in told if standing), key=lambda of: of["epoch"])
            listed = [entry.to_json() for entry in found]
            return json.dumps([listed, newest["doubted"], newest["lost"]]).encode()

        listed, doubted, lost = json.loads(session.round(work, decide))
        self.doubted = frozenset(Version(*version) for version in doubted)
        self.lost = None if lost is None else Version(*lost)
        return [Whole.from_json(entry) for entry in listed]

    def mend(self) -> None:
        """See `VersionStore`. What has gone is brought from other hosts, as what was never here is."""
        self._agent.client.verify()

    def is_own(self, version: Version) -> bool:
        """See `VersionStore`."""
        return self._first_epoch is not None and version.epoch >= self._first_epoch

    # ---- what agents do by themselves ----------------------------------------------------------

    def commit(self, version: Version) -> bool:
        """Agents do."""
        return True

    def give_up(self, version: Version) -> None:
        """Agents do, once it does not become whole."""

    def discard(self, version: Version) -> bool:
        """Agents keep it until a newer one is committed."""
        return False

    def retire_before(self, version: Version) -> None:
        """Agents do, once a newer one is committed."""


def _is_training(standing: dict[str, Any]) -> bool:
    return bool(standing["is_training"])


def _disagreement(silent: Sequence[str], agent_count: int, timeout_s: float) -> str:
    not_heard = f"; not heard of: {', '.join(silent)}" if silent else ""
    return (
        f"the agents of the hosts have not recovered for this program within {timeout_s:g} s{not_heard}. Of "
        f"{agent_count} agents {agent_count // 2 + 1} have to run that have not lost their memory, or all of "
        "them, new ones in the places of those that are lost: start those that are missing. Until then only "
        "what the hosts of this program have whole in memory is restored, and nothing is saved there"
    )


def new_program(*known: int) -> int:
    """A token of a program that begins now, newer than those that are known whatever the clock says."""
    return max(time.time_ns(), *(token + 1 for token in known))


def superseded() -> Fenced:
    """Another program has begun since this one did."""
    return Fenced("another program has begun on these hosts since; this one's steps are not kept any more")
