//! What a side shows in TLS, and whom it believes: keys made from the secret of the job, or certificates of an organisation.
//!
//! Failures: files that hold no certificates or no key (nothing starts); a key that is not of this job; a certificate that none
//! of the authorities has signed, that has expired or is of another host (there is no connection, and both sides are told
//! why). Invariants: TLS 1.3 only; whoever shows no valid key or certificate is sent nothing that is meant for hosts; nothing
//! is resumed, so each connection is proven anew.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{
    AlwaysResolvesClientRawPublicKeys, ResolvesClientCert, Resumption, WebPkiServerVerifier,
    verify_server_name,
};
use rustls::crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature_with_raw_key};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    AlwaysResolvesServerRawPublicKeys, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::version::TLS13;
use rustls::{
    AlertDescription, CertificateError, CipherSuite, ClientConfig, Connection, DigitallySignedStruct,
    DistinguishedName, RootCertStore, ServerConfig, SignatureScheme,
};
use waystation_format::{Error, Kind, Result};
use zeroize::Zeroizing;

use super::hello::{Hello, Name, Refusal};
use super::keys::{RawKey, Seed, derive, issued};
use super::secret::{Secret, open_private};

/// Which end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// Who has connected.
    Client,
    /// Who listens.
    Server,
}

/// What this side shows to others, and whom it believes.
pub struct Tls {
    /// Nothing if this side only listens.
    client: Option<Arc<ClientConfig>>,
    /// Nothing if this side only connects.
    server: Option<Arc<ServerConfig>>,
    proof: Proof,
}

/// What proves the name that a client says it has.
enum Proof {
    /// The key of the job: whoever has it is believed.
    Job,
    /// A key of its own, which this side can make from its secret for each purpose and name.
    Issued(Secret),
    /// A certificate with that name.
    Certificates(Certificates),
}

/// What is more where hosts have certificates.
struct Certificates {
    chain: Vec<CertificateDer<'static>>,
    of_clients: Arc<dyn ClientCertVerifier>,
    of_servers: Arc<WebPkiServerVerifier>,
    /// A certificate proves the host. That it belongs to the job is proven by what TLS exports with this for its context.
    membership: Seed,
}

impl Tls {
    /// All agents and hosts that know the secret show one key, and believe whoever has it.
    pub fn of_secret(secret: &Secret) -> Result<Self> {
        Self::of_one_key(&RawKey::new(&derive(secret, &[b"agents"])?)?)
    }

    /// The same for the launches of a program, with another key.
    pub fn of_launches(secret: &Secret) -> Result<Self> {
        Self::of_one_key(&RawKey::new(&derive(secret, &[b"launches"])?)?)
    }

    /// What listens with a key of its own, which is made from its secret, and believes a client that has the key that was made
    /// from the secret for its purpose and its name.
    pub fn of_issuer(secret: Secret) -> Result<Self> {
        let key = RawKey::new(&derive(&secret, &[b"issuer"])?)?;
        let believed = RawKeys::any(&provider());
        let server = server_of_key(&key, believed)?;
        Ok(Self { client: None, server: Some(server), proof: Proof::Issued(secret) })
    }

    /// What connects with a key that an issuer has made for it, and knows the issuer by its public key.
    pub fn of_issued(seed: &Seed, issuer: &[u8]) -> Result<Self> {
        let believed = RawKeys::one(issuer, &provider());
        let client = client_of_key(&RawKey::new(seed)?, believed)?;
        Ok(Self { client: Some(client), server: None, proof: Proof::Job })
    }

    fn of_one_key(key: &RawKey) -> Result<Self> {
        let believed = RawKeys::one(key.public(), &provider());
        let (client, server) = (client_of_key(key, Arc::clone(&believed))?, server_of_key(key, believed)?);
        Ok(Self { client: Some(client), server: Some(server), proof: Proof::Job })
    }

