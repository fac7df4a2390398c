//! The client of one store in one process.

use std::collections::HashSet;
use std::error::Error as StdError;
use std::path::Path;
use std::str::FromStr;
use std::sync::{Arc, OnceLock};

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
use crate::connection::Connector;
use crate::errors::told;

/// In the place of the client's own bound of a request: `connection` has another one.
const UNBOUNDED: &str = "365days";

/// Whoever makes the requests, with their connections.
pub struct Client {
    /// Whole objects, ranges and listings.
    pub objects: Arc<dyn ObjectStore>,
    /// Whether the store creates an object on condition that there is none, once that is known.
    pub honours_conditions: OnceLock<bool>,
    /// Whether it removes an object on condition that it is a version, once that is known.
    pub honours_removals: OnceLock<bool>,
    uploads: Option<Arc<dyn MultipartStore>>,
    remover: OnceLock<Remover>,
}

/// How an object is removed on condition that it is a version of it.
#[derive(Clone)]
pub struct Remover {
    /// What sends a `DELETE` for each object.
    pub objects: Arc<dyn ObjectStore>,
    /// The header of the condition: the ETag, or the generation.
    pub header: &'static str,
    /// Whether that header has the generation.
    pub by_generation: bool,
}

impl Client {
    /// The client of everything beneath `root`.
    pub fn new(root: &str, settings: &Settings) -> Result<Self> {
        // What `reqwest` encrypts with. Another one that the process has is as good.
        drop(rustls::crypto::ring::default_provider().install_default());
        check_endpoint(root, settings)?;
        let given = given(root, settings);
        Self::built(root, settings, &given).map_err(|error| refused(root, settings, given, &error))
    }

    /// What removes objects on condition; `None` where the crate can make no request for that: Azure's removals are
    /// batches, whose parts are signed with all their headers.
    pub fn remover(&self, root: &str, settings: &Settings) -> Result<Option<&Remover>> {
        if let Some(known) = self.remover.get() {
            return Ok(Some(known));
        }
        let made = match root.split_once("://").map(|(scheme, _)| scheme) {
            Some("gs") => Remover {
                objects: Arc::clone(&self.objects),
                header: "x-goog-if-generation-match",
                by_generation: true,
            },
            Some("s3" | "s3a") => {
                // Removals of the other client are batches, which have one signature with all that is in them.
                let mut given = given(root, settings);
                given.push(Setting::of("aws_disable_bulk_delete", "true", None));
                let made = Self::built(root, settings, &given);
                let made = made.map_err(|error| told(&error, "use the store", Path::new(root)))?;
                Remover { objects: made.objects, header: "if-match", by_generation: false }
            }
            _ => return Ok(None),
        };
        Ok(Some(self.remover.get_or_init(|| made)))
    }

    fn built(root: &str, settings: &Settings, given: &[Setting]) -> object_store::Result<Self> {
        // The deadline alone ends the attempts: a store may be away for a while.
        let retry = RetryConfig {
            // The last attempt ends before the deadline, and says why it failed.
            retry_timeout: settings.deadline / 8 * 7,
            max_retries: usize::MAX,
            ..RetryConfig::default()
        };
        macro_rules! build {
            ($builder:expr) => {{
                let mut builder = $builder.with_url(root).with_retry(retry).with_http_connector(Connector);
                for setting in given {
                    if let Some(key) = setting.key()? {
                        builder = builder.with_config(key, &setting.value);
                    }
                }
                Arc::new(builder.build()?)
            }};
        }
        let (scheme, host) = root.split_once("://").unwrap_or((root, ""));
        match scheme_of(scheme) {
            "gs" => Ok(Self::of(build!(GoogleCloudStorageBuilder::new()))),
            "az" | "abfs" | "abfss" => {
                let mut builder = MicrosoftAzureBuilder::new();
                if let Ok(endpoint) = std::env::var(AZURE_IDENTITY) {
                    builder = builder.with_msi_endpoint(endpoint);
                }
                Ok(Self::of(build!(builder)))
            }
            scheme @ ("http" | "https") => {
                let mut options = ClientOptions::new().with_allow_http(scheme == "http");
                for setting in given {
                    if let Some(key) = setting.key::<ClientConfigKey>()? {
                        options = options.with_config(key, &setting.value);
                    }
                }
                let query = settings.query.as_ref().map_or_else(String::new, |query| format!("?{query}"));
                let url = format!("{scheme}://{host}/{query}");
                let builder = HttpBuilder::new().with_url(url).with_retry(retry);
                let builder = builder.with_client_options(options).with_http_connector(Connector);
                Ok(Self::made(Arc::new(builder.build()?), None))
            }
            _ => Ok(Self::of(build!(AmazonS3Builder::new()))),
        }
    }

