//! One connection, as the threads of either side see it: frames one way, frames the other.
//!
//! Nobody is waited for in silence for ever: where a host is gone without a word, the kernel's own signs of
//! life end the connection, and whoever takes no bytes for half a minute is given up. A process that is stopped
//! keeps its connections; those who wait for it have deadlines.

use std::io::{BufReader, Read};

use waystation_format::Result;
use waystation_peers::{Connection, End, FrameReader, FrameWriter, Proven, lost};

use crate::message::{Frame, FrameKind};

/// Frames are read through a buffer; what is longer goes past it.
const BUFFER_BYTES: usize = 64 << 10;

/// The frames that come in.
pub struct Incoming(FrameReader<BufReader<waystation_peers::Incoming>>);

/// The frames that go out.
pub struct Outgoing(FrameWriter<waystation_peers::Outgoing>);

/// Both directions of a connection of which nothing was read or written yet.
pub fn split(connection: Connection) -> Result<(Incoming, Outgoing, End, Option<Proven>)> {
    let (incoming, outgoing, end, place) = connection.split(None)?;
    let source = BufReader::with_capacity(BUFFER_BYTES, incoming);
    Ok((Incoming(FrameReader::new(source)), Outgoing(FrameWriter::new(outgoing)), end, place))
}

impl Incoming {
    /// The next frame, whose bulk is to be read before the next.
    pub fn frame(&mut self) -> Result<Frame> {
        self.0.read()
    }

    /// Reads bulk of the last frame.
    pub fn bulk(&mut self, bytes: &mut [u8]) -> Result<()> {
        self.0.source.read_exact(bytes).map_err(|error| lost(&error))
    }

    /// Whether more has come already.
    pub fn has_more(&self) -> bool {
        !self.0.source.buffer().is_empty()
    }
}

impl Outgoing {
    /// Sends a frame without bulk.
    pub fn send(&mut self, kind: FrameKind, number: u64, message: Vec<u8>) -> Result<()> {
        self.0.write(&Frame { kind, transfer: number, offset: 0, message, bulk_bytes: 0 })
    }

    /// Sends a piece of a block.
    pub fn send_piece(&mut self, number: u64, offset: u64, sums: Vec<u8>, bulk: &[u8]) -> Result<()> {
        let frame =
            Frame { kind: FrameKind::Block, transfer: number, offset, message: sums, bulk_bytes: bulk.len() };
        self.0.write_with(&frame, bulk)
    }
}