    /// Reads a certificate (with those between it and an authority after it), its key, and the authorities: PEM. They prove
    /// which host this is; the secret, that it belongs to the job.
    ///
    /// InvalidInput if they are none, do not belong together, or if others than its owner may read the key.
    pub fn from_files(certificate: &Path, key: &Path, authorities: &Path, secret: &Secret) -> Result<Self> {
        let read = |path: &Path| {
            fs::read(path).map_err(|error| Error::from_io(error, "read a file of certificates", path))
        };
        let mut key_text = Zeroizing::new(Vec::new());
        let mut file = open_private(key, "the key of a certificate")?;
        io::Read::read_to_end(&mut file, &mut key_text)
            .map_err(|error| Error::from_io(error, "read the key of a certificate", key))?;
        let chain = certificates(&read(certificate)?).map_err(|error| named(error, certificate))?;
        let roots = certificates(&read(authorities)?).map_err(|error| named(error, authorities))?;
        let read_key = PrivateKeyDer::from_pem_slice(&key_text);
        let read_key = read_key.map_err(|error| {
            named(invalid(format!("the file holds no key of a certificate in PEM: {error}")), key)
        })?;
        let membership = derive(secret, &[b"membership"])?;
        Self::of_certificates(chain, read_key, roots, membership).map_err(|error| named(error, certificate))
    }

    fn of_certificates(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        authorities: Vec<CertificateDer<'static>>,
        membership: Seed,
    ) -> Result<Self> {
        let provider = provider();
        let mut roots = RootCertStore::empty();
        for authority in authorities {
            roots.add(authority).map_err(|error| meaning(&error))?;
        }
        let (roots, unusable) = (Arc::new(roots), |error: rustls::server::VerifierBuilderError| {
            invalid(format!("the authorities cannot be used: {error}"))
        });
        let of_clients =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&roots), Arc::clone(&provider))
                .build()
                .map_err(unusable)?;
        let of_servers = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider))
            .build()
            .map_err(unusable)?;
        let shown = CertifiedKey::from_der(chain.clone(), key, &provider).map_err(|error| meaning(&error))?;
        let shown = Arc::new(SingleCertAndKey::from(shown));
        let client = client_config(&provider, Arc::clone(&of_servers) as _, Arc::clone(&shown) as _);
        let server = server_config(&provider, Arc::clone(&of_clients), shown);
        let (client, server) =
            (client.map_err(|error| meaning(&error))?, server.map_err(|error| meaning(&error))?);
        let proof = Proof::Certificates(Certificates { chain, of_clients, of_servers, membership });
        Ok(Self { client: Some(client), server: Some(server), proof })
    }

    /// How to connect to a host.
    pub(crate) fn as_client(&self, server: &Name) -> Result<(Arc<ClientConfig>, ServerName<'static>)> {
        // A key has no name in it, and none is sent.
        let name = match &self.proof {
            Proof::Certificates(_) => server_name(server)?,
            Proof::Job | Proof::Issued(_) => ServerName::from(std::net::Ipv4Addr::UNSPECIFIED),
        };
        let client = self.client.as_ref().ok_or_else(|| invalid("these credentials only listen"))?;
        Ok((Arc::clone(client), name))
    }

    /// How to listen.
    pub(crate) fn as_server(&self) -> Result<Arc<ServerConfig>> {
        self.server.clone().ok_or_else(|| invalid("these credentials only connect"))
    }

    /// What a side shows inside TLS to prove that it belongs to the job: zeros if its key has proven that already.
    pub(crate) fn membership(&self, tls: &Connection, side: Side) -> Result<[u8; 32]> {
        let Proof::Certificates(Certificates { membership, .. }) = &self.proof else { return Ok([0; 32]) };
        let label: &[u8] = match side {
            Side::Client => b"EXPORTER-waystation-peers-2-client",
            Side::Server => b"EXPORTER-waystation-peers-2-server",
        };
        let exported = tls.export_keying_material([0; 32], label, Some(&membership[..]));
        exported.map_err(|error| Error::new(Kind::Internal, format!("TLS gives no keys: {error}")))
    }

    /// InvalidInput if a client, which has proven the key or certificate that it shows, is not who it says it is.
    pub(crate) fn check_client(&self, tls: &Connection, hello: &Hello) -> Result<(), (Refusal, Error)> {
        let shown = || tls.peer_certificates().and_then(<[_]>::first).ok_or_else(no_certificate);
        match &self.proof {
            Proof::Job => Ok(()), // whoever has the key of the job is believed
            Proof::Issued(secret) => {
                is_issued(shown, secret, hello).map_err(|error| (Refusal::Secret, error))
            }
            Proof::Certificates(_) => is_named(shown, &hello.client)
                .map_err(|error| (Refusal::Name, error.with("host", hello.client.as_str()))),
        }
    }

    /// InvalidInput if an agent with the same authorities would not take this side for that host now.
    pub fn check(&self, host: &Name) -> Result<()> {
        let Proof::Certificates(Certificates { chain, of_clients, of_servers, .. }) = &self.proof else {
            return Ok(());
        };
        let Some((own, between)) = chain.split_first() else { return Err(no_certificate()) };
        let (name, now) = (server_name(host)?, UnixTime::now());
        let as_server = of_servers.verify_server_cert(own, between, &name, &[], now).map(drop);
        let as_both = as_server.and_then(|()| of_clients.verify_client_cert(own, between, now));
        as_both.map(drop).map_err(|error| {
            let error = meaning(&error);
            Error::new(error.kind(), format!("other agents would refuse this one: {}", error.message()))
                .with("host", host.as_str())
        })
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls(…)")
    }
}

