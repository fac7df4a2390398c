//! One side of a connection for those who have a socket of their own: the proofs, then messages of any length. No I/O.
//!
//! Bytes that have come go in, bytes that are to be sent come out. The owner of the socket bounds how long the proofs may take.
//! Failures: whatever is wrong with what has come (after that the channel is over; what there is to send tells the other side
//! why). Invariants: there are no messages before both sides have proven themselves and the client was let in; until then no more
//! is held than one record of TLS and what came with it; memory is taken for bytes that have come, never for a length that is
//! claimed. The wire is that of [`Connection`](super::Connection), but for messages: a length (`u64`), then so many bytes.

use std::net::IpAddr;
use std::ops::Range;
use std::sync::Arc;

use waystation_format::{Error, Kind, Result};

use super::connection::{Identity, RECORD_HEAD_BYTES, are_loopback, check, record_bytes};
use super::hello::{Hello, MEMBERSHIP_BYTES, Name, Purpose, Refusal, VERSION};
use super::session::Session;
use super::tls::Tls;

/// What stands before a message: its length.
const HEAD_BYTES: usize = 8;

/// What a record of TLS carries at most.
const RECORD_BYTES: usize = 16 << 10;

/// One side of a connection, without its socket.
pub struct Channel {
    session: Session,
    /// Who listens; nothing at the side that connects.
    own: Option<Identity>,
    is_plain: bool,
    is_over: bool,
    /// What has come and is not for TLS, or not yet a record of it.
    pending: Vec<u8>,
    outgoing: Vec<u8>,
    limit_bytes: u64,
}

/// Messages that have come: what they are in, and where.
pub type Messages = (Vec<u8>, Vec<Range<usize>>);

impl Channel {
    /// The side that connects to a server. The addresses are those of both ends of the socket: between two loopback addresses
    /// what follows the proofs is not encrypted. A message may have so many bytes.
    pub fn connect(
        tls: &Arc<Tls>,
        own: Identity,
        server: Name,
        purpose: Purpose,
        ends: [Option<IpAddr>; 2],
        limit_bytes: u64,
    ) -> Result<Self> {
        let is_plain = are_loopback(ends);
        let hello = Hello {
            versions: (VERSION, VERSION),
            purpose,
            run: own.run,
            is_plain,
            membership: [0; MEMBERSHIP_BYTES],
            client: own.name,
            server,
        };
        Ok(Self::new(Session::client(tls, hello)?, None, is_plain, limit_bytes))
    }

    /// The side that listens.
    pub fn accept(
        tls: &Arc<Tls>,
        own: Identity,
        ends: [Option<IpAddr>; 2],
        limit_bytes: u64,
    ) -> Result<Self> {
        Ok(Self::new(Session::server(tls)?, Some(own), are_loopback(ends), limit_bytes))
    }

    fn new(session: Session, own: Option<Identity>, is_plain: bool, limit_bytes: u64) -> Self {
        let (pending, outgoing) = (Vec::new(), Vec::new());
        Self { session, own, is_plain, is_over: false, pending, outgoing, limit_bytes }
    }

    /// Whether both sides have proven themselves and the client was let in.
    pub fn is_open(&self) -> bool {
        self.session.is_open() && !self.is_over
    }

    /// Who has proven itself, and waits to be let in by [`admit`](Self::admit).
    pub fn asked(&self) -> Option<(Purpose, &Name)> {
        let hello = self.session.asked().filter(|_| !self.is_over)?;
        Some((hello.purpose, &hello.client))
    }

    /// Lets in whoever waits, or tells it that it is not expected, which is the end.
    pub fn admit(&mut self, is_expected: bool) -> Result<()> {
        if self.asked().is_none() {
            return Err(Error::new(Kind::InvalidInput, "nobody waits to be let in"));
        }
        self.is_over = !is_expected;
        let refusal = (!is_expected).then_some(Refusal::Unexpected);
        self.session.answer(refusal, &mut self.outgoing)?;
        if is_expected { self.feed(&[]) } else { Ok(()) } // it may have said something already
    }

