//! What the secret is used for: proofs, and keys of one connection.
//!
//! Invariants: the secret itself signs nothing; every use has a key of its own (proofs, each direction of a
//! connection), and what a client signs never equals what a server does, so that nothing can be reflected;
//! signatures are compared in constant time.

use hkdf::Hkdf;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use waystation_format::{Error, Kind, Result};
use zeroize::Zeroizing;

use super::secret::Secret;

/// A whole signature.
pub(crate) const PROOF_BYTES: usize = 32;
/// A signature of what is sent in a connection that is proven.
pub const TAG_BYTES: usize = 16;
/// The digest of all that was said before the proofs.
pub(crate) type Transcript = [u8; 32];

const SALT: &[u8] = b"waystation peers 1";

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Who has connected.
    Client,
    /// Who listens.
    Server,
}

impl Side {
    fn name(self) -> &'static [u8] {
        match self {
            Side::Client => b"client",
            Side::Server => b"server",
        }
    }

    /// The other end.
    pub fn other(self) -> Self {
        match self {
            Side::Client => Side::Server,
            Side::Server => Side::Client,
        }
    }
}

/// One key, ready to sign.
#[derive(Clone)]
pub struct Signer(Hmac<Sha256>);

impl Signer {
    fn new(key: &[u8]) -> Result<Self> {
        Hmac::new_from_slice(key).map(Self).map_err(|_| unusable())
    }

    /// The signature of parts, one after another; their lengths must follow from what they say.
    pub fn sign(&self, parts: &[&[u8]]) -> [u8; PROOF_BYTES] {
        self.of(parts).finalize().into_bytes().into()
    }

    /// The beginning of a signature.
    pub fn tag(&self, parts: &[&[u8]]) -> [u8; TAG_BYTES] {
        let mut tag = [0; TAG_BYTES];
        tag.copy_from_slice(&self.sign(parts)[..TAG_BYTES]);
        tag
    }

    /// Whether a signature, or so much of its beginning as a tag has, is that of the parts.
    pub fn verify(&self, parts: &[&[u8]], signature: &[u8]) -> bool {
        signature.len() >= TAG_BYTES && self.of(parts).verify_truncated_left(signature).is_ok()
    }

    fn of(&self, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut state = self.0.clone();
        parts.iter().for_each(|part| state.update(part));
        state
    }
}

/// The digest of messages whose lengths are fixed.
pub(crate) fn transcript(messages: &[&[u8]]) -> Transcript {
    let mut digest = Sha256::new();
    digest.update(SALT);
    messages.iter().for_each(|message| digest.update(message));
    digest.finalize().into()
}

/// What proves that one side knows the secret, of one handshake.
pub(crate) struct Proofs<'a> {
    signer: Signer,
    transcript: &'a Transcript,
}

impl<'a> Proofs<'a> {
    /// The proofs of a handshake.
    pub fn new(secret: &Secret, transcript: &'a Transcript) -> Result<Self> {
        Ok(Self { signer: Signer::new(&*derive(secret, &[b"proof"])?)?, transcript })
    }

    /// What one side sends.
    pub fn of(&self, side: Side) -> [u8; PROOF_BYTES] {
        self.signer.sign(&[side.name(), self.transcript])
    }

    /// Whether that is what one side sends who knows the secret.
    pub fn verify(&self, side: Side, proof: &[u8; PROOF_BYTES]) -> bool {
        self.signer.verify(&[side.name(), self.transcript], proof)
    }
}

/// The keys of one connection, as one of its sides uses them.
#[derive(Clone)]
pub struct Keys {
    /// Signs what this side sends.
    pub own: Signer,
    /// Verifies what the other side has sent.
    pub other: Signer,
}

impl Keys {
    /// The keys of the connection that a handshake has led to.
    pub(crate) fn new(secret: &Secret, transcript: &Transcript, side: Side) -> Result<Self> {
        let signer =
            |side: Side| Signer::new(&*derive(secret, &[b"session ", side.name(), b" ", transcript])?);
        Ok(Self { own: signer(side)?, other: signer(side.other())? })
    }
}

impl std::fmt::Debug for Keys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Keys(…)")
    }
}

fn derive(secret: &Secret, purpose: &[&[u8]]) -> Result<Zeroizing<[u8; 32]>> {
    let mut key = Zeroizing::new([0; 32]);
    let root = Hkdf::<Sha256>::new(Some(SALT), secret.bytes());
    root.expand_multi_info(purpose, &mut *key).map_err(|_| unusable())?;
    Ok(key)
}

fn unusable() -> Error {
    Error::new(Kind::Internal, "a key cannot be derived from the secret")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secret(byte: u8) -> Secret {
        Secret::new([byte; 32]).unwrap()
    }

    #[test]
    fn signatures_are_those_of_other_implementations() {
        // RFC 4231, test case 2.
        let signed = Signer::new(b"Jefe").unwrap().sign(&[b"what do ya want ", b"for nothing?"]);
        assert_eq!(signed[..8], [0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e]);
        assert_eq!(signed[24..], [0x9d, 0xec, 0x58, 0xb9, 0x64, 0xec, 0x38, 0x43]);
    }

    #[test]
    fn a_proof_is_of_one_side_one_secret_and_one_handshake() {
        let (first, second) = (transcript(&[b"one"]), transcript(&[b"other"]));
        let (own, foreign) = (secret(1), secret(2));
        let proof = Proofs::new(&own, &first).unwrap().of(Side::Client);
        assert!(Proofs::new(&own, &first).unwrap().verify(Side::Client, &proof));
        assert!(!Proofs::new(&own, &first).unwrap().verify(Side::Server, &proof));
        assert!(!Proofs::new(&own, &second).unwrap().verify(Side::Client, &proof));
        assert!(!Proofs::new(&foreign, &first).unwrap().verify(Side::Client, &proof));
    }

    #[test]
    fn each_direction_has_a_key_which_both_sides_know() {
        let transcript = transcript(&[b"one"]);
        let client = Keys::new(&secret(1), &transcript, Side::Client).unwrap();
        let server = Keys::new(&secret(1), &transcript, Side::Server).unwrap();
        let tag = client.own.tag(&[b"words"]);
        assert!(server.other.verify(&[b"wor", b"ds"], &tag));
        assert!(!client.other.verify(&[b"words"], &tag) && !server.own.verify(&[b"words"], &tag));
        assert!(!server.other.verify(&[b"words"], &tag[..TAG_BYTES - 1]) && !server.other.verify(&[], &[]));
    }
}