/// InvalidInput if a client shows another key than the one that is made from the secret for its purpose and name.
fn is_issued<'a>(
    shown: impl FnOnce() -> Result<&'a CertificateDer<'a>>,
    secret: &Secret,
    hello: &Hello,
) -> Result<()> {
    let expected = RawKey::new(&issued(secret, hello.purpose, &hello.client)?)?;
    // Both are public, so the time that this takes tells nothing.
    if shown()?.as_ref() == expected.public() {
        return Ok(());
    }
    Err(invalid("a client does not have the key of the name that it says it has"))
}

/// InvalidInput if a client shows the certificate of another host.
fn is_named<'a>(shown: impl FnOnce() -> Result<&'a CertificateDer<'a>>, host: &Name) -> Result<()> {
    let parsed = ParsedCertificate::try_from(shown()?).map_err(|error| meaning(&error))?;
    verify_server_name(&parsed, &server_name(host)?).map_err(|error| meaning(&error))
}

/// Believes whoever has the private half of one key, or of the key that it shows.
#[derive(Debug)]
struct RawKeys {
    /// The public half; any if there is none here.
    public: Option<Vec<u8>>,
    algorithms: WebPkiSupportedAlgorithms,
}

impl RawKeys {
    fn one(public: &[u8], provider: &CryptoProvider) -> Arc<Self> {
        let algorithms = provider.signature_verification_algorithms;
        Arc::new(Self { public: Some(public.to_vec()), algorithms })
    }

    fn any(provider: &CryptoProvider) -> Arc<Self> {
        Arc::new(Self { public: None, algorithms: provider.signature_verification_algorithms })
    }

    fn check(&self, shown: &CertificateDer<'_>) -> Result<(), rustls::Error> {
        let is_it = self.public.as_deref().is_none_or(|public| shown.as_ref() == public);
        if is_it { Ok(()) } else { Err(CertificateError::ApplicationVerificationFailure.into()) }
    }

