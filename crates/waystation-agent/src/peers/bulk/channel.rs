//! One connection for bytes of slots, as the thread sees it that serves it: frames, with deadlines.
//!
//! Invariants: nobody is waited for longer than [`SILENCE`] who says nothing; who has nothing to send for a
//! while says that it is still there.

use std::fs::File;
use std::io::{self, BufReader, Read};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use waystation_format::{Error, Kind, Result};

use super::frame::{Frame, FrameKind};
use crate::peers::{
    Connection, End, FrameReader, FrameWriter, Incoming, Name, Outgoing, Proven, decode_failure,
    encode_failure, lost,
};

/// How long the other side may be silent.
const SILENCE: Duration = Duration::from_secs(30);
/// How often a side speaks that has nothing to send.
const SIGN_OF_LIFE: Duration = Duration::from_secs(2);
/// How long a side that fails goes on to listen.
const LAST_WORDS: Duration = Duration::from_secs(5);
/// What it then takes at a time.
const LAST_BYTES: usize = 256 << 10;
/// Frames are read through a buffer; what is longer goes past it.
const BUFFER_BYTES: usize = 4096;

/// A connection for bytes of slots.
pub struct Channel {
    reader: FrameReader<BufReader<Incoming>>,
    writer: FrameWriter<Outgoing>,
    end: End,
    peer: Name,
    /// The digest of the key of the version that it carries.
    transfer: u64,
    last_sent: Instant,
    paced_bytes_per_s: u64,
    _place: Option<Proven>,
}

impl Channel {
    /// The channel of a connection of which nothing was read or written yet.
    pub fn new(connection: Connection) -> Result<Self> {
        let peer = connection.peer().clone();
        let (incoming, outgoing, end, place) = connection.split(Some(SILENCE))?;
        Ok(Self {
            reader: FrameReader::new(BufReader::with_capacity(BUFFER_BYTES, incoming)),
            writer: FrameWriter::new(outgoing),
            end,
            peer,
            transfer: 0,
            last_sent: Instant::now(),
            paced_bytes_per_s: u64::MAX,
            _place: place,
        })
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &Name {
        &self.peer
    }

    /// Says which version it carries from now on.
    pub fn carry(&mut self, transfer: u64) {
        self.transfer = transfer;
    }

    /// What ends the connection when the thread that serves it waits.
    pub fn end(&self) -> End {
        self.end.clone()
    }

    /// Has the system spread what is sent over time.
    pub fn pace(&mut self, bytes_per_s: u64) {
        if std::mem::replace(&mut self.paced_bytes_per_s, bytes_per_s) == bytes_per_s {
            return;
        }
        // SAFETY: the option's value is a `u64`, which outlives the call. Systems that know no such option,
        // or not this size, send in bursts; the pacer holds the rate all the same.
        unsafe {
            libc::setsockopt(
                self.writer.target.socket().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_MAX_PACING_RATE,
                (&raw const bytes_per_s).cast(),
                size_of::<u64>() as libc::socklen_t,
            );
        }
    }

    /// Sends a frame without bulk.
    pub fn send(&mut self, kind: FrameKind, message: Vec<u8>) -> Result<()> {
        self.send_with_bulk(kind, 0, message, 0)
    }

    /// Sends the frame before some bulk.
    pub fn send_with_bulk(
        &mut self,
        kind: FrameKind,
        offset: u64,
        message: Vec<u8>,
        bulk_bytes: usize,
    ) -> Result<()> {
        self.last_sent = Instant::now();
        self.writer.write(&Frame { kind, transfer: self.transfer, offset, message, bulk_bytes })
    }

    /// Sends bulk from a file.
    pub fn send_file(&mut self, file: &File, offset: u64, nbytes: usize) -> Result<()> {
        self.writer.target.send_file(file, offset, nbytes).map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => Error::new(Kind::Corrupt, "a slot has been cut off"),
            _ => lost(&error),
        })
    }

    /// Sends bulk from memory.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> Result<()> {
        io::Write::write_all(&mut self.writer.target, bytes).map_err(|error| lost(&error))
    }

    /// Says that this side is still there, if it has been silent for a while.
    pub fn show_life(&mut self) -> Result<()> {
        if self.last_sent.elapsed() < SIGN_OF_LIFE { Ok(()) } else { self.send(FrameKind::Wait, Vec::new()) }
    }

    /// Tells the other side why this one does not go on, and takes what that is about to send, so that it
    /// comes to hear it.
    pub fn tell_failure(&mut self, error: &Error) {
        let can_hear = self.writer.target.socket().set_read_timeout(Some(LAST_WORDS)).is_ok()
            && self.send(FrameKind::Failed, encode_failure(error)).is_ok()
            && self.writer.target.socket().shutdown(Shutdown::Write).is_ok();
        let (mut buffer, end) = (vec![0; LAST_BYTES], Instant::now() + LAST_WORDS);
        while can_hear && Instant::now() < end {
            match self.reader.source.read(&mut buffer) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
        }
    }

    /// The next frame that means something. A failure of the other side is one of this side.
    pub fn receive(&mut self) -> Result<Frame> {
        loop {
            let frame: Frame = self.reader.read()?;
            let is_of_transfer =
                matches!(frame.kind, FrameKind::Offer | FrameKind::Fetch) || frame.transfer == self.transfer;
            match frame.kind {
                FrameKind::Failed => {
                    return Err(decode_failure(&frame.message).with("peer", self.peer.as_str()));
                }
                _ if !is_of_transfer => {
                    return Err(Error::new(Kind::Corrupt, "a frame belongs to another version"));
                }
                FrameKind::Wait if frame.bulk_bytes == 0 => {}
                FrameKind::Blocks | FrameKind::Contents => return Ok(frame),
                _ if frame.bulk_bytes > 0 => return Err(unexpected(frame.kind)),
                _ => return Ok(frame),
            }
        }
    }

    /// The message of the next frame, which must be of that kind.
    pub fn expect(&mut self, kind: FrameKind) -> Result<Vec<u8>> {
        let frame = self.receive()?;
        if frame.kind == kind { Ok(frame.message) } else { Err(unexpected(frame.kind)) }
    }

    /// Reads bulk of the last frame.
    pub fn read_bulk(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.reader.source.read_exact(bytes).map_err(|error| lost(&error))
    }

    /// Whether the other side has said something, or gone away, without waiting for it.
    pub fn has_incoming(&mut self) -> bool {
        !self.reader.source.buffer().is_empty() || self.reader.source.get_mut().has_bytes()
    }

    /// Does something that takes long, and meanwhile shows that this side is still there.
    pub fn while_showing_life<T: Send>(&mut self, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            let (sender, receiver) = channel();
            scope.spawn(move || sender.send(work()));
            loop {
                match receiver.recv_timeout(SIGN_OF_LIFE) {
                    Ok(done) => return done,
                    // Whether the other side hears it is seen when it is told the outcome.
                    Err(RecvTimeoutError::Timeout) => drop(self.send(FrameKind::Wait, Vec::new())),
                    Err(RecvTimeoutError::Disconnected) => return Err(waystation_io::job::panicked()),
                }
            }
        })
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Somebody may still have the right to end it, which would keep it open.
        self.end.now();
    }
}

/// A frame that does not belong here.
pub fn unexpected(kind: FrameKind) -> Error {
    Error::new(Kind::Corrupt, "another agent sent a frame that has no place there")
        .with("frame", format!("{kind:?}"))
}
