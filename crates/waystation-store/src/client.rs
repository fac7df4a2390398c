//! The client of one store in one process.

use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::ClientConfigKey;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::http::HttpBuilder;
use object_store::memory::InMemory;
use object_store::multipart::MultipartStore;
use object_store::{ClientOptions, ObjectStore, RetryConfig};
use waystation_format::{Error, Kind, Result};

use crate::Settings;
use crate::errors::told;

/// A server of HTTP that sends nothing for so long is asked again.
const SILENCE: Duration = Duration::from_secs(30);

/// Whoever makes the requests, with their connections.
pub struct Client {
    /// Whole objects, ranges and listings.
    pub objects: Arc<dyn ObjectStore>,
    /// Whether the store creates an object on condition that there is none, once that is known.
    pub honours_conditions: OnceLock<bool>,
    uploads: Option<Arc<dyn MultipartStore>>,
}

impl Client {
    /// The client of everything beneath `root`.
    pub fn new(root: &str, settings: &Settings) -> Result<Self> {
        // What `reqwest` encrypts with. Another one that the process has is as good.
        drop(rustls::crypto::ring::default_provider().install_default());
        check_endpoint(root, settings)?;
        Self::built(root, settings).map_err(|error| {
            let error = told(&error, "use the store", Path::new(root));
            if error.kind() == Kind::InvalidInput { error } else { error.with_kind(Kind::InvalidInput) }
        })
    }

    fn built(root: &str, settings: &Settings) -> object_store::Result<Self> {
        // The deadline alone ends the attempts: a store may be away for a while.
        let retry = RetryConfig {
            retry_timeout: settings.deadline,
            max_retries: usize::MAX,
            ..RetryConfig::default()
        };
        macro_rules! build {
            ($builder:expr) => {{
                let mut builder = $builder.with_url(root).with_retry(retry);
                for (name, value) in &settings.options {
                    if let Some(key) = own_key(name)? {
                        builder = builder.with_config(key, value);
                    }
                }
                Arc::new(builder.build()?)
            }};
        }
        let (scheme, host) = root.split_once("://").unwrap_or((root, ""));
        let scheme = scheme_of(scheme);
        match scheme {
            "gs" => Ok(Self::of(build!(GoogleCloudStorageBuilder::from_env()))),
            "az" | "abfs" | "abfss" => Ok(Self::of(build!(MicrosoftAzureBuilder::from_env()))),
            "http" | "https" => {
                let mut options = ClientOptions::new()
                    .with_allow_http(scheme == "http")
                    .with_timeout_disabled() // an answer may come slowly, as long as it comes
                    .with_read_timeout(SILENCE);
                for (name, value) in &settings.options {
                    if let Some(key) = own_key::<ClientConfigKey>(name)? {
                        options = options.with_config(key, value);
                    }
                }
                let query = settings.query.as_ref().map_or_else(String::new, |query| format!("?{query}"));
                let url = format!("{scheme}://{host}/{query}");
                let builder = HttpBuilder::new().with_url(url).with_retry(retry).with_client_options(options);
                Ok(Self {
                    objects: Arc::new(builder.build()?),
                    uploads: None,
                    honours_conditions: OnceLock::new(),
                })
            }
            _ => Ok(Self::of(build!(AmazonS3Builder::from_env()))),
        }
    }

    /// A store in memory.
    pub fn in_memory() -> Self {
        Self::of(Arc::new(InMemory::new()))
    }

    fn of<T: ObjectStore + MultipartStore>(store: Arc<T>) -> Self {
        let objects: Arc<dyn ObjectStore> = Arc::clone(&store) as _;
        Self { objects, uploads: Some(store), honours_conditions: OnceLock::new() }
    }