    fn check_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let key = SubjectPublicKeyInfoDer::from(shown.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

impl ServerCertVerifier for RawKeys {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        self.check(shown).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(older_tls())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_signature(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for RawKeys {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        shown: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.check(shown).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Err(older_tls())
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.check_signature(message, shown, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// No configuration here speaks anything older than TLS 1.3, so nobody is asked to verify it.
fn older_tls() -> rustls::Error {
    rustls::Error::General("only TLS 1.3 is spoken".to_owned())
}

/// As what a certificate names a host. InvalidInput if none can.
fn server_name(host: &Name) -> Result<ServerName<'static>> {
    ServerName::try_from(host.as_str().to_owned()).map_err(|_| {
        invalid("with TLS hosts are named as in certificates: by DNS names or IP addresses")
            .with("host", host.as_str())
    })
}

/// What an error of TLS is about.
pub(crate) fn meaning(error: &rustls::Error) -> Error {
    invalid(match error {
        rustls::Error::InvalidCertificate(why) => return of_certificate(why),
        rustls::Error::DecryptError | rustls::Error::AlertReceived(AlertDescription::BadRecordMac) => {
            return Error::new(Kind::Corrupt, "what was sent was changed on the way");
        }
        rustls::Error::InconsistentKeys(_) => "the key is not that of the certificate".to_owned(),
        rustls::Error::NoCertificatesPresented => "the other side shows no certificate".to_owned(),
        rustls::Error::InvalidMessage(_) => "the other side does not speak TLS".to_owned(),
        // Both speak the same TLS otherwise.
        rustls::Error::PeerIncompatible(_)
        | rustls::Error::AlertReceived(AlertDescription::HandshakeFailure) => {
            "one side shows a certificate and the other a key; give all agents certificates, or none"
                .to_owned()
        }
        rustls::Error::AlertReceived(AlertDescription::AccessDenied) => {
            "the other side refuses the key or the certificate of this one; give both the same secret, or \
             certificates of one authority"
                .to_owned()
        }
        rustls::Error::AlertReceived(alert) => {
            format!("the other side refuses the certificate of this one, its key, or its TLS: {alert:?}")
        }
        other => format!("TLS failed: {other}"),
    })
}

fn of_certificate(why: &CertificateError) -> Error {
    use CertificateError as Why;
    invalid(match why {
        Why::UnknownIssuer | Why::BadSignature => "the certificate is of none of the authorities".to_owned(),
        Why::Expired | Why::ExpiredContext { .. } => "the certificate has expired".to_owned(),
        Why::NotValidYet | Why::NotValidYetContext { .. } => "the certificate is not valid yet".to_owned(),
        Why::NotValidForName | Why::NotValidForNameContext { .. } => {
            "the certificate is of another host".to_owned()
        }
        Why::InvalidPurpose | Why::InvalidPurposeContext { .. } => {
            "the certificate is not for servers and clients both, as those of agents are".to_owned()
        }
        Why::ApplicationVerificationFailure => {
            "whoever is at the other end does not know the secret of this job".to_owned()
        }
        other => format!("the certificate is not valid: {other}"),
    })
}

/// AES with 128 bits is the fastest where processors have instructions for it, which is nearly everywhere.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

fn client_of_key(key: &RawKey, believed: Arc<RawKeys>) -> Result<Arc<ClientConfig>> {
    let shown = Arc::new(AlwaysResolvesClientRawPublicKeys::new(Arc::clone(&key.0)));
    client_config(&provider(), believed, shown).map_err(|error| meaning(&error))
}

fn server_of_key(key: &RawKey, believed: Arc<RawKeys>) -> Result<Arc<ServerConfig>> {
    let shown = Arc::new(AlwaysResolvesServerRawPublicKeys::new(Arc::clone(&key.0)));
    server_config(&provider(), believed, shown).map_err(|error| meaning(&error))
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    verifier: Arc<dyn ServerCertVerifier>,
    shown: Arc<dyn ResolvesClientCert>,
) -> Result<Arc<ClientConfig>, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .dangerous() // so they call every verifier that is not their own
        .with_custom_certificate_verifier(verifier)
        .with_client_cert_resolver(shown);
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    verifier: Arc<dyn ClientCertVerifier>,
    shown: Arc<dyn ResolvesServerCert>,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(shown);
    config.send_tls13_tickets = 0;
    Ok(Arc::new(config))
}

fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>> {
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(text).collect();
    let read = read.map_err(|error| invalid(format!("the file is not certificates in PEM: {error}")))?;
    if read.is_empty() { Err(no_certificate()) } else { Ok(read) }
}

fn no_certificate() -> Error {
    invalid("the file holds no certificate in PEM")
}

fn named(error: Error, path: &Path) -> Error {
    error.with("path", path.display().to_string())
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(Kind::InvalidInput, message)
}
