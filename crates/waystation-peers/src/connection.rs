//! A connection between two sides that have proven themselves, and how it is made.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use waystation_format::{Error, Kind, Result};

use super::carrier::Carrier;
use super::frame::lost;
use super::gate::Proven;
use super::handshake::{Identity, as_client};
use super::hello::{Name, Purpose};
use super::keys::Keys;
use super::secret::Secret;
use super::stream::SignedStream;
use super::tls::Tls;

/// How long what was sent may be unacknowledged.
const SILENCE: Duration = Duration::from_secs(30);
/// When the kernel begins to ask whether the other side is there, and how often it does.
const PROBE: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;

/// How to reach the agent of another host.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its name: who answers there must be it.
    pub name: Name,
    /// Where it listens.
    pub address: SocketAddr,
}

/// What this side connects with.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// Who this side is.
    pub identity: Identity,
    /// What it proves that with.
    pub secret: Arc<Secret>,
    /// The certificates beneath that; without, nothing is encrypted.
    pub tls: Option<Arc<Tls>>,
}

/// A connection whose other side is known: a stream of signed bytes.
#[derive(Debug)]
pub struct Connection {
    signed: SignedStream<Carrier>,
    peer: Name,
    purpose: Purpose,
    /// Its place where it was accepted, given back when it ends.
    place: Option<Proven>,
}

impl Connection {
    /// Connects to an agent and proves both sides, within a time.
    ///
    /// Unavailable if it cannot be reached in time or is busy, InvalidInput if it is another host's, does not know the
    /// secret, or one of both refuses the other's certificate or speaks TLS alone, Conflict if it is of another run, Unsupported if it speaks another version.
    pub async fn connect(
        peer: &Peer,
        credentials: &Credentials,
        purpose: Purpose,
        within: Duration,
    ) -> Result<Self> {
        let connected = timeout(within, connect(peer, credentials, purpose)).await;
        let connected = connected.unwrap_or_else(|_| {
            let message = format!("the agent did not answer within {} s", within.as_secs_f64());
            Err(Error::new(Kind::Unavailable, message))
        });
        connected
            .map_err(|error| error.with("peer", peer.name.as_str()).with("address", peer.address.to_string()))
    }

    /// The connection that a handshake has led to.
    pub(crate) fn new(
        carrier: Carrier,
        keys: Keys,
        peer: Name,
        purpose: Purpose,
        place: Option<Proven>,
    ) -> Self {
        Self { signed: SignedStream::new(carrier, keys), peer, purpose, place }
    }

    /// Sends a message, which the other side receives as one.
    pub async fn send(&mut self, message: &[u8]) -> Result<()> {
        let length = u32::try_from(message.len())
            .map_err(|_| Error::new(Kind::InvalidInput, "the message is longer than any may be"))?;
        self.write_all(&length.to_le_bytes()).await.map_err(|error| lost(&error))?;
        self.write_all(message).await.map_err(|error| lost(&error))?;
        self.flush().await.map_err(|error| lost(&error))
    }

    /// The next message. Corrupt if it says that it is longer than a limit, before any of it is read; Unavailable if the
    /// connection has ended.
    pub async fn receive(&mut self, limit_bytes: usize) -> Result<Vec<u8>> {
        let length = self.read_u32_le().await.map_err(|error| lost(&error))? as usize;
        if length > limit_bytes {
            return Err(Error::new(Kind::Corrupt, "a message is longer than any may be")
                .with("bytes", length.to_string()));
        }
        // No more is allocated than has come, whatever the length says.
        let mut message = Vec::new();
        let read = self.take(length as u64).read_to_end(&mut message).await;
        match read.map_err(|error| lost(&error))? {
            count if count == length => Ok(message),
            _ => Err(lost(&io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// The connection, unless the other side, which has nothing to say now, has ended it, as far as that is known here.
    pub fn unless_over(mut self) -> Option<Self> {
        let (mut context, mut byte) = (Context::from_waker(Waker::noop()), [0]);
        let is_over = Pin::new(&mut self).poll_read(&mut context, &mut ReadBuf::new(&mut byte)).is_ready();
        (!is_over).then_some(self)
    }

    /// What it is made of, for who has something else to send than a stream. Nothing may have been read.
    pub fn into_parts(self) -> (Carrier, Keys, Name, Option<Proven>) {
        let Self { signed, peer, place, .. } = self;
        let (carrier, keys) = signed.into_parts();
        (carrier, keys, peer, place)
    }

    /// Who is at the other end.
    pub fn peer(&self) -> &Name {
        &self.peer
    }

    /// What it is for.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.signed).poll_read(context, buffer)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.signed).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.signed).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.signed).poll_shutdown(context)
    }
}

async fn connect(peer: &Peer, credentials: &Credentials, purpose: Purpose) -> Result<Connection> {
    let connected = TcpStream::connect(peer.address).await;
    let stream = connected
        .map_err(|error| Error::new(Kind::Unavailable, format!("the agent cannot be reached: {error}")))?;
    configure(&stream)?;
    let Credentials { identity, secret, tls } = credentials;
    let mut carrier = Carrier::connect(stream, tls.as_deref(), &peer.name).await?;
    let keys = as_client(&mut carrier, secret, identity, &peer.name, purpose).await?;
    Ok(Connection::new(carrier, keys, peer.name.clone(), purpose, None))
}

/// Small messages are not to wait for larger ones, and a host that is gone without a word is noticed by the kernel: by its
/// own signs of life, and by bytes that nobody takes.
pub(crate) fn configure(stream: &TcpStream) -> Result<()> {
    let set_up = || -> io::Result<()> {
        stream.set_nodelay(true)?;
        sockopt::set_socket_keepalive(stream, true)?;
        sockopt::set_tcp_keepidle(stream, PROBE)?;
        sockopt::set_tcp_keepintvl(stream, PROBE)?;
        sockopt::set_tcp_keepcnt(stream, PROBES)?;
        Ok(sockopt::set_tcp_user_timeout(stream, SILENCE.as_millis() as u32)?)
    };
    set_up()
        .map_err(|error| Error::new(Kind::Unavailable, format!("the connection cannot be set up: {error}")))
}
