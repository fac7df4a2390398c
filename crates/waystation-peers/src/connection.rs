//! A connection between two sides that have proven themselves, and how it is made.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::sockopt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use waystation_format::slot::Id;
use waystation_format::{Error, Kind, Result};

use super::frame::lost;
use super::gate::Proven;
use super::halves::{End, Incoming, Outgoing, split};
use super::hello::{Hello, MEMBERSHIP_BYTES, Name, Purpose, Refusal, VERSION};
use super::session::Session;
use super::tls::Tls;

/// How long what was sent may be unacknowledged.
const SILENCE: Duration = Duration::from_secs(30);
/// When the kernel begins to ask whether the other side is there, and how often it does.
const PROBE: Duration = Duration::from_secs(5);
const PROBES: u32 = 3;
/// Length of the head of a record of TLS (RFC 8446, section 5.1): its first byte is the kind, its last two are the length of what
/// follows, at most so many.
pub(crate) const RECORD_HEAD_BYTES: usize = 5;
const RECORD_KINDS: std::ops::RangeInclusive<u8> = 20..=23;
const RECORD_BYTES: usize = (16 << 10) + 256;
/// What a side that was refused may still send; reading it lets the refusal reach it.
const LAST_BYTES: u64 = 64 << 10;

/// How to reach the agent of another host.
#[derive(Clone, Debug)]
pub struct Peer {
    /// Its name: who answers there must be it.
    pub name: Name,
    /// Where it listens.
    pub address: SocketAddr,
}

/// Who speaks: a host, or a tool, of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Its name, as the others of the job know it.
    pub name: Name,
    /// The run.
    pub run: Id,
}

/// When what goes over a connection is encrypted, once its sides have proven themselves, which they do in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encryption {
    /// Unless both ends of the connection have loopback addresses: nobody but the administrator of the machine could listen.
    #[default]
    BetweenMachines,
    /// Always.
    Always,
}

/// What this side connects and listens with.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// Who this side is.
    pub identity: Identity,
    /// What it proves that with.
    pub tls: Arc<Tls>,
    /// When it encrypts.
    pub encryption: Encryption,
}

/// A connection whose other side is known: messages, until it is split into its directions.
pub struct Connection {
    stream: TcpStream,
    /// Nothing if what goes over it is plain.
    session: Option<Session>,
    peer: Name,
    purpose: Purpose,
    /// Its place where it was accepted, given back when it ends.
    place: Option<Proven>,
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connection")
            .field("peer", &self.peer)
            .field("purpose", &self.purpose)
            .finish_non_exhaustive()
    }
}

impl Connection {
    /// Connects to an agent and proves both sides, within a time.
    ///
    /// Unavailable if it cannot be reached in time or is busy, InvalidInput if it is another host's, does not know the
    /// secret, or one of both refuses the other's certificate, Conflict if it is of another run, Unsupported if it speaks another version.
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

    /// Who is at the other end.
    pub fn peer(&self) -> &Name {
        &self.peer
    }

    /// What it is for.
    pub fn purpose(&self) -> Purpose {
        self.purpose
    }

