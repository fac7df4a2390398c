//! One side of a connection without its socket: TLS 1.3, and inside it who the two sides are. No I/O.
//!
//! The two sides prove themselves by TLS, the listener first. Inside, the client says who it is and what it wants (`hello`), and
//! the server answers. Failures: a side that cannot prove itself, or wants what is not here; then there is no connection, and
//! nothing was done. Invariants: of a side that has not proven itself nothing is looked at but what TLS has to see; each
//! connection has keys of its own, which nobody can make from what was recorded, not even with the secret.

use std::io::{Read, Write};
use std::sync::Arc;

use rustls::{ClientConnection, Connection, ServerConnection};
use waystation_format::{Error, Kind, Result};

use super::hello::{ANSWER_BYTES, Answer, HELLO_BYTES, Hello, MEMBERSHIP_BYTES, Refusal};
use super::tls::{Side, Tls, meaning};

/// One side of a connection.
pub struct Session {
    tls: Connection,
    own: Arc<Tls>,
    stage: Stage,
    /// What has come and was not taken.
    received: Vec<u8>,
}

enum Stage {
    /// A client that has not said who it is.
    Greeting(Box<Hello>),
    /// A client that waits for an answer.
    Asking,
    /// A server that does not know who the client is.
    Listening,
    /// A server that has not answered.
    Asked(Box<Hello>),
    Open,
}

impl Session {
    /// The side that connects.
    pub fn client(own: &Arc<Tls>, hello: Hello) -> Result<Self> {
        let (config, name) = own.as_client(&hello.server)?;
        let tls = ClientConnection::new(config, name).map_err(|error| meaning(&error))?;
        Ok(Self::new(tls.into(), own, Stage::Greeting(Box::new(hello))))
    }

    /// The side that listens.
    pub fn server(own: &Arc<Tls>) -> Result<Self> {
        let tls = ServerConnection::new(own.as_server()?).map_err(|error| meaning(&error))?;
        Ok(Self::new(tls.into(), own, Stage::Listening))
    }

    fn new(tls: Connection, own: &Arc<Tls>, stage: Stage) -> Self {
        Self { tls, own: Arc::clone(own), stage, received: Vec::new() }
    }

    /// Takes bytes of the other side. After a failure, what there is to send tells the other side why.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() && self.tls.read_tls(&mut bytes).is_ok_and(|count| count > 0) {
            self.tls.process_new_packets().map_err(|error| meaning(&error))?;
            // The end of it, whichever that is, is seen by whoever reads the socket.
            drop(self.tls.reader().read_to_end(&mut self.received));
            self.advance()?;
        }
        Ok(())
    }

    /// Takes what is to be sent to the other side next.
    pub fn take_outgoing(&mut self, to: &mut Vec<u8>) {
        while self.tls.wants_write() && self.tls.write_tls(to).is_ok() {}
    }

    /// Encrypts bytes, which are to be sent next.
    pub fn write(&mut self, mut bytes: &[u8], to: &mut Vec<u8>) -> Result<()> {
        while !bytes.is_empty() {
            let count = self.tls.writer().write(bytes).map_err(|error| super::frame::lost(&error))?;
            bytes = &bytes[count..];
            self.take_outgoing(to);
        }
        Ok(())
    }

    /// TLS alone, which is open. Nothing may have come that was not taken.
    pub fn into_tls(self) -> Connection {
        debug_assert!(self.is_open() && self.received.is_empty());
        self.tls
    }

    /// What has come since the session is open, for its reader to take what is whole.
    pub fn received(&mut self) -> &mut Vec<u8> {
        &mut self.received
    }

    /// Whether both sides have proven themselves and the client was let in.
    pub fn is_open(&self) -> bool {
        matches!(self.stage, Stage::Open)
    }

    /// Who has proven itself and waits to be let in.
    pub fn asked(&self) -> Option<&Hello> {
        if let Stage::Asked(hello) = &self.stage { Some(hello) } else { None }
    }

    /// Lets in whoever waits, or says why not.
    pub fn answer(&mut self, refusal: Option<Refusal>, to: &mut Vec<u8>) -> Result<()> {
        let mut membership = [0; MEMBERSHIP_BYTES];
        if refusal.is_none() {
            membership = self.own.membership(&self.tls, Side::Server)?;
            self.stage = Stage::Open;
        }
        self.write(&Answer { refusal, membership }.encode(), to)
    }

    /// Whether a client is what it says it is.
    fn judge(&self, bytes: &[u8; HELLO_BYTES]) -> Result<Hello, (Refusal, Error)> {
        let hello = Hello::decode(bytes).map_err(|error| match error.kind() {
            Kind::Unsupported => (Refusal::Version, error),
            _ => (Refusal::Malformed, error),
        })?;
        let named = |error: Error| error.with("client", hello.client.as_str());
        // Each is of one connection and can be tried once, so the time that this takes tells nothing.
        match self.own.membership(&self.tls, Side::Client) {
            Ok(expected) if expected == hello.membership => {}
            _ => {
                let message = "a client does not know the secret of this job";
                return Err((Refusal::Secret, named(Error::new(Kind::InvalidInput, message))));
            }
        }
        let checked = self.own.check_client(&self.tls, &hello);
        checked.map_err(|(refusal, error)| (refusal, named(error)))?;
        Ok(hello)
    }

    fn advance(&mut self) -> Result<()> {
        match &mut self.stage {
            _ if self.tls.is_handshaking() => {}
            Stage::Greeting(hello) => {
                hello.membership = self.own.membership(&self.tls, Side::Client)?;
                let bytes = hello.encode();
                self.stage = Stage::Asking;
                // It is less than TLS takes at a time.
                drop(self.tls.writer().write_all(&bytes));
            }
            Stage::Asking => {
                let Some((bytes, rest)) = self.received.split_first_chunk::<ANSWER_BYTES>() else {
                    return Ok(());
                };
                let answer = Answer::decode(bytes)?;
                if let Some(refusal) = answer.refusal {
                    return Err(refusal.error());
                }
                if answer.membership != self.own.membership(&self.tls, Side::Server)? {
                    let message = "whoever answers there does not know the secret of this job";
                    return Err(Error::new(Kind::InvalidInput, message));
                }
                self.received = rest.to_vec();
                self.stage = Stage::Open;
            }
            Stage::Listening => {
                let Some((bytes, rest)) = self.received.split_first_chunk::<HELLO_BYTES>() else {
                    return Ok(());
                };
                let judged = self.judge(bytes);
                self.received = rest.to_vec();
                match judged {
                    Ok(hello) => self.stage = Stage::Asked(Box::new(hello)),
                    Err((refusal, error)) => {
                        let answer = Answer { refusal: Some(refusal), membership: [0; MEMBERSHIP_BYTES] };
                        drop(self.tls.writer().write_all(&answer.encode()));
                        return Err(error);
                    }
                }
            }
            Stage::Asked(_) | Stage::Open => {}
        }
        Ok(())
    }
}
