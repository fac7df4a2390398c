//! A connection for bytes of slots as its thread reads and writes it: bytes, to and from the socket or through TLS.
//!
//! Invariants: both directions of a connection are used by one thread at a time; without TLS the bytes of a slot go from
//! its file to the socket without a copy here.

use std::fs::File;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_rustls::TlsStream;

use crate::peers::Carrier;

/// What is read of a file at a time, to be encrypted.
const PIECE_BYTES: usize = 256 << 10;

/// One end of a connection; its clones are the same one.
#[derive(Clone, Debug)]
pub struct Wire {
    socket: Arc<TcpStream>,
    session: Option<Arc<Mutex<rustls::Connection>>>,
}

impl Wire {
    /// The end that a handshake has used so far.
    pub(in crate::peers) fn new(carrier: Carrier) -> io::Result<Self> {
        let (stream, session) = match carrier {
            Carrier::Plain(stream) => (stream, None),
            Carrier::Tls(stream) => match *stream {
                TlsStream::Client(stream) => {
                    let (stream, session) = stream.into_inner();
                    (stream, Some(rustls::Connection::Client(session)))
                }
                TlsStream::Server(stream) => {
                    let (stream, session) = stream.into_inner();
                    (stream, Some(rustls::Connection::Server(session)))
                }
            },
        };
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok(Self { socket: Arc::new(stream), session: session.map(|session| Arc::new(Mutex::new(session))) })
    }

    /// What is beneath it.
    pub fn socket(&self) -> &Arc<TcpStream> {
        &self.socket
    }

    /// Sends bytes of a file. UnexpectedEof if it ends before them.
    pub fn send_file(&mut self, file: &File, offset: u64, nbytes: usize) -> io::Result<()> {
        if self.session.is_some() {
            return self.send_pieces(file, offset, nbytes);
        }
        let (mut position, mut left) = (offset, nbytes);
        while left > 0 {
            match rustix::fs::sendfile(&self.socket, file, Some(&mut position), left) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(count) => left -= count,
                Err(rustix::io::Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(())
    }

    fn send_pieces(&mut self, file: &File, offset: u64, nbytes: usize) -> io::Result<()> {
        let mut piece = vec![0; nbytes.min(PIECE_BYTES)];
        let (mut position, end) = (offset, offset + nbytes as u64);
        while position < end {
            let count = piece.len().min((end - position) as usize);
            file.read_exact_at(&mut piece[..count], position)?;
            self.write_all(&piece[..count])?;
            position += count as u64;
        }
        Ok(())
    }

    /// Whether the other side has said something, or gone away, without waiting for it.
    pub fn has_incoming(&self) -> bool {
        let Some(mut session) = self.session() else { return self.has_incoming_bytes() };
        // What TLS tells its own kind is nothing that was said; a failure is seen by whoever reads next.
        while session.wants_read() && self.has_incoming_bytes() {
            let read = session.read_tls(&mut &*self.socket);
            if read.is_ok_and(|count| count == 0) || session.process_new_packets().is_err() {
                return true;
            }
        }
        !session.wants_read()
    }

    fn has_incoming_bytes(&self) -> bool {
        let mut byte = 0u8;
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: the byte is writable; nothing is taken from the connection.
        unsafe { libc::recv(self.socket.as_raw_fd(), (&raw mut byte).cast(), 1, flags) >= 0 }
    }

    /// Sends what is encrypted already.
    fn send_encrypted(&self, session: &mut rustls::Connection) -> io::Result<()> {
        while session.wants_write() {
            retried(|| session.write_tls(&mut &*self.socket))?;
        }
        Ok(())
    }

    fn session(&self) -> Option<MutexGuard<'_, rustls::Connection>> {
        // A session that was left in the middle of something fails by itself.
        self.session.as_ref().map(|session| session.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Read for Wire {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let Some(mut session) = self.session() else { return (&*self.socket).read(buffer) };
        loop {
            match session.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
            retried(|| session.read_tls(&mut &*self.socket))?;
            let taken = session.process_new_packets();
            taken.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
            self.send_encrypted(&mut session)?; // what TLS has to answer
        }
    }
}

impl Write for Wire {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(mut session) = self.session() else { return (&*self.socket).write(bytes) };
        self.send_encrypted(&mut session)?;
        let count = session.writer().write(bytes)?;
        self.send_encrypted(&mut session)?;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.session().map_or(Ok(()), |mut session| self.send_encrypted(&mut session))
    }
}

/// Does again what a signal has kept from being done.
fn retried(mut call: impl FnMut() -> io::Result<usize>) -> io::Result<usize> {
    loop {
        match call() {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}