    /// Uploads in parts. Unsupported where nothing can be written.
    pub fn uploads(&self, root: &str) -> Result<&dyn MultipartStore> {
        self.uploads.as_deref().ok_or_else(|| {
            let message =
                "what is behind HTTP can be read only; save to a file system, or to s3://, gs:// or az://";
            Error::new(Kind::Unsupported, message).with("path", root)
        })
    }
}

/// The option of a store by its name; `None` for one that only other stores have, as options are often those of all
/// stores that a program uses.
fn own_key<K: FromStr<Err = object_store::Error>>(name: &str) -> object_store::Result<Option<K>> {
    let name = name.to_ascii_lowercase();
    let is_of_another = || {
        AmazonS3ConfigKey::from_str(&name).is_ok()
            || GoogleConfigKey::from_str(&name).is_ok()
            || AzureConfigKey::from_str(&name).is_ok()
    };
    match name.parse() {
        Ok(key) => Ok(Some(key)),
        Err(_) if is_of_another() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The scheme without what tells its queries apart.
fn scheme_of(scheme: &str) -> &str {
    scheme.split('+').next().unwrap_or(scheme)
}

/// Whether a root is that of a server of HTTP.
pub fn is_http(root: &str) -> bool {
    root.split_once("://").is_some_and(|(scheme, _)| ["http", "https"].contains(&scheme_of(scheme)))
}

/// Refuses an endpoint of S3 that no request can be made for.
fn check_endpoint(root: &str, settings: &Settings) -> Result<()> {
    if !root.starts_with("s3") {
        return Ok(());
    }
    let given = |names: &[&str]| {
        let is_meant = |name: &str| names.iter().any(|known| name.eq_ignore_ascii_case(known));
        let option = settings.options.iter().find(|(name, _)| is_meant(name)).map(|(_, value)| value.clone());
        option.or_else(|| names.iter().find_map(|name| std::env::var(name.to_ascii_uppercase()).ok()))
    };
    let names = ["aws_endpoint", "aws_endpoint_url", "endpoint", "endpoint_url", "aws_endpoint_url_s3"];
    let Some(endpoint) = given(&names) else { return Ok(()) };
    let invalid = |message: &'static str| Err(Error::new(Kind::InvalidInput, message).with("path", root));
    let endpoint = endpoint.to_ascii_lowercase();
    if !endpoint.starts_with("http://") && !endpoint.starts_with("https://") {
        return invalid("the setting 'aws_endpoint' is no URL; give it with http:// or https://");
    }
    let may_be_plain = given(&["aws_allow_http", "allow_http"]);
    if endpoint.starts_with("http://") && !may_be_plain.is_some_and(|value| is_true(&value)) {
        return invalid(
            "the setting 'aws_endpoint' begins with http://, which is not encrypted; if that is meant, set \
             'aws_allow_http' to 'true'",
        );
    }
    Ok(())
}

/// As the crate reads settings.
fn is_true(value: &str) -> bool {
    ["1", "true", "on", "yes", "y"].iter().any(|known| value.eq_ignore_ascii_case(known))
}

/// The scheme and the bucket of a location.
pub fn root_of(location: &str) -> Result<String> {
    let invalid = |message: &'static str| Err(Error::new(Kind::InvalidInput, message).with("path", location));
    let Some((scheme, rest)) = location.split_once("://") else {
        return invalid("this is no location of an object store; give one like s3://bucket/name");
    };
    if !["s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https"].contains(&scheme_of(scheme)) {
        return invalid("no store has this scheme; use s3, gs, az, https, or a path of this system");
    }
    let bucket = rest.split('/').next().unwrap_or_default();
    if bucket.contains('@') && !scheme.starts_with("abfs") {
        // The location may hold a password, so it is not repeated.
        let message = "a location may not hold credentials; give them as options or in the environment";
        return Err(Error::new(Kind::InvalidInput, message));
    }
    if bucket.is_empty() {
        return invalid("the location names no bucket; give one like s3://bucket/name");
    }
    Ok(format!("{scheme}://{bucket}"))
}
