//! TLS beneath the handshake, where it is asked for: each side shows a certificate, and is the host that it names.
//!
//! It stands beside the challenge, not instead of it: what runs inside is what runs without. Failures: files that hold no
//! certificates or no key (nothing starts); a certificate that none of the authorities has signed, that has expired or is of
//! another host, and a side without TLS (there is no connection, and both sides are told why). Invariants: TLS 1.3 only;
//! whoever shows no valid certificate is sent nothing that is meant for hosts; nothing is resumed, so each connection is
//! verified anew.

use std::fmt;
use std::fs;
use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::client::danger::ServerCertVerifier;
use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_name};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream};
use waystation_format::{Error, Kind, Result};
use zeroize::Zeroizing;

use super::handshake::lost;
use super::hello::Name;
use super::secret::open_private;

const BINDING_LABEL: &[u8] = b"EXPORTER-waystation-peers-1";

/// A connection whose sides have shown valid certificates.
pub type Session = TlsStream<TcpStream>;

/// What this side shows to others, and whose certificates it believes.
#[derive(Clone)]
pub struct Tls {
    chain: Vec<CertificateDer<'static>>,
    of_clients: Arc<dyn ClientCertVerifier>,
    of_servers: Arc<WebPkiServerVerifier>,
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// Reads a certificate (with those between it and an authority after it), its key, and the authorities: PEM.
    ///
    /// InvalidInput if they are none, do not belong together, or if others than its owner may read the key.
    pub fn from_files(certificate: &Path, key: &Path, authorities: &Path) -> Result<Self> {
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
        Self::new(chain, read_key, roots).map_err(|error| named(error, certificate))
    }

    fn new(
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        authorities: Vec<CertificateDer<'static>>,
    ) -> Result<Self> {
        let provider = Arc::new(ring::default_provider());
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
        let client = client_config(&provider, &of_servers, chain.clone(), key.clone_key());
        let server = server_config(&provider, &of_clients, chain.clone(), key);
        let client = Arc::new(client.map_err(|error| meaning(&error))?);
        let server = Arc::new(server.map_err(|error| meaning(&error))?);
        Ok(Self { chain, of_clients, of_servers, client, server })
    }

    /// The client's side of a connection to a host.
    pub(crate) async fn connect(&self, stream: TcpStream, server: &Name) -> Result<Session> {
        let connecting = TlsConnector::from(Arc::clone(&self.client)).connect(server_name(server)?, stream);
        Ok(connecting.await.map_err(|error| lost(&error))?.into())
    }

    /// The server's side; gives the connection back where there is to be none.
    pub(crate) async fn accept(&self, stream: TcpStream) -> Result<Session, (io::Error, TcpStream)> {
        let accepting = TlsAcceptor::from(Arc::clone(&self.server)).accept(stream).into_fallible();
        accepting.await.map(Session::from)
    }

    /// InvalidInput if an agent with the same authorities would not take this side for that host now.
    pub fn check(&self, host: &Name) -> Result<()> {
        let Some((own, between)) = self.chain.split_first() else { return Err(no_certificate()) };
        let (name, now) = (server_name(host)?, UnixTime::now());
        let as_server = self.of_servers.verify_server_cert(own, between, &name, &[], now).map(drop);
        let as_both = as_server.and_then(|()| self.of_clients.verify_client_cert(own, between, now));
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

/// As what a certificate names a host. InvalidInput if none can.
fn server_name(host: &Name) -> Result<ServerName<'static>> {
    ServerName::try_from(host.as_str().to_owned()).map_err(|_| {
        invalid("with TLS hosts are named as in certificates: by DNS names or IP addresses")
            .with("host", host.as_str())
    })
}

/// What only the two ends of a connection have in common.
pub(crate) fn binding(session: &Session) -> Result<Vec<u8>> {
    let exported = match session {
        TlsStream::Client(session) => {
            session.get_ref().1.export_keying_material(vec![0; 32], BINDING_LABEL, None)
        }
        TlsStream::Server(session) => {
            session.get_ref().1.export_keying_material(vec![0; 32], BINDING_LABEL, None)
        }
    };
    exported.map_err(|error| Error::new(Kind::Internal, format!("TLS gives no keys: {error}")))
}

/// InvalidInput if the other side of a connection has shown the certificate of another host.
pub(crate) fn check_session(session: &Session, host: &Name) -> Result<()> {
    let shown = session.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let shown = shown.ok_or_else(|| Error::new(Kind::InvalidInput, "the other side shows no certificate"))?;
    check_name(shown, host)
}

/// InvalidInput if a certificate, which is valid, is not that of a host.
fn check_name(certificate: &CertificateDer<'_>, host: &Name) -> Result<()> {
    let parsed = ParsedCertificate::try_from(certificate).map_err(|error| meaning(&error))?;
    verify_server_name(&parsed, &server_name(host)?)
        .map_err(|error| meaning(&error).with("host", host.as_str()))
}

/// What an error of a connection is about, if that is TLS.
pub(crate) fn error_of(error: &io::Error) -> Option<Error> {
    error.get_ref()?.downcast_ref::<rustls::Error>().map(meaning)
}

fn meaning(error: &rustls::Error) -> Error {
    invalid(match error {
        rustls::Error::InvalidCertificate(why) => return of_certificate(why),
        rustls::Error::InconsistentKeys(_) => "the key is not that of the certificate".to_owned(),
        rustls::Error::NoCertificatesPresented => "the other side shows no certificate".to_owned(),
        rustls::Error::InvalidMessage(_) => "the other side does not speak TLS".to_owned(),
        rustls::Error::AlertReceived(alert) => {
            format!("the other side refuses the certificate of this one, or its TLS: {alert:?}")
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
        other => format!("the certificate is not valid: {other}"),
    })
}

fn client_config(
    provider: &Arc<CryptoProvider>,
    verifier: &Arc<WebPkiServerVerifier>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ClientConfig, rustls::Error> {
    let mut config = ClientConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_webpki_verifier(Arc::clone(verifier))
        .with_client_auth_cert(chain, key)?;
    config.resumption = Resumption::disabled();
    Ok(config)
}

fn server_config(
    provider: &Arc<CryptoProvider>,
    verifier: &Arc<dyn ClientCertVerifier>,
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<ServerConfig, rustls::Error> {
    let mut config = ServerConfig::builder_with_provider(Arc::clone(provider))
        .with_protocol_versions(&[&TLS13])?
        .with_client_cert_verifier(Arc::clone(verifier))
        .with_single_cert(chain, key)?;
    config.send_tls13_tickets = 0;
    Ok(config)
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