    /// Whether what goes over it is encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.session.is_some()
    }

    /// Sends a message, which the other side receives as one.
    pub async fn send(&mut self, message: &[u8]) -> Result<()> {
        let length = u32::try_from(message.len())
            .map_err(|_| Error::new(Kind::InvalidInput, "the message is longer than any may be"))?;
        let plain = [&length.to_le_bytes(), message].concat();
        let bytes = match &mut self.session {
            None => plain,
            Some(session) => {
                let mut records = Vec::new();
                session.write(&plain, &mut records)?;
                records
            }
        };
        self.stream.write_all(&bytes).await.map_err(|error| lost(&error))
    }

    /// The next message. Corrupt if it says that it is longer than a limit, before any of it is read; Unavailable if the
    /// connection has ended.
    pub async fn receive(&mut self, limit_bytes: usize) -> Result<Vec<u8>> {
        let mut head = Vec::new();
        self.read(&mut head, 4).await?;
        let length = head.first_chunk().copied().map_or(0, u32::from_le_bytes) as usize;
        if length > limit_bytes {
            return Err(Error::new(Kind::Corrupt, "a message is longer than any may be")
                .with("bytes", length.to_string()));
        }
        let mut message = Vec::new();
        self.read(&mut message, length).await?;
        Ok(message)
    }

    /// Reads so many bytes. No more is allocated than has come.
    async fn read(&mut self, to: &mut Vec<u8>, count: usize) -> Result<()> {
        let Some(session) = &mut self.session else {
            let read =
                (&mut self.stream).take(count as u64).read_to_end(to).await.map_err(|error| lost(&error))?;
            return if read == count { Ok(()) } else { Err(lost(&io::ErrorKind::UnexpectedEof.into())) };
        };
        while session.received().len() < count {
            session.feed(&record(&mut self.stream).await.map_err(|error| lost(&error))?)?;
        }
        to.extend(session.received().drain(..count));
        Ok(())
    }

    /// The connection, unless the other side, which has nothing to say now, has ended it, as far as that is known here.
    pub fn unless_over(self) -> Option<Self> {
        let is_quiet =
            matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        is_quiet.then_some(self)
    }

    /// Its directions for threads that wait, of which the other side may be silent, and take nothing, for so long. Nothing
    /// may have been received. Its place is given back when the last part is dropped.
    pub fn split(self, silence: Option<Duration>) -> Result<(Incoming, Outgoing, End, Option<Proven>)> {
        let set_up = |stream: TcpStream| -> io::Result<std::net::TcpStream> {
            let stream = stream.into_std()?;
            stream.set_nonblocking(false)?;
            stream.set_read_timeout(silence)?;
            stream.set_write_timeout(Some(SILENCE))?;
            Ok(stream)
        };
        let stream = set_up(self.stream).map_err(|error| lost(&error))?;
        let (incoming, outgoing, end) = split(stream, self.session.map(Session::into_tls));
        Ok((incoming, outgoing, end, self.place))
    }
}

async fn connect(peer: &Peer, credentials: &Credentials, purpose: Purpose) -> Result<Connection> {
    let connected = TcpStream::connect(peer.address).await;
    let mut stream = connected
        .map_err(|error| Error::new(Kind::Unavailable, format!("the agent cannot be reached: {error}")))?;
    configure(&stream)?;
    let is_plain = is_plain(&stream, credentials.encryption);
    let hello = Hello {
        versions: (VERSION, VERSION),
        purpose,
        run: credentials.identity.run,
        is_plain,
        membership: [0; MEMBERSHIP_BYTES],
        client: credentials.identity.name.clone(),
        server: peer.name.clone(),
    };
    let mut session = Session::client(&credentials.tls, hello)?;
    drive(&mut stream, &mut session, Session::is_open).await?;
    let session = (!is_plain).then_some(session);
    Ok(Connection { stream, session, peer: peer.name.clone(), purpose, place: None })
}

/// The server's side: has a client prove itself, asks for a place for it, and lets it in.
pub(crate) async fn accept(
    mut stream: TcpStream,
    credentials: Credentials,
    place: impl FnOnce() -> Option<Proven>,
) -> Result<Connection> {
    configure(&stream)?;
    let is_plain = is_plain(&stream, credentials.encryption);
    let mut session = Session::server(&credentials.tls)?;
    drive(&mut stream, &mut session, |session| session.asked().is_some()).await?;
    let Some(hello) = session.asked().cloned() else {
        return Err(lost(&io::ErrorKind::UnexpectedEof.into()));
    };
    let admitted = check(&hello, &credentials.identity, is_plain).and_then(|()| {
        let busy = || (Refusal::Busy, Error::new(Kind::Unavailable, "there are too many connections"));
        place().ok_or_else(busy)
    });
    let mut bytes = Vec::new();
    session.answer(admitted.as_ref().err().map(|(refusal, _)| *refusal), &mut bytes)?;
    let sent = stream.write_all(&bytes).await;
    let place = match admitted {
        Ok(place) => place,
        Err((_, error)) => {
            linger(&mut stream).await;
            return Err(error.with("client", hello.client.as_str()));
        }
    };
    sent.map_err(|error| lost(&error))?;
    let session = (!is_plain).then_some(session);
    Ok(Connection { stream, session, peer: hello.client, purpose: hello.purpose, place: Some(place) })
}

