//! Errors of stores, told without anything that a store or a client says about credentials.
//!
//! A message of a store may repeat a request with its signature and the id of a key, and an address may hold a token.
//! So messages are made here, from the kind of an error, the status of the answer, and the code that the store gives.

use std::error::Error as StdError;
use std::path::Path;
use std::time::Duration;

use object_store::client::{HttpError, HttpErrorKind};
use rustix::io::Errno;
use waystation_format::{Error, Kind};

use crate::client::is_http;
use crate::connection::{Full, NoCredentials, Unreached, Untrusted};

/// Codes of stores are words; whatever else is between the tags is not repeated.
const MOST_CODE_BYTES: usize = 64;
/// How a refused request is told from one that failed, by the codes of stores that answer it with another status than
/// 403: 400, or 404 as VersityGW does of a key that it does not know.
const REFUSALS: [&str; 6] = [
    "AccessDenied",
    "ExpiredToken",
    "InvalidToken",
    "TokenRefreshRequired",
    "AuthenticationFailed",
    "XAdminUserNotFound",
];

/// The code of a request that was signed at another time than now.
const CLOCK_IS_WRONG: &str = "RequestTimeTooSkewed";

/// Codes of stores that say that the request was signed for another region.
const OTHER_REGION: [&str; 4] = [
    "AuthorizationHeaderMalformed",
    "PermanentRedirect",
    "TemporaryRedirect",
    "IllegalLocationConstraintException",
];
/// What the crate says of an answer that leads elsewhere without saying where to: S3 does so for another region.
const LEADS_NOWHERE: &str = "Received redirect without LOCATION";

/// Codes of stores that refuse what is written for want of room, with a status that says something else: of Ceph and
/// VersityGW, and of MinIO.
const NO_ROOM: [&str; 2] = ["QuotaExceeded", "XMinioAdminBucketQuotaExceeded"];

/// The code of S3 for a name that no bucket can have.
const BUCKET_NAME: &str = "InvalidBucketName";

/// Codes of stores that say that there is no bucket, and not only no object.
const NO_BUCKET: [&str; 2] = ["NoSuchBucket", "ContainerNotFound"];

/// The error of a request that failed; `action` completes "could not …".
pub fn told(error: &object_store::Error, action: &str, path: &Path) -> Error {
    use object_store::Error as Store;
    let answer = Answer::of(error);
    if answer.has_code_of(&NO_BUCKET) {
        return no_bucket(action, path);
    }
    if answer.lacks_credentials {
        return no_credentials(action, path);
    }
    if answer.is_untrusted {
        return untrusted(action, path);
    }
    if answer.is_of_another_region() {
        return other_region(action, path);
    }
    if answer.has_code_of(&[BUCKET_NAME]) {
        return no_bucket_name(action, path);
    }
    if answer.is_full || answer.has_code_of(&NO_ROOM) {
        return full(&answer, action, path);
    }
    if answer.has_code_of(&REFUSALS) {
        return refused(&answer, action, path);
    }
    let (kind, reason) = match error {
        Store::NotFound { .. } => (Kind::NotFound, "it is not there".to_owned()),
        Store::AlreadyExists { .. } => (Kind::Conflict, "there is one already".to_owned()),
        Store::Precondition { .. } | Store::NotModified { .. } => {
            (Kind::Conflict, "it is not the version that was read any more".to_owned())
        }
        Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => {
            return refused(&answer, action, path);
        }
        Store::NotSupported { .. } if is_http(&path.to_string_lossy()) => {
            let reason = "the server sent no part of a file: it ignores ranges, or has sent a page; give the URL \
                          of the file itself, or download it";
            (Kind::Unsupported, reason.to_owned())
        }
        Store::NotSupported { .. } | Store::NotImplemented { .. } => {
            (Kind::Unsupported, "this store cannot do that".to_owned())
        }
        // Names that are asked for have been looked at before, so a listing has it.
        Store::InvalidPath { source } => {
            let name = source.to_string().escape_debug().to_string();
            let message = format!(
                "an object there has a name that cannot be used ({name}); remove or rename it, or use a place \
                 without such objects"
            );
            (Kind::InvalidInput, message)
        }
        Store::UnknownConfigurationKey { key, .. } => {
            (Kind::InvalidInput, format!("the store has no option '{key}'"))
        }
        _ if answer.is_refusal() => return refused(&answer, action, path),
        _ => (answer.kind(), answer.reason(error)),
    };
    Error::new(kind, format!("could not {action}: {reason}")).with("path", path.display().to_string())
}

