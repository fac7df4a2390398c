//! What carries a connection: TCP as it is, or TLS over it.
//!
//! Failures: one side speaks TLS and the other does not (each is told, and nothing of the handshake was said), a certificate
//! is refused, the connection is lost. Invariant: a server answers in the way it was configured for, whatever the client wants.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use waystation_format::{Error, Kind, Result};

use super::handshake::lost;
use super::hello::{HELLO_BYTES, Name, Refusal, refusal};
use super::tls::{self, Session, Tls};

/// The first byte of a client that speaks TLS; a hello begins with another.
const TLS_HANDSHAKE: u8 = 22;
/// What a client may still send that was refused; reading it lets the refusal reach it.
const LAST_BYTES: u64 = 64 << 10;

/// A connection before either side has proven itself.
#[derive(Debug)]
pub enum Carrier {
    /// Nothing is encrypted.
    Plain(TcpStream),
    /// Both sides have shown valid certificates.
    Tls(Box<Session>),
}

impl Carrier {
    /// The client's side.
    pub async fn connect(stream: TcpStream, tls: Option<&Tls>, server: &Name) -> Result<Self> {
        let Some(tls) = tls else { return Ok(Self::Plain(stream)) };
        Ok(Self::Tls(Box::new(tls.connect(stream, server).await?)))
    }

    /// The server's side.
    pub async fn accept(mut stream: TcpStream, tls: Option<&Tls>) -> Result<Self> {
        let mut first = [0];
        stream.peek(&mut first).await.map_err(|error| lost(&error))?;
        match (tls, first[0] == TLS_HANDSHAKE) {
            (None, false) => Ok(Self::Plain(stream)),
            (None, true) => {
                refuse(&mut stream, Refusal::Malformed).await;
                Err(Error::new(
                    Kind::InvalidInput,
                    "a client speaks TLS, for which this agent was given none",
                ))
            }
            (Some(_), false) => {
                // What it says is not looked at, but read so that it hears the answer.
                drop(stream.read_exact(&mut [0; HELLO_BYTES]).await);
                refuse(&mut stream, Refusal::Plain).await;
                Err(Error::new(Kind::InvalidInput, "a client does not speak TLS"))
            }
            (Some(tls), true) => match tls.accept(stream).await {
                Ok(session) => Ok(Self::Tls(Box::new(session))),
                Err((error, mut stream)) => {
                    linger(&mut stream).await;
                    Err(lost(&error))
                }
            },
        }
    }

    /// The socket of a connection of which nothing is encrypted. Unsupported if it is TLS.
    pub fn into_plain(self) -> Result<TcpStream> {
        match self {
            Self::Plain(stream) => Ok(stream),
            Self::Tls(_) => Err(Error::new(Kind::Unsupported, "these connections do not go through TLS")),
        }
    }

    /// What only the two ends of this connection have in common; empty without TLS.
    pub(crate) fn binding(&self) -> Result<Vec<u8>> {
        match self {
            Self::Plain(_) => Ok(Vec::new()),
            Self::Tls(session) => tls::binding(session),
        }
    }

    /// InvalidInput if the other side has shown a certificate, and that is of another host.
    pub(crate) fn check_name(&self, host: &Name) -> Result<()> {
        match self {
            Self::Plain(_) => Ok(()),
            Self::Tls(session) => tls::check_session(session, host),
        }
    }
}

/// Tells a client without TLS, or one that should be, that this side does not go on with it.
async fn refuse(stream: &mut TcpStream, why: Refusal) {
    drop(stream.write_all(&refusal(why)).await);
    linger(stream).await;
}

/// Ends a connection in a way that lets the other side read what was sent last.
async fn linger(stream: &mut TcpStream) {
    drop(stream.shutdown().await);
    drop(tokio::io::copy(&mut stream.take(LAST_BYTES), &mut tokio::io::sink()).await);
}

impl AsyncRead for Carrier {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Carrier {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
