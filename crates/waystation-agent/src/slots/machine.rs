//! The state machine of one slot: FREE → WRITING → SEALED → COMMITTED → FREE.
//!
//! Invariants: a header is followed only by headers that [`next`] gives; the newest committed version of a
//! shard never leaves its slot but by [`Event::Release`], which the agents of several hosts decide together; a writer is told by its ticket, so that one whose slot was taken from it
//! cannot seal what another writes there. Whether nobody uses the bytes any more is for the caller to know
//! before a slot becomes free.

use waystation_format::slot::{Header, State, Sums, Tenant, Version};
use waystation_format::{Error, Kind, Result};

/// What happens to a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// It is given to a writer.
    Begin(Tenant),
    /// Its writer has filled it, and all of it was verified.
    Seal {
        /// What the writer was given with the slot.
        ticket: u64,
        /// What vouches for its bytes from now on.
        sums: Sums,
    },
    /// The version that it belongs to is whole everywhere.
    Commit,
    /// Its writer has given up, or is dead.
    Abort {
        /// What the writer was given with the slot.
        ticket: u64,
    },
    /// The version that it belongs to will not become whole.
    GiveUp,
    /// A newer version has been committed.
    Retire {
        /// The newest version that is committed.
        newest: Version,
    },
    /// The agents of several hosts have decided that no copy is needed here. They know of commits that this store does not,
    /// and may go back behind one that it does.
    Release,
    /// Its bytes are not what its header says.
    Quarantine,
    /// What is quarantined in it may be overwritten.
    Discard,
}

impl Event {
    /// What the event does to a slot, for messages.
    fn name(&self) -> &'static str {
        match self {
            Event::Begin(_) => "given to a writer",
            Event::Seal { .. } => "sealed",
            Event::Commit => "committed",
            Event::Abort { .. } => "taken from its writer",
            Event::GiveUp => "given up",
            Event::Retire { .. } => "retired",
            Event::Release => "released",
            Event::Quarantine => "quarantined",
            Event::Discard => "discarded",
        }
    }
}

/// The header of a slot after an event.
///
/// Conflict if the slot is in a state in which that cannot happen, Fenced if a writer's ticket is not (any
/// more) that of the slot.
pub fn next(header: &Header, event: Event) -> Result<Header> {
    let refuse = || {
        let message = format!("a slot that is {} cannot be {}", header.state.name(), event.name());
        Error::new(Kind::Conflict, message).with("slot", header.slot.to_string())
    };
    let state = match (&header.state, &event) {
        (State::Free, Event::Begin(tenant)) => State::Writing(tenant.clone()),
        (State::Writing(_), Event::Seal { ticket, .. } | Event::Abort { ticket })
            if *ticket != header.sequence =>
        {
            return Err(Error::new(Kind::Fenced, "the slot has been given to another writer meanwhile")
                .with("slot", header.slot.to_string())
                .with("ticket", ticket.to_string()));
        }
        (State::Writing(tenant), Event::Seal { sums, .. }) => State::Sealed(tenant.clone(), *sums),
        (State::Writing(_), Event::Abort { .. }) => State::Free,
        (State::Sealed(tenant, sums), Event::Commit) => State::Committed(tenant.clone(), *sums),
        (State::Sealed(..), Event::GiveUp) => State::Free,
        (State::Sealed(tenant, _) | State::Committed(tenant, _), Event::Retire { newest })
            if tenant.key.version < *newest =>
        {
            State::Free
        }
        (State::Sealed(..) | State::Committed(..), Event::Release) => State::Free,
        (State::Quarantined(_), Event::Discard) => State::Free,
        (State::Quarantined(_), Event::Quarantine) => return Err(refuse()),
        (state, Event::Quarantine) => State::Quarantined(state.tenant().cloned()),
        _ => return Err(refuse()),
    };
    header.followed_by(state)
}

