//! What the secret is used for: keys that one side shows and the other expects, each for one use.
//!
//! Invariants: the secret itself is never shown, signs nothing and encrypts nothing; keys of different uses tell nothing of
//! each other. Whoever has the secret can make all of them, whoever has one key has that one only.

use std::sync::Arc;

use ring::hkdf::{HKDF_SHA256, Salt};
use rustls::crypto::ring::sign::any_eddsa_type;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use waystation_format::{Error, Kind, Result};
use zeroize::Zeroizing;

use super::hello::{Name, Purpose};
use super::secret::Secret;

/// Length of what a key is made from.
pub const SEED_BYTES: usize = 32;
const SALT: &[u8] = b"waystation peers 2";
/// What stands before the seed in an Ed25519 key in PKCS #8 (RFC 8410, section 7).
const PKCS8: [u8; 16] = *b"\x30\x2e\x02\x01\x00\x30\x05\x06\x03\x2b\x65\x70\x04\x22\x04\x20";

/// What a key is made from.
pub type Seed = Zeroizing<[u8; SEED_BYTES]>;

/// A use of the secret, of which nobody learns what it is by knowing another use.
pub fn derive(secret: &Secret, purpose: &[&[u8]]) -> Result<Seed> {
    let mut seed = Zeroizing::new([0; SEED_BYTES]);
    let root = Salt::new(HKDF_SHA256, SALT).extract(secret.bytes());
    let filled = root.expand(purpose, HKDF_SHA256).and_then(|found| found.fill(&mut *seed));
    filled.map_err(|_| Error::new(Kind::Internal, "a key cannot be derived from the secret"))?;
    Ok(seed)
}

/// The key that whoever has the secret issues for one purpose and one name.
pub fn issued(secret: &Secret, purpose: Purpose, name: &Name) -> Result<Seed> {
    derive(secret, &[b"issued ", &[purpose as u8], name.as_str().as_bytes()])
}

/// The public key by which others know the issuer.
pub fn issuer(secret: &Secret) -> Result<Vec<u8>> {
    Ok(RawKey::new(&derive(secret, &[b"issuer"])?)?.public().to_vec())
}

/// An Ed25519 key, as TLS shows it: raw, without a certificate around it.
#[derive(Clone, Debug)]
pub(crate) struct RawKey(pub Arc<CertifiedKey>);

impl RawKey {
    /// The key of a seed.
    pub fn new(seed: &Seed) -> Result<Self> {
        let unusable = || Error::new(Kind::Internal, "a key cannot be made from its seed");
        let pkcs8 = Zeroizing::new([&PKCS8[..], &**seed].concat());
        let signing = any_eddsa_type(&PrivatePkcs8KeyDer::from(&pkcs8[..])).map_err(|_| unusable())?;
        let public = signing.public_key().ok_or_else(unusable)?.to_vec();
        Ok(Self(Arc::new(CertifiedKey::new(vec![CertificateDer::from(public)], signing))))
    }

    /// What others see of it: a subject's public key info.
    pub fn public(&self) -> &[u8] {
        self.0.cert.first().map_or(&[], |public| public)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_use_has_a_key_of_its_own_which_the_secret_decides() {
        let public = |byte: u8, purpose: &[u8]| {
            let secret = Secret::new([byte; 32]).unwrap();
            RawKey::new(&derive(&secret, &[purpose]).unwrap()).unwrap().public().to_vec()
        };
        assert_eq!(public(1, b"agents"), public(1, b"agents"));
        assert_ne!(public(1, b"agents"), public(2, b"agents"));
        assert_ne!(public(1, b"agents"), public(1, b"controller"));
        // RFC 8410, section 4: the form of an Ed25519 public key.
        assert!(public(1, b"agents").starts_with(b"\x30\x2a\x30\x05\x06\x03\x2b\x65\x70\x03\x21\x00"));
        assert_eq!(public(1, b"agents").len(), 44);
    }

    #[test]
    fn an_issued_key_is_of_one_purpose_and_one_name() {
        let (secret, name) = (Secret::new([1; 32]).unwrap(), |name: &str| Name::new(name).unwrap());
        let one = issued(&secret, Purpose::Program, &name("one")).unwrap();
        assert_eq!(one, issued(&secret, Purpose::Program, &name("one")).unwrap());
        assert_ne!(one, issued(&secret, Purpose::Host, &name("one")).unwrap());
        assert_ne!(one, issued(&secret, Purpose::Program, &name("two")).unwrap());
        assert_ne!(one, issued(&Secret::new([2; 32]).unwrap(), Purpose::Program, &name("one")).unwrap());
    }
}