/// Whether a client that has proven itself wants this side.
pub(crate) fn check(hello: &Hello, own: &Identity, is_plain: bool) -> Result<(), (Refusal, Error)> {
    let invalid = |message| Error::new(Kind::InvalidInput, message);
    if hello.server != own.name {
        let error = invalid("a client wants another host").with("wanted", hello.server.as_str());
        return Err((Refusal::Host, error));
    }
    if hello.run != own.run {
        let error = Error::new(Kind::Conflict, "a client belongs to another run");
        return Err((Refusal::Run, error.with("run", hello.run.to_string())));
    }
    if hello.is_plain != is_plain {
        return Err((Refusal::Plain, invalid("a client has come by a loopback address at one end alone")));
    }
    Ok(())
}

/// Carries what a session says until it is as far as it is to be.
async fn drive(
    stream: &mut TcpStream,
    session: &mut Session,
    is_there: impl Fn(&Session) -> bool,
) -> Result<()> {
    let mut fed = Ok(());
    loop {
        let mut bytes = Vec::new();
        session.take_outgoing(&mut bytes);
        let sent = stream.write_all(&bytes).await;
        if let Err(error) = fed {
            linger(stream).await;
            return Err(error);
        }
        sent.map_err(|error| unproven(&error))?;
        if is_there(session) {
            return Ok(());
        }
        // A record and no more: what comes after the last one may be plain.
        fed = session.feed(&record(stream).await.map_err(|error| unproven(&error))?);
    }
}

/// Reads a record of TLS.
async fn record(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut head = [0; RECORD_HEAD_BYTES];
    stream.read_exact(&mut head).await?;
    let mut record = head.to_vec();
    record.resize(record_bytes(&head), 0);
    stream.read_exact(&mut record[RECORD_HEAD_BYTES..]).await?;
    Ok(record)
}

/// The length of a record of TLS, by its head. TLS itself refuses what is no record, by its first byte or its length: then no
/// more is waited for.
pub(crate) fn record_bytes(head: &[u8; RECORD_HEAD_BYTES]) -> usize {
    let length = usize::from(u16::from_be_bytes([head[3], head[4]]));
    let is_record = RECORD_KINDS.contains(&head[0]) && length <= RECORD_BYTES;
    RECORD_HEAD_BYTES + if is_record { length } else { 0 }
}

/// Ends a connection in a way that lets the other side read what was sent last.
async fn linger(stream: &mut TcpStream) {
    drop(stream.shutdown().await);
    drop(tokio::io::copy(&mut stream.take(LAST_BYTES), &mut tokio::io::sink()).await);
}

/// Why there is no connection, when what carries it fails before both sides have proven.
fn unproven(error: &io::Error) -> Error {
    Error::new(Kind::Unavailable, format!("the connection was lost before both sides had proven: {error}"))
}

/// Whether what follows the proofs is not encrypted. Both ends see the same, unless something stands between them.
fn is_plain(stream: &TcpStream, encryption: Encryption) -> bool {
    let ip = |address: io::Result<SocketAddr>| address.map(|address| address.ip()).ok();
    encryption == Encryption::BetweenMachines
        && are_loopback([ip(stream.local_addr()), ip(stream.peer_addr())])
}

/// Whether both ends of a connection have loopback addresses.
pub(crate) fn are_loopback(ends: [Option<IpAddr>; 2]) -> bool {
    ends.iter().all(|address| address.is_some_and(|address| address.to_canonical().is_loopback()))
}

/// Small messages are not to wait for larger ones, and a host that is gone without a word is noticed by the kernel: by its
/// own signs of life, and by bytes that nobody takes.
fn configure(stream: &TcpStream) -> Result<()> {
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