#[cfg(test)]
mod tests {
    use waystation_format::slot::{Id, Key, Writer};

    use super::*;

    const TICKET: u64 = 6;
    const SUMS: Sums = Sums { contents: 1, digest: 2 };

    fn tenant(step: u64) -> Tenant {
        let version = Version { epoch: 1, step };
        let key = Key { run: Id([1; 16]), shard: "0/2".to_owned(), version };
        Tenant { key, contents_bytes: 8, data_bytes: 0, writer: Writer::default() }
    }

    fn header(state: State) -> Header {
        Header { store: Id([2; 16]), slot: 3, slot_bytes: 1 << 20, sequence: TICKET, state }
    }

    fn states() -> [State; 6] {
        [
            State::Free,
            State::Writing(tenant(10)),
            State::Sealed(tenant(10), SUMS),
            State::Committed(tenant(10), SUMS),
            State::Quarantined(Some(tenant(10))),
            State::Quarantined(None),
        ]
    }

    fn version(epoch: u64, step: u64) -> Version {
        Version { epoch, step }
    }

    /// Every event in every state: what follows, or the kind of the refusal.
    #[test]
    fn every_event_in_every_state() {
        let [free, writing, sealed, committed, quarantined, unknown] = states();
        let conflict = || Err(Kind::Conflict);
        let fenced = || Err(Kind::Fenced);
        let table: Vec<(Event, [Result<State, Kind>; 6])> = vec![
            (
                Event::Begin(tenant(10)),
                [Ok(writing.clone()), conflict(), conflict(), conflict(), conflict(), conflict()],
            ),
            (
                Event::Seal { ticket: TICKET, sums: SUMS },
                [conflict(), Ok(sealed), conflict(), conflict(), conflict(), conflict()],
            ),
            (
                Event::Seal { ticket: TICKET - 1, sums: SUMS },
                [conflict(), fenced(), conflict(), conflict(), conflict(), conflict()],
            ),
            (Event::Commit, [conflict(), conflict(), Ok(committed), conflict(), conflict(), conflict()]),
            (
                Event::Abort { ticket: TICKET },
                [conflict(), Ok(free.clone()), conflict(), conflict(), conflict(), conflict()],
            ),
            (
                Event::Abort { ticket: TICKET + 1 },
                [conflict(), fenced(), conflict(), conflict(), conflict(), conflict()],
            ),
            (Event::GiveUp, [conflict(), conflict(), Ok(free.clone()), conflict(), conflict(), conflict()]),
            (
                Event::Retire { newest: version(1, 11) },
                [conflict(), conflict(), Ok(free.clone()), Ok(free.clone()), conflict(), conflict()],
            ),
            // Not the newest itself, and not what is newer.
            (Event::Retire { newest: version(1, 10) }, [(); 6].map(|()| conflict())),
            (Event::Retire { newest: version(0, 99) }, [(); 6].map(|()| conflict())),
            (
                Event::Release,
                [conflict(), conflict(), Ok(free.clone()), Ok(free.clone()), conflict(), conflict()],
            ),
            (
                Event::Quarantine,
                [
                    Ok(unknown),
                    Ok(quarantined.clone()),
                    Ok(quarantined.clone()),
                    Ok(quarantined),
                    conflict(),
                    conflict(),
                ],
            ),
            (Event::Discard, [conflict(), conflict(), conflict(), conflict(), Ok(free.clone()), Ok(free)]),
        ];
        for (event, expected) in table {
            for (state, expected) in states().into_iter().zip(expected) {
                let before = header(state);
                let after = next(&before, event.clone());
                let found = after.as_ref().map(|after| after.state.clone()).map_err(Error::kind);
                assert_eq!(found, expected, "{} when {}", event.name(), before.state.name());
                if let Ok(after) = after {
                    assert_eq!(after, Header { sequence: TICKET + 1, state: after.state.clone(), ..before });
                }
            }
        }
    }
}
