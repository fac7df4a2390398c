//! One connection to an agent: a question, then its answer.
//!
//! Invariant: a link that has not heard the answer to its question is never used for another.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use waystation_format::slot::{Id, Writer};
use waystation_format::{Error, Kind, Result};

use crate::local::frame::{self, REPLY_LIMIT_BYTES, REQUEST_LIMIT_BYTES};
use crate::local::message::{Hello, HexId, PROTOCOL, Refusal, Reply, Request, Welcome};
use crate::local::place;
use crate::local::timed::Timed;

/// How long a wish to stop may go unnoticed.
const SLICE: Duration = Duration::from_millis(50);
/// What an agent that is there has to answer, however little time is left.
const LEAST_TIME: Duration = Duration::from_secs(1);
/// How long a message may be on its way once it has begun.
const MESSAGE_TIME: Duration = Duration::from_secs(10);

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// There is nobody, or nobody any more: another agent may answer.
    Lost(Error),
    /// That is the answer.
    Refused(Error),
    /// Whoever asked does not want to know any more.
    Stopped,
}

/// A connection whose agent knows who is there.
#[derive(Debug)]
pub(super) struct Link {
    stream: UnixStream,
    welcome: Welcome,
}

impl Link {
    /// Connects and greets.
    pub fn open(
        directory: &Path,
        identity: &Writer,
        run: Option<Id>,
        until: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<Self, Failure> {
        let stream = place::connect(directory).map_err(unreachable)?;
        let hello = Hello { protocol: PROTOCOL, process: (*identity).into(), run: run.map(HexId) };
        match converse(&stream, &Request::Hello(hello), until, stop)? {
            Reply::Welcome(welcome) if welcome.protocol == PROTOCOL => Ok(Self { stream, welcome }),
            Reply::Refused(refusal) => Err(refused(refusal)),
            _ => {
                let message =
                    "what answers there is no agent of this release; install the same release of both";
                Err(Failure::Refused(Error::new(Kind::Unsupported, message)))
            }
        }
    }

    /// What the agent has said of itself.
    pub fn welcome(&self) -> &Welcome {
        &self.welcome
    }

    /// Asks, and waits for the answer.
    pub fn ask(
        &mut self,
        request: &Request,
        until: Instant,
        stop: &dyn Fn() -> bool,
    ) -> Result<Reply, Failure> {
        match converse(&self.stream, request, until, stop)? {
            Reply::Refused(refusal) => Err(refused(refusal)),
            reply => Ok(reply),
        }
    }
}

fn converse(
    stream: &UnixStream,
    request: &Request,
    until: Instant,
    stop: &dyn Fn() -> bool,
) -> Result<Reply, Failure> {
    let sent = frame::write(&mut Timed::new(stream, MESSAGE_TIME), request, REQUEST_LIMIT_BYTES);
    sent.map_err(|error| match error.kind() {
        Kind::Unavailable => Failure::Lost(error),
        _ => Failure::Refused(error), // it is too long to be asked
    })?;
    await_reply(stream, until.max(Instant::now() + LEAST_TIME), stop)?;
    match frame::read(&mut Timed::new(stream, MESSAGE_TIME), REPLY_LIMIT_BYTES) {
        Ok(Some(body)) => frame::parse(&body).map_err(Failure::Refused),
        Ok(None) => Err(Failure::Lost(Error::new(Kind::Unavailable, "the agent closed the connection"))),
        Err(error) => Err(Failure::Lost(error)),
    }
}

/// Waits in slices, so that a wish to stop is noticed.
fn await_reply(stream: &UnixStream, until: Instant, stop: &dyn Fn() -> bool) -> Result<(), Failure> {
    loop {
        let left = until.saturating_duration_since(Instant::now()).min(SLICE);
        let slice = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut polled = [PollFd::from_borrowed_fd(stream.as_fd(), PollFlags::IN)];
        // An error of the poll itself is found again by the read.
        if poll(&mut polled, Some(&slice)) != Ok(0) && !polled[0].revents().is_empty() {
            return Ok(());
        }
        if stop() {
            return Err(Failure::Stopped);
        }
        if Instant::now() >= until {
            let message = "the agent does not answer in time; is its process stopped?";
            return Err(Failure::Lost(Error::new(Kind::Unavailable, message)));
        }
    }
}

fn unreachable(error: Error) -> Failure {
    match error.kind() {
        // No directory or socket yet, or nobody who listens any more.
        Kind::NotFound | Kind::Unavailable => Failure::Lost(error),
        _ => Failure::Refused(error),
    }
}

fn refused(refusal: Refusal) -> Failure {
    Failure::Refused(refusal.into())
}