    /// A store in memory.
    pub fn in_memory() -> Self {
        Self::of(Arc::new(InMemory::new()))
    }

    fn of<T: ObjectStore + MultipartStore>(store: Arc<T>) -> Self {
        let objects: Arc<dyn ObjectStore> = Arc::clone(&store) as _;
        Self::made(objects, Some(store))
    }

    fn made(objects: Arc<dyn ObjectStore>, uploads: Option<Arc<dyn MultipartStore>>) -> Self {
        let (honours_conditions, honours_removals) = (OnceLock::new(), OnceLock::new());
        Self { objects, honours_conditions, honours_removals, uploads, remover: OnceLock::new() }
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

// ---- settings ------------------------------------------------------------------------------------

/// Where Azure tells its machines who they are.
const AZURE_IDENTITY: &str = "IDENTITY_ENDPOINT";
/// Google's clients read this variable as well.
const GOOGLE_ACCOUNT: (&str, &str) = ("SERVICE_ACCOUNT", "google_service_account");

/// A setting, and where it comes from.
#[derive(Clone)]
struct Setting {
    name: String,
    value: String,
    /// The variable of the environment that has it.
    variable: Option<String>,
}

impl Setting {
    fn of(name: &str, value: &str, variable: Option<&str>) -> Self {
        Self { name: name.to_owned(), value: value.to_owned(), variable: variable.map(str::to_owned) }
    }

    /// The client's key; `None` for one that only other stores have, as options are often those of all stores that a
    /// program uses. Whatever else the environment has is not meant.
    fn key<K: FromStr<Err = object_store::Error>>(&self) -> object_store::Result<Option<K>> {
        let name = self.name.to_ascii_lowercase();
        let is_of_another = || {
            AmazonS3ConfigKey::from_str(&name).is_ok()
                || GoogleConfigKey::from_str(&name).is_ok()
                || AzureConfigKey::from_str(&name).is_ok()
        };
        match name.parse() {
            Ok(key) => Ok(Some(key)),
            Err(_) if self.variable.is_some() || is_of_another() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What the user knows it by.
    fn shown(&self) -> String {
        match &self.variable {
            Some(variable) => format!("the variable {variable} of the environment"),
            None => format!("the setting '{}'", self.name),
        }
    }
}

/// What the client of a store is told: what the environment says first, so that options go before it.
fn given(root: &str, settings: &Settings) -> Vec<Setting> {
    let prefix = match scheme_of(root.split("://").next().unwrap_or_default()) {
        "gs" => "GOOGLE_",
        "az" | "abfs" | "abfss" => "AZURE_",
        "http" | "https" => "",
        _ => "AWS_",
    };
    let mut given = vec![Setting::of("timeout", UNBOUNDED, None)];
    if prefix == "GOOGLE_"
        && let Ok(path) = std::env::var(GOOGLE_ACCOUNT.0)
    {
        given.push(Setting::of(GOOGLE_ACCOUNT.1, &path, Some(GOOGLE_ACCOUNT.0)));
    }
    if !prefix.is_empty() {
        let variables = std::env::vars_os();
        let variables =
            variables.filter_map(|(name, value)| Some((name.into_string().ok()?, value.into_string().ok()?)));
        let meant = variables.filter(|(name, _)| name.starts_with(prefix));
        given.extend(meant.map(|(name, value)| Setting::of(&name.to_ascii_lowercase(), &value, Some(&name))));
    }
    given.extend(settings.options.iter().map(|(name, value)| Setting::of(name, value, None)));
    given
}

/// What says where a store is, beside its root: without credentials, of which a query has a digest only.
pub fn place_of(root: &str, settings: &Settings) -> String {
    let is_meant = |name: &str| {
        ["endpoint", "base_url", "account_name", "emulator"].iter().any(|word| name.contains(word))
    };
    let mut places: Vec<String> = given(root, settings)
        .iter()
        .map(|setting| (setting.name.to_ascii_lowercase(), &setting.value))
        .filter(|(name, _)| is_meant(name))
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    places.sort_unstable();
    let query =
        settings.query.as_ref().map(|query| ring::digest::digest(&ring::digest::SHA256, query.as_bytes()));
    places.extend(query.map(|digest| format!("query={digest:?}")));
    places.join("\n")
}

/// What a client says about settings that lack one, and what to do then. Of its texts these have no values in them.
const LACKS: [(&str, &str); 5] = [
    (
        "Missing AccessKeyId",
        "the setting 'aws_access_key_id' is missing; set it beside 'aws_secret_access_key', or AWS_ACCESS_KEY_ID in \
         the environment",
    ),
    (
        "Missing SecretAccessKey",
        "the setting 'aws_secret_access_key' is missing; set it beside 'aws_access_key_id', or AWS_SECRET_ACCESS_KEY \
         in the environment",
    ),
    (
        "Account must be specified",
        "the setting 'azure_storage_account_name' is missing; set it, or AZURE_STORAGE_ACCOUNT_NAME in the environment",
    ),
    (
        "One of service account path or service account key",
        "of the settings 'google_service_account' and 'google_service_account_key' only one may be given",
    ),
    (
        "Missing component in SAS query pair",
        "the setting 'azure_storage_sas_key' is no signature; set it to a text such as sv=…&sig=…",
    ),
];

/// The error of settings that no client can be made of. It names the setting, and never its value.
fn refused(root: &str, settings: &Settings, given: Vec<Setting>, error: &object_store::Error) -> Error {
    let invalid = |message: String| Error::new(Kind::InvalidInput, message).with("path", root);
    if let object_store::Error::UnknownConfigurationKey { .. } = error {
        return told(error, "use the store", Path::new(root)).with_kind(Kind::InvalidInput);
    }
    let text = texts(error);
    if let Some((_, lack)) = LACKS.iter().find(|(said, _)| text.contains(said)) {
        return invalid((*lack).to_owned());
    }
    // The one without which the others will do. Clients parse values late, and name none.
    let mut tried = HashSet::new();
    for setting in &given {
        if !tried.insert(setting.name.as_str()) {
            continue;
        }
        let others: Vec<Setting> = given.iter().filter(|other| other.name != setting.name).cloned().collect();
        if Client::built(root, settings, &others).is_ok() {
            return invalid(format!("{} cannot be used: {}", setting.shown(), must_be(&setting.name, &text)));
        }
    }
    told(error, "use the store", Path::new(root)).with_kind(Kind::InvalidInput)
}

/// What the value of a setting has to be, as far as the client's text tells.
fn must_be(name: &str, text: &str) -> &'static str {
    let name = name.to_ascii_lowercase();
    if text.contains("as boolean") {
        "it must be 'true' or 'false'"
    } else if text.contains("as Duration") {
        "it must be a duration, such as '30s'"
    } else if text.contains("as usize") || text.contains("as u32") {
        "it must be a whole number"
    } else if name.ends_with("proxy_url") {
        "it must be a URL, such as http://host:3128"
    } else if name.contains("certificate") {
        "it must be the text of a certificate, as PEM"
    } else if name.contains("service_account") || name.contains("credentials") {
        "it must be the path of a key as JSON that this process can read, or for 'google_service_account_key' its text"
    } else if name.contains("azure") && name.contains("key") {
        "it must be the key of the account, as base64"
    } else {
        "the client of the store cannot make sense of its value"
    }
}

/// What an error and its sources say, for comparisons only: there may be values in it.
fn texts(error: &object_store::Error) -> String {
    let mut texts = error.to_string();
    let mut source = error.source();
    while let Some(found) = source {
        texts.push('\n');
        texts.push_str(&found.to_string());
        source = found.source();
    }
    texts
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
