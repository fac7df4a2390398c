//! How the agent is set apart from whoever started it: it outlives them, and keeps its memory to itself.
//!
//! None of this can fail the agent: where the system refuses something, the log says so and it goes on.

use std::fs::File;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use rustix::fs::Mode;
use rustix::process::{DumpableBehavior, set_dumpable_behavior, setsid, umask};

use super::log;

/// What the out-of-memory killer adds to the agent's badness: it holds what everybody else recovers from.
const OOM_SCORE: &str = "-900";
/// The signals that end the agent in an orderly way.
const ENDING: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// Makes a session of its own, closes stdin, and forbids core dumps, whose readers would read every slot's key.
pub(super) fn set_apart() {
    // Refused to the leader of a process group, which has been set apart by whoever started it.
    let _ = setsid();
    umask(Mode::from_bits_retain(0o077));
    if let Ok(nothing) = File::open("/dev/null") {
        // SAFETY: both descriptors are open; whoever reads stdin from now on reads nothing.
        unsafe { libc::dup2(nothing.as_raw_fd(), libc::STDIN_FILENO) };
    }
    if let Err(error) = std::fs::write("/proc/self/oom_score_adj", OOM_SCORE) {
        // Without the privilege for it. A limit of the control group still protects others from the agent.
        log::line("not_protected_from_oom", &[("message", error.to_string())]);
    }
    // Last: from here on the system lets nobody but root change what it says of this process.
    if let Err(errno) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        log::line("core_dumps_allowed", &[("message", errno.to_string())]);
    }
}

/// The signals that end the agent, blocked in this thread and all that it starts.
pub(super) struct Signals(libc::sigset_t);

impl Signals {
    /// Blocks them: they stay pending until somebody waits.
    pub fn block() -> Self {
        let mut set = MaybeUninit::uninit();
        // SAFETY: `sigemptyset` initialises the set, which the other calls only read or change.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            let mut set = set.assume_init();
            for signal in ENDING {
                libc::sigaddset(&raw mut set, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
            set
        };
        Self(set)
    }

    /// Waits for one of them.
    pub fn wait(&self) -> libc::c_int {
        let mut signal = 0;
        // SAFETY: both are live and of the right type. It is interrupted by no signal that is not in the set.
        while unsafe { libc::sigwait(&raw const self.0, &raw mut signal) } != 0 {}
        signal
    }
}