    /// Takes bytes that have come. The channel is over once this has failed.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<()> {
        if self.is_over {
            return Err(Error::new(Kind::Unavailable, "the connection is over"));
        }
        let taken = self.take_in(bytes);
        self.is_over = taken.is_err();
        taken
    }

    fn take_in(&mut self, bytes: &[u8]) -> Result<()> {
        self.pending.extend_from_slice(bytes);
        // A record at a time: what comes after the last one may be plain.
        while !self.session.is_open() && self.session.asked().is_none() {
            let Some(length) = self.pending.first_chunk::<RECORD_HEAD_BYTES>().map(record_bytes) else {
                return Ok(());
            };
            if self.pending.len() < length {
                return Ok(());
            }
            let record: Vec<u8> = self.pending.drain(..length).collect();
            self.session.feed(&record)?;
            self.check()?;
        }
        if self.session.is_open() && !self.is_plain {
            self.session.feed(&std::mem::take(&mut self.pending))?;
        }
        Ok(())
    }

    /// Whether who has asked, if somebody has, wants this side.
    fn check(&mut self) -> Result<()> {
        let (Some(hello), Some(own)) = (self.session.asked(), &self.own) else { return Ok(()) };
        let client = hello.client.clone();
        let Err((refusal, error)) = check(hello, own, self.is_plain) else { return Ok(()) };
        self.session.answer(Some(refusal), &mut self.outgoing)?;
        Err(error.with("client", client.as_str()))
    }

    /// Takes what is to be sent next of the proofs, of the answer to them, or of why there is no connection.
    pub fn take_outgoing(&mut self) -> Vec<u8> {
        self.session.take_outgoing(&mut self.outgoing);
        std::mem::take(&mut self.outgoing)
    }

    /// Takes the messages that are whole. Corrupt if one says that it is longer than any may be.
    pub fn messages(&mut self) -> Result<Messages> {
        if !self.is_open() {
            return Ok((Vec::new(), Vec::new()));
        }
        let received = if self.is_plain { &mut self.pending } else { self.session.received() };
        let (mut found, mut end) = (Vec::new(), 0);
        while let Some((head, rest)) = received[end..].split_first_chunk::<HEAD_BYTES>() {
            let length = u64::from_le_bytes(*head);
            if length > self.limit_bytes {
                self.is_over = true;
                let error = Error::new(Kind::Corrupt, "a message says that it is longer than any may be");
                return Err(error.with("bytes", length.to_string()));
            }
            if (rest.len() as u64) < length {
                break;
            }
            let start = end + HEAD_BYTES;
            end = start + length as usize;
            found.push(start..end);
        }
        if found.is_empty() {
            return Ok((Vec::new(), found));
        }
        let rest = received.split_off(end);
        Ok((std::mem::replace(received, rest), found))
    }

    /// What is to be sent for a message. InvalidInput if the channel is not open, or if the message is longer than any may be.
    pub fn seal(&mut self, message: &[u8]) -> Result<Vec<u8>> {
        let invalid = |message| Err(Error::new(Kind::InvalidInput, message));
        if !self.is_open() {
            return invalid("nothing can be sent before both sides have proven themselves");
        }
        if message.len() as u64 > self.limit_bytes {
            return invalid("the message is longer than any may be");
        }
        let head = (message.len() as u64).to_le_bytes();
        let mut sealed = std::mem::take(&mut self.outgoing);
        if self.is_plain {
            sealed.extend_from_slice(&head);
            sealed.extend_from_slice(message);
        } else {
            // A short message is one record together with its head.
            let (first, rest) = message.split_at(message.len().min(RECORD_BYTES - HEAD_BYTES));
            self.session.write(&[&head, first].concat(), &mut sealed)?;
            self.session.write(rest, &mut sealed)?;
        }
        Ok(sealed)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use waystation_format::slot::Id;

    use super::*;
    use crate::keys::{issued, issuer};
    use crate::secret::Secret;

    const LIMIT_BYTES: u64 = 1 << 20;
    const LOOPBACK: [Option<IpAddr>; 2] = [Some(IpAddr::V4(std::net::Ipv4Addr::LOCALHOST)); 2];

    fn name(name: &str) -> Name {
        Name::new(name).unwrap()
    }

    fn identity(of: &str) -> Identity {
        Identity { name: name(of), run: Id([0; 16]) }
    }

    fn server(ends: [Option<IpAddr>; 2]) -> Channel {
        let tls = Arc::new(Tls::of_issuer(Secret::new([1; 32]).unwrap()).unwrap());
        Channel::accept(&tls, identity("controller"), ends, LIMIT_BYTES).unwrap()
    }

    /// A client of a name that has the key of another, if that is given.
    fn client(ends: [Option<IpAddr>; 2], key_of: &str) -> Channel {
        let secret = Secret::new([1; 32]).unwrap();
        let seed = issued(&secret, Purpose::Program, &name(key_of)).unwrap();
        let tls = Arc::new(Tls::of_issued(&seed, &issuer(&secret).unwrap()).unwrap());
        let own = identity("one");
        Channel::connect(&tls, own, name("controller"), Purpose::Program, ends, LIMIT_BYTES).unwrap()
    }

    fn prove(client: &mut Channel, server: &mut Channel) -> Result<()> {
        while !client.is_open() {
            server.feed(&client.take_outgoing())?;
            if server.asked().is_some() {
                server.admit(true)?;
            }
            client.feed(&server.take_outgoing())?;
        }
        Ok(())
    }

    fn bodies(channel: &mut Channel) -> Vec<Vec<u8>> {
        let (bytes, places) = channel.messages().unwrap();
        places.into_iter().map(|place| bytes[place].to_vec()).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn whatever_a_stranger_says_lets_it_in_nowhere(
            begins_well: bool,
            said in proptest::collection::vec(any::<u8>(), 0..2000),
        ) {
            let mut server = server([None; 2]);
            if begins_well {
                server.feed(&client([None; 2], "one").take_outgoing()).unwrap();
            }
            let fed = server.feed(&said);
            prop_assert!(server.asked().is_none() && !server.is_open());
            prop_assert!(bodies(&mut server).is_empty());
            prop_assert!(server.pending.len() <= said.len());
            prop_assert!(fed.is_ok() || server.feed(&[]).is_err());
        }

        #[test]
        fn messages_come_out_however_their_bytes_come(
            is_plain: bool,
            messages in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..40_000), 0..4),
            piece in 1..30_000usize,
        ) {
            let ends = if is_plain { LOOPBACK } else { [None; 2] };
            let (mut client, mut server) = (client(ends, "one"), server(ends));
            prove(&mut client, &mut server).unwrap();
            let sealed: Vec<u8> = messages.iter().flat_map(|message| client.seal(message).unwrap()).collect();
            let mut found = Vec::new();
            for piece in sealed.chunks(piece) {
                server.feed(piece).unwrap();
                found.extend(bodies(&mut server));
            }
            prop_assert_eq!(found, messages);
        }
    }

    #[test]
    fn a_client_with_the_key_of_another_name_is_told_so() {
        let (mut client, mut server) = (client([None; 2], "two"), server([None; 2]));
        let refused = prove(&mut client, &mut server).unwrap_err();
        assert!(refused.message().contains("does not have the key of the name"), "{refused}");
        assert_eq!(refused.context("client"), Some("one"));
        let told = client.feed(&server.take_outgoing()).unwrap_err();
        assert!(told.message().contains("has another secret"), "{told}");
        assert!(!client.is_open() && !server.is_open() && server.asked().is_none());
    }

    #[test]
    fn credentials_that_only_connect_do_not_listen() {
        let secret = Secret::new([1; 32]).unwrap();
        let seed = issued(&secret, Purpose::Program, &name("one")).unwrap();
        let issued = Arc::new(Tls::of_issued(&seed, &issuer(&secret).unwrap()).unwrap());
        let issuer = Arc::new(Tls::of_issuer(secret).unwrap());
        assert!(Channel::accept(&issued, identity("one"), LOOPBACK, 0).is_err());
        let (own, other) = (identity("controller"), name("one"));
        assert!(Channel::connect(&issuer, own, other, Purpose::Host, LOOPBACK, 0).is_err());
    }
}
