//! The one error type of the Rust side.
//!
//! Invariants: a `Kind` says what the caller can do next, the message says what failed and why, the
//! context says where (path, array, offset, …). Python maps a kind to an exception class by its
//! name; a test there keeps both lists equal.

use std::borrow::Cow;
use std::fmt;
use std::path::Path;

/// Linux's code of links that lead to each other, which has no stable kind yet.
const LINK_LOOP: i32 = 40;

/// What the caller can do about an error. The names are stable and shared with Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The request itself is wrong: mend the call.
    InvalidInput,
    /// What was asked for is not there.
    NotFound,
    /// Something is already there, or changed meanwhile.
    Conflict,
    /// A resource is lacking for now (space, memory, a device): retry later.
    Unavailable,
    /// A newer writer has taken over: stop.
    Fenced,
    /// Stored bytes are not what was written: use another copy.
    Corrupt,
    /// Valid, but not something this build or system can do.
    Unsupported,
    /// The caller asked for it to stop.
    Cancelled,
    /// A defect of Waystation.
    Internal,
}

impl Kind {
    /// Every kind, in declaration order.
    pub const ALL: [Kind; 9] = [
        Kind::InvalidInput,
        Kind::NotFound,
        Kind::Conflict,
        Kind::Unavailable,
        Kind::Fenced,
        Kind::Corrupt,
        Kind::Unsupported,
        Kind::Cancelled,
        Kind::Internal,
    ];

    /// The stable name, as Python knows it.
    pub fn name(self) -> &'static str {
        match self {
            Kind::InvalidInput => "InvalidInput",
            Kind::NotFound => "NotFound",
            Kind::Conflict => "Conflict",
            Kind::Unavailable => "Unavailable",
            Kind::Fenced => "Fenced",
            Kind::Corrupt => "Corrupt",
            Kind::Unsupported => "Unsupported",
            Kind::Cancelled => "Cancelled",
            Kind::Internal => "Internal",
        }
    }
}

/// An error with its kind, a message for people, and where it happened.
#[derive(Debug)]
pub struct Error {
    kind: Kind,
    message: Cow<'static, str>,
    context: Vec<(&'static str, String)>,
    source: Option<std::io::Error>,
}

/// `Result` with the crate's error.
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error without context; add that with [`Error::with`].
    pub fn new(kind: Kind, message: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, message: message.into(), context: Vec::new(), source: None }
    }

    /// A failed system call on `path`; `action` completes "could not …". The kind follows from the
    /// operating system's code, which stays readable as the context `errno`.
    pub fn from_io(source: std::io::Error, action: &str, path: &Path) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match source.kind() {
            _ if source.raw_os_error() == Some(LINK_LOOP) => Kind::InvalidInput,
            Io::NotFound => Kind::NotFound,
            Io::AlreadyExists | Io::DirectoryNotEmpty => Kind::Conflict,
            Io::PermissionDenied
            | Io::ReadOnlyFilesystem
            | Io::NotADirectory
            | Io::IsADirectory
            | Io::InvalidFilename
            | Io::InvalidInput => Kind::InvalidInput,
            Io::Unsupported => Kind::Unsupported,
            _ => Kind::Unavailable,
        };
        let mut error =
            Self::new(kind, format!("could not {action}: {source}")).with("path", path.display().to_string());
        if let Some(code) = source.raw_os_error() {
            error = error.with("errno", code.to_string());
        }
        error.source = Some(source);
        error
    }

    /// Adds where it happened; the first value given for a key stays.
    pub fn with(mut self, key: &'static str, value: impl Into<String>) -> Self {
        if self.context(key).is_none() {
            self.context.push((key, value.into()));
        }
        self
    }

    /// The same error under another kind: what is corrupt when read is invalid input when written.
    pub fn with_kind(mut self, kind: Kind) -> Self {
        self.kind = kind;
        self
    }

    /// What the caller can do about it.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// What failed and why, without the context.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// All context pairs, in the order in which they were added.
    pub fn contexts(&self) -> &[(&'static str, String)] {
        &self.context
    }

    /// The value of one context key.
    pub fn context(&self, key: &str) -> Option<&str> {
        self.context.iter().find(|(k, _)| *k == key).map(|(_, v)| v.as_str())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        for (index, (key, value)) in self.context.iter().enumerate() {
            write!(f, "{}{key}: {value}", if index == 0 { " (" } else { ", " })?;
        }
        f.write_str(if self.context.is_empty() { "" } else { ")" })
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_ref().map(|source| source as _)
    }
}