/// Whether an answer says that a request was wrong, but not why, as it has no body.
pub fn is_silent(error: &object_store::Error) -> bool {
    Answer::of(error).is_silent()
}

/// Whether a request asked for a range that begins where an object has ended.
pub fn is_beyond_the_end(error: &object_store::Error) -> bool {
    Answer::of(error).status == Some(416)
}

/// The error of requests that have not ended in time.
pub fn late(deadline: Duration, action: &str, path: &Path) -> Error {
    let message = format!(
        "could not {action}: the store did not answer within {} s; try again, or give it longer by \
         Context.storage.deadline_s (of a command, --storage deadline_s=…)",
        deadline.as_secs_f64()
    );
    Error::new(Kind::Unavailable, message).with("path", path.display().to_string())
}

/// The error of an object that is not there.
pub fn not_found(path: &Path) -> Error {
    let message = "there is no such object";
    Error::new(Kind::NotFound, message).with("path", path.display().to_string())
}

fn bucket_of(path: &Path) -> String {
    let bucket: String = path.to_string_lossy().split_inclusive('/').take(3).collect();
    bucket.trim_end_matches('/').to_owned()
}

fn no_bucket_name(action: &str, path: &Path) -> Error {
    let bucket = bucket_of(path);
    let message = format!(
        "could not {action}: the store says that no bucket can have the name of '{bucket}'; check that. Names have 3 to \
         63 lower-case letters, digits, dots and hyphens"
    );
    Error::new(Kind::InvalidInput, message).with("path", path.display().to_string())
}

fn no_bucket(action: &str, path: &Path) -> Error {
    let shown = path.display().to_string();
    let bucket = bucket_of(path);
    let message = format!(
        "could not {action}: there is no bucket '{bucket}'; create it, or check its name, the endpoint and the region"
    );
    Error::new(Kind::NotFound, message).with("path", shown).with("bucket", bucket)
}

