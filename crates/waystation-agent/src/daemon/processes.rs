//! Who of those that greeted the agent still runs, by a descriptor of the process: its death is known at once,
//! also where a child that it forked keeps its connections open.
//!
//! Invariant: a process is taken for the one that it says only if the kernel says so too; one that is not seen
//! from here (of another namespace) is believed, and nothing is concluded from its silence.

use std::collections::HashSet;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use waystation_format::slot::Writer;
use waystation_format::{Error, Kind, Result};

use super::stop::{Stop, Woken};
use crate::process;

/// More processes than a host has trainers.
const MOST_PROCESSES: usize = 1024;

/// The processes that have greeted the agent and still run.
#[derive(Debug, Default)]
pub(super) struct Processes(Mutex<HashSet<Writer>>);

impl Processes {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.lock().len()
    }

    /// Adds one; false if it is known already. Unavailable if there are too many.
    pub fn add(&self, process: Writer) -> Result<bool> {
        let mut known = self.lock();
        if known.len() >= MOST_PROCESSES && !known.contains(&process) {
            let message = "too many processes use this agent; end some, or start another agent for them";
            return Err(Error::new(Kind::Unavailable, message).with("limit", MOST_PROCESSES.to_string()));
        }
        Ok(known.insert(process))
    }

    /// Forgets one.
    pub fn remove(&self, process: &Writer) {
        self.lock().remove(process);
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<Writer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What becomes readable when a process has died; `None` if it cannot be seen from here.
///
/// NotFound if it is dead already.
pub(super) fn death_of(claimed: &Writer) -> Result<Option<OwnedFd>> {
    let own = process::current()?;
    if (claimed.boot, claimed.namespace) != (own.boot, own.namespace) {
        return Ok(None);
    }
    let dead = || {
        Error::new(Kind::NotFound, "there is no such process; was it read from another machine?")
            .with("process", claimed.process.to_string())
    };
    let id = i32::try_from(claimed.process).ok().and_then(Pid::from_raw).ok_or_else(dead)?;
    let death = match pidfd_open(id, PidfdFlags::empty()) {
        Ok(death) => death,
        Err(rustix::io::Errno::SRCH) => return Err(dead()),
        // A kernel before 5.3: as if it could not be seen. Slots are freed when they are wanted.
        Err(_) => return Ok(None),
    };
    // Only now: the descriptor keeps the id from meaning another process.
    if process::identify(claimed.process).ok() == Some(*claimed) { Ok(Some(death)) } else { Err(dead()) }
}

/// Waits for the death of a process; false if the agent ends before.
pub(super) fn await_death(death: &OwnedFd, stop: &Stop) -> bool {
    stop.wait_for(death.as_fd()) == Woken::Ready
}

/// Checks that whoever is connected is of this user, and the process that it says.
pub(super) fn check_peer(stream: &UnixStream, claimed: Option<&Writer>) -> Result<()> {
    let peer = credentials(stream)?;
    if peer.uid != rustix::process::geteuid().as_raw() {
        let message = "the agent serves the processes of its own user alone";
        return Err(Error::new(Kind::InvalidInput, message).with("user", peer.uid.to_string()));
    }
    let Some(claimed) = claimed else { return Ok(()) };
    let own = process::current()?;
    // A process of another namespace has another id here, or none.
    if claimed.namespace == own.namespace && i64::from(peer.pid) != i64::from(claimed.process) {
        let message =
            "a process says that it is another one; connections belong to the process that made them";
        return Err(Error::new(Kind::InvalidInput, message)
            .with("found", peer.pid.to_string())
            .with("process", claimed.process.to_string()));
    }
    Ok(())
}

fn credentials(stream: &UnixStream) -> Result<libc::ucred> {
    let mut found = libc::ucred { pid: 0, uid: 0, gid: 0 };
    let mut nbytes = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `nbytes` bytes to a structure that is made for it.
    let outcome = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut nbytes,
        )
    };
    if outcome == 0 {
        return Ok(found);
    }
    Err(Error::from_io(std::io::Error::last_os_error(), "learn who is connected", Path::new("agent.sock")))
}
