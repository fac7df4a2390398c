//! The two directions of a connection, as threads that wait read and write them.
//!
//! Invariants: each direction is used by one thread at a time, and neither waits for the other: TLS, which both share, is
//! locked only while it works on what is in memory. Without TLS, bytes of a file go to the socket without a copy here.

use std::fs::File;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::Connection as Tls;

/// What is encrypted, or taken from the socket, at a time.
const PIECE_BYTES: usize = 256 << 10;

/// What both directions have in common.
#[derive(Clone)]
struct Link {
    socket: Arc<TcpStream>,
    tls: Option<Arc<Mutex<Tls>>>,
}

/// What comes in.
pub struct Incoming {
    link: Link,
    /// Bytes that have come and that TLS has not seen; only with TLS.
    received: Vec<u8>,
    start: usize,
    end: usize,
}

/// What goes out.
pub struct Outgoing {
    link: Link,
    /// Bytes that TLS has made; only while they are sent.
    records: Vec<u8>,
}

/// The right to end a connection from anywhere.
#[derive(Clone, Debug)]
pub struct End(Arc<TcpStream>);

/// Both directions of a connection that is open.
pub(crate) fn split(socket: TcpStream, tls: Option<Tls>) -> (Incoming, Outgoing, End) {
    let tls = tls.map(|mut tls| {
        tls.set_buffer_limit(Some(PIECE_BYTES));
        Arc::new(Mutex::new(tls))
    });
    let link = Link { socket: Arc::new(socket), tls };
    let received = vec![0; if link.tls.is_some() { PIECE_BYTES } else { 0 }];
    let end = End(Arc::clone(&link.socket));
    let outgoing = Outgoing { link: link.clone(), records: Vec::new() };
    (Incoming { link, received, start: 0, end: 0 }, outgoing, end)
}

impl Link {
    fn tls(&self) -> Option<MutexGuard<'_, Tls>> {
        // A session that was left in the middle of something fails by itself.
        self.tls.as_ref().map(|tls| tls.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whether there are bytes, or the end, without waiting.
    fn has_bytes(&self) -> bool {
        let mut byte = 0u8;
        let flags = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: the byte is writable; nothing is taken from the connection.
        unsafe { libc::recv(self.socket.as_raw_fd(), (&raw mut byte).cast(), 1, flags) >= 0 }
    }
}

impl Incoming {
    /// Whether the other side has said something, or gone away, without waiting for it.
    pub fn has_bytes(&mut self) -> bool {
        // An empty read finds out whether TLS has bytes to give; a failure is seen by whoever reads next.
        while self.link.tls.is_some() {
            match self.decrypted(&mut []) {
                Ok(None) if self.link.has_bytes() => match self.refill() {
                    Ok(0) | Err(_) => return true,
                    Ok(_) => {}
                },
                Ok(None) => return false,
                Ok(Some(_)) | Err(_) => return true,
            }
        }
        self.link.has_bytes()
    }

    /// Bytes that TLS has to give; nothing if more have to come first. With no room for any, whether there are some.
    fn decrypted(&mut self, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        let Some(mut tls) = self.link.tls() else { return Ok(None) };
        loop {
            match tls.reader().into_first_chunk() {
                Ok(found) => {
                    let count = found.len().min(buffer.len());
                    buffer[..count].copy_from_slice(&found[..count]);
                    io::BufRead::consume(&mut tls.reader(), count);
                    return Ok(Some(count));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let mut left = &self.received[self.start..self.end];
            if left.is_empty() {
                return Ok(None);
            }
            self.start += tls.read_tls(&mut left)?;
            let taken = tls.process_new_packets();
            taken.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        }
    }

    /// Waits for bytes that TLS has not seen; 0 at the end.
    fn refill(&mut self) -> io::Result<usize> {
        let count = (&*self.link.socket).read(&mut self.received)?;
        (self.start, self.end) = (0, count);
        Ok(count)
    }
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.link.tls.is_none() {
            return (&*self.link.socket).read(buffer);
        }
        loop {
            if let Some(count) = self.decrypted(buffer)? {
                return Ok(count);
            }
            match self.refill() {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
        }
    }
}

impl Outgoing {
    /// What is beneath.
    pub fn socket(&self) -> &TcpStream {
        &self.link.socket
    }

    /// Sends bytes of a file. UnexpectedEof if it ends before them.
    pub fn send_file(&mut self, file: &File, offset: u64, nbytes: usize) -> io::Result<()> {
        let (mut position, end) = (offset, offset + nbytes as u64);
        if self.link.tls.is_none() {
            while position < end {
                let left = (end - position) as usize;
                match rustix::fs::sendfile(&self.link.socket, file, Some(&mut position), left) {
                    Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                    Ok(_) | Err(rustix::io::Errno::INTR) => {}
                    Err(errno) => return Err(errno.into()),
                }
            }
            return Ok(());
        }
        let mut piece = vec![0; nbytes.min(PIECE_BYTES)];
        while position < end {
            let count = piece.len().min((end - position) as usize);
            file.read_exact_at(&mut piece[..count], position)?;
            self.write_all(&piece[..count])?;
            position += count as u64;
        }
        Ok(())
    }
}

impl Write for Outgoing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_vectored(&[IoSlice::new(bytes)])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        let Some(mut tls) = self.link.tls() else { return (&*self.link.socket).write_vectored(parts) };
        let count = tls.writer().write_vectored(parts)?;
        while tls.wants_write() {
            tls.write_tls(&mut self.records)?;
        }
        drop(tls);
        let sent = (&*self.link.socket).write_all(&self.records);
        self.records.clear();
        sent.map(|()| count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl End {
    /// Ends it; whoever reads or writes gets an error.
    pub fn now(&self) {
        drop(self.0.shutdown(Shutdown::Both)); // it may have ended by itself
    }
}