/// Nobody has said who asks.
fn no_credentials(action: &str, path: &Path) -> Error {
    let shown = path.to_string_lossy();
    let (settings, variables) = match shown.split("://").next().unwrap_or_default() {
        "gs" => ("'google_service_account'", "GOOGLE_SERVICE_ACCOUNT"),
        "az" | "abfs" | "abfss" => ("'azure_storage_account_key'", "AZURE_STORAGE_ACCOUNT_KEY"),
        _ => {
            ("'aws_access_key_id' and 'aws_secret_access_key'", "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
        }
    };
    denied(
        format!(
            "could not {action}: no credentials are given, and this machine has no service that gives some; set \
         {settings}, or {variables} in the environment; for what is public set 'skip_signature' to 'true'"
        ),
        path,
    )
}

fn untrusted(action: &str, path: &Path) -> Error {
    let message = format!(
        "could not {action}: the certificate of the server is not trusted; add that of its authority to those of the \
         system, or name a file that has it in SSL_CERT_FILE before this process begins"
    );
    Error::new(Kind::InvalidInput, message).with("path", path.display().to_string())
}

fn other_region(action: &str, path: &Path) -> Error {
    let message = format!(
        "could not {action}: the bucket is in another region; set 'aws_region' to that of the bucket, or AWS_REGION in \
         the environment (where neither is set, us-east-1 is assumed)"
    );
    Error::new(Kind::InvalidInput, message).with("path", path.display().to_string())
}

/// Python knows by the number that there is no room.
fn full(answer: &Answer, action: &str, path: &Path) -> Error {
    let code = answer.shown_code();
    let message = format!(
        "could not {action}: there is no room left in the store{code}; remove what is not needed there, or give it more"
    );
    Error::new(Kind::Unavailable, message)
        .with("path", path.display().to_string())
        .with("errno", Errno::NOSPC.raw_os_error().to_string())
}

/// Python knows by the number that the caller may not do this.
fn refused(answer: &Answer, action: &str, path: &Path) -> Error {
    let code = answer.shown_code();
    let advice = if answer.code.as_deref() == Some(CLOCK_IS_WRONG) {
        "the clock of this machine differs from that of the store by too much; set it right"
    } else {
        "check the credentials, what they allow, the region, and the clock of this machine"
    };
    denied(format!("could not {action}: the store refuses it{code}; {advice}"), path)
}

fn denied(message: String, path: &Path) -> Error {
    Error::new(Kind::InvalidInput, message)
        .with("path", path.display().to_string())
        .with("errno", Errno::ACCESS.raw_os_error().to_string())
}

/// What is known about an answer, or why there is none.
#[derive(Debug, Default)]
struct Answer {
    status: Option<u16>,
    code: Option<String>,
    failure: Option<HttpErrorKind>,
    lacks_credentials: bool,
    is_untrusted: bool,
    is_full: bool,
    leads_nowhere: bool,
    unreached: Option<Unreached>,
}

impl Answer {
    /// The crate has a type for this, which it does not publish. What that prints begins with the status.
    fn of(error: &object_store::Error) -> Self {
        let mut answer = Self::default();
        let mut source = error.source();
        while let Some(found) = source {
            if let Some(http) = found.downcast_ref::<HttpError>() {
                answer.failure = Some(http.kind());
            }
            answer.lacks_credentials |= found.is::<NoCredentials>();
            answer.is_untrusted |= found.is::<Untrusted>();
            answer.is_full |= found.is::<Full>();
            answer.unreached = answer.unreached.or_else(|| found.downcast_ref::<Unreached>().cloned());
            let text = found.to_string();
            answer.leads_nowhere |= text.starts_with(LEADS_NOWHERE);
            answer.status =
                answer.status.or_else(|| text.split_once("status code: ")?.1.get(..3)?.parse().ok());
            answer.code = answer.code.or_else(|| code_in(&text).map(str::to_owned));
            source = found.source();
        }
        answer
    }

    fn has_code_of(&self, codes: &[&str]) -> bool {
        self.code.as_deref().is_some_and(|code| codes.contains(&code))
    }

    fn shown_code(&self) -> String {
        self.code.as_deref().map_or_else(String::new, |code| format!(" ({code})"))
    }

    fn is_refusal(&self) -> bool {
        matches!(self.status, Some(401 | 403)) || self.has_code_of(&REFUSALS)
    }

    fn is_of_another_region(&self) -> bool {
        self.leads_nowhere || self.has_code_of(&OTHER_REGION)
    }

    /// Whether the store has answered that something is wrong with the request, and has not said what.
    fn is_silent(&self) -> bool {
        matches!(self.status, Some(400 | 401 | 403)) && self.code.is_none()
    }

    fn kind(&self) -> Kind {
        match self.status {
            Some(status @ 400..500) if !matches!(status, 408 | 429) => Kind::InvalidInput,
            _ => Kind::Unavailable,
        }
    }

    fn reason(&self, error: &object_store::Error) -> String {
        if let Some(unreached) = &self.unreached {
            return format!("{unreached}; check the endpoint, or start the server");
        }
        let code = self.shown_code();
        match (self.status, self.failure) {
            (Some(status), _) => format!("the store answered with status {status}{code}"),
            (None, Some(HttpErrorKind::Connect)) => "the store cannot be reached".to_owned(),
            (None, Some(HttpErrorKind::Timeout)) => "the store did not answer in time".to_owned(),
            (None, Some(_)) => "the connection to the store was lost".to_owned(),
            (None, None) => match error {
                object_store::Error::Generic { store, .. } => {
                    format!("the client of {store} cannot make sense of its settings, or of the answer")
                }
                _ => "the store's answer makes no sense".to_owned(),
            },
        }
    }
}

/// The code that a store gives in the XML of its answer, or for one of several objects that are to be deleted.
fn code_in(text: &str) -> Option<&str> {
    let in_xml = || text.split_once("<Code>")?.1.split_once("</Code>");
    let of_deletion = || text.rsplit_once("(code: ")?.1.split_once(')');
    let (code, _) = in_xml().or_else(of_deletion)?;
    let is_word = code.len() <= MOST_CODE_BYTES && code.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_word.then_some(code)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_of_an_answer_is_found() {
        assert_eq!(code_in("400: <Error><Code>NoSuchBucket</Code></Error>"), Some("NoSuchBucket"));
        let of_deletion = "DeleteObjects request failed for key a (code: b): no (code: AccessDenied)";
        assert_eq!(code_in(of_deletion), Some("AccessDenied"));
        assert_eq!(code_in("(code: not a word)"), None);
        assert_eq!(code_in("nothing"), None);
    }
}
