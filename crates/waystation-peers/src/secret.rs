//! The secret that the agents of a job share, from which they prove to each other who they are.
//!
//! Invariants: it is never sent, never part of a message or of a debug print, and wiped when it is let go;
//! what is too short to be a secret, or what others could have read, is refused.

use std::env;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use waystation_format::{Error, Kind, Result};
use zeroize::Zeroizing;

/// A secret has at least so many bytes.
pub const LEAST_BYTES: usize = 16;
/// A secret has at most so many bytes.
pub const MOST_BYTES: usize = 4096;

/// A secret of at least [`LEAST_BYTES`].
pub struct Secret(Zeroizing<Vec<u8>>);

impl Secret {
    /// The secret of these bytes, all of which count.
    pub fn new(bytes: impl Into<Vec<u8>>) -> Result<Self> {
        let bytes = Zeroizing::new(bytes.into());
        let message = if bytes.len() < LEAST_BYTES {
            format!("a secret has at least {LEAST_BYTES} bytes, this one has {}", bytes.len())
        } else if bytes.len() > MOST_BYTES {
            format!("a secret has at most {MOST_BYTES} bytes")
        } else {
            return Ok(Self(bytes));
        };
        Err(Error::new(Kind::InvalidInput, message))
    }

    /// The content of a file, without line ends after it.
    ///
    /// InvalidInput if others than its owner may use the file, or if that is another user (but root).
    pub fn from_file(path: &Path) -> Result<Self> {
        let mut file = open_private(path, "the secret")?;
        let mut bytes = Zeroizing::new(Vec::with_capacity(MOST_BYTES + 2));
        let limit = MOST_BYTES as u64 + 2;
        let read = file.by_ref().take(limit).read_to_end(&mut bytes);
        read.map_err(|error| Error::from_io(error, "read the secret", path))?;
        Self::new(trimmed(&bytes)).map_err(|error| error.with("path", path.display().to_string()))
    }

    /// The value of an environment variable.
    pub fn from_environment(name: &str) -> Result<Self> {
        use std::os::unix::ffi::OsStringExt;
        let value = env::var_os(name).ok_or_else(|| {
            Error::new(Kind::InvalidInput, format!("the environment variable {name} is to hold the secret"))
        })?;
        let value = Zeroizing::new(value.into_vec());
        Self::new(trimmed(&value)).map_err(|error| error.with("variable", name))
    }

    /// What keys are derived from.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Editors and `echo` end files with a line.
fn trimmed(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |last| last + 1);
    &bytes[..end]
}

/// Opens what only its owner may use. InvalidInput if that is not so.
pub(crate) fn open_private(path: &Path, what: &str) -> Result<File> {
    // Without NONBLOCK, a named pipe would be waited for.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| Error::from_io(error, &format!("open the file of {what}"), path))?;
    check_private(&file, path, what)?;
    Ok(file)
}

fn check_private(file: &File, path: &Path, what: &str) -> Result<()> {
    let metadata = file
        .metadata()
        .map_err(|error| Error::from_io(error, &format!("examine the file of {what}"), path))?;
    let refused = |why: &str| {
        Err(Error::new(Kind::InvalidInput, format!("'{}' cannot be {what}: it {why}", path.display()))
            .with("path", path.display().to_string()))
    };
    if !metadata.is_file() {
        return refused("is not a file");
    }
    if metadata.mode() & 0o077 != 0 {
        return refused("can be used by other users; make it private (chmod 600)");
    }
    if ![0, rustix::process::geteuid().as_raw()].contains(&metadata.uid()) {
        return refused("belongs to another user");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const SECRET: &[u8] = b"sixteen bytes ..";

    fn from_file(content: &[u8], mode: u32) -> Result<Secret> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("secret");
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        Secret::from_file(&path)
    }

    #[test]
    fn a_private_file_is_a_secret_without_its_line_end() {
        for ending in ["", "\n", "\r\n"] {
            let content = [SECRET, ending.as_bytes()].concat();
            assert_eq!(from_file(&content, 0o600).unwrap().bytes(), SECRET);
            assert_eq!(from_file(&content, 0o400).unwrap().bytes(), SECRET);
        }
        assert_eq!(from_file(&[7; MOST_BYTES], 0o600).unwrap().bytes(), [7; MOST_BYTES]);
    }

    #[test]
    fn what_is_no_secret_is_refused() {
        let refused = [
            from_file(SECRET, 0o640),
            from_file(SECRET, 0o604),
            from_file(&SECRET[1..], 0o600),
            from_file(b"fifteen bytes .\n\n\n", 0o600),
            from_file(&[7; MOST_BYTES + 1], 0o600),
            from_file(&[7; 3 * MOST_BYTES], 0o600),
            from_file(b"", 0o600),
            Secret::from_file(Path::new("/")),
            Secret::from_environment("WAYSTATION_TEST_NO_SUCH_SECRET"),
            Secret::new(*b"fifteen bytes ."),
        ];
        for refused in refused {
            assert_eq!(refused.unwrap_err().kind(), Kind::InvalidInput);
        }
        assert_eq!(Secret::from_file(Path::new("/no/such")).unwrap_err().kind(), Kind::NotFound);
    }

    #[test]
    fn it_is_not_printed() {
        let secret = Secret::new(SECRET).unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(…)");
        let error = from_file(b"too short", 0o600).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("too short"));
    }
}
