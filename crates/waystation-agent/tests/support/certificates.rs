//! Authorities and certificates, made while a test runs.
#![allow(clippy::unwrap_used, dead_code)] // each test uses a part of it

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair};
use tempfile::TempDir;
use waystation_agent::Result;
use waystation_agent::peers::{Secret, Tls};

const SECRET: [u8; 32] = [0x5e; 32];

/// Who signs certificates.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

/// Files in PEM: a certificate, its key, and who is believed.
pub struct Files {
    pub directory: TempDir,
    pub certificate: PathBuf,
    pub key: PathBuf,
    pub authorities: PathBuf,
}

impl Authority {
    pub fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().unwrap();
        let certificate = params.self_signed(&key).unwrap().pem();
        Self { issuer: Issuer::new(params, key), certificate }
    }

    /// A certificate of a host that believes this authority.
    pub fn files(&self, host: &str) -> Files {
        self.files_with(host, |_| {})
    }

    /// The same, with something else about it.
    pub fn files_with(&self, host: &str, change: impl FnOnce(&mut CertificateParams)) -> Files {
        let mut params = CertificateParams::new([host.to_owned()]).unwrap();
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        change(&mut params);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        let files = Files {
            certificate: path("certificate.pem"),
            key: path("key.pem"),
            authorities: path("authorities.pem"),
            directory,
        };
        fs::write(&files.certificate, certificate.pem()).unwrap();
        write_private(&files.key, &key.serialize_pem());
        files.believe(self);
        files
    }

    pub fn tls(&self, host: &str) -> Arc<Tls> {
        self.files(host).tls()
    }
}

impl Files {
    /// From now on this authority is believed, and no other.
    pub fn believe(&self, authority: &Authority) {
        fs::write(&self.authorities, &authority.certificate).unwrap();
    }

    pub fn read(&self) -> Result<Tls> {
        self.read_with(&SECRET)
    }

    /// The same, for a job of another secret.
    pub fn read_with(&self, secret: &[u8]) -> Result<Tls> {
        Tls::from_files(&self.certificate, &self.key, &self.authorities, &Secret::new(secret).unwrap())
    }

    pub fn tls(&self) -> Arc<Tls> {
        Arc::new(self.read().unwrap())
    }

    /// What an agent is told of them.
    pub fn arguments(&self) -> [String; 3] {
        [("certificate", &self.certificate), ("key", &self.key), ("authorities", &self.authorities)]
            .map(|(name, path)| format!("--tls-{name}={}", path.display()))
    }
}

pub fn write_private(path: &Path, text: &str) {
    fs::write(path, text).unwrap();
    fs::set_permissions(path, Permissions::from_mode(0o600)).unwrap();
}
