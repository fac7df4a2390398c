//! Where the socket of an agent is: a file in the directory of its store.
//!
//! A directory that is private (see the store's) makes the socket private. Paths of sockets are limited to some
//! hundred bytes, paths of directories are not; so a long one is entered through the open directory.

use std::fs::{self, File, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use waystation_format::{Error, Result};

/// The name of the socket in the directory of a store.
pub const SOCKET: &str = "agent.sock";
/// What a path of a socket may have, without the zero after it.
const PATH_LIMIT_BYTES: usize = 107;

/// Listens in a directory whose store the caller has locked: what an earlier agent left there is replaced.
pub fn listen(directory: &Path) -> Result<UnixListener> {
    let path = directory.join(SOCKET);
    let failed = |error| Error::from_io(error, "listen on the agent's socket", &path);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
        _ => {}
    }
    let listener = reach(directory, |path| UnixListener::bind(path)).map_err(failed)?;
    fs::set_permissions(&path, Permissions::from_mode(0o600)).map_err(failed)?;
    Ok(listener)
}

/// Connects to the agent of the store in a directory.
pub fn connect(directory: &Path) -> Result<UnixStream> {
    reach(directory, |path| UnixStream::connect(path))
        .map_err(|error| Error::from_io(error, "connect to the agent", &directory.join(SOCKET)))
}

fn reach<T>(directory: &Path, enter: impl Fn(&Path) -> io::Result<T>) -> io::Result<T> {
    let path = directory.join(SOCKET);
    if path.as_os_str().len() <= PATH_LIMIT_BYTES {
        return enter(&path);
    }
    let opened = File::open(directory)?;
    let path: PathBuf = ["/proc/self/fd", &opened.as_raw_fd().to_string(), SOCKET].iter().collect();
    enter(&path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_socket_is_private_replaces_an_old_one_and_may_lie_deep() {
        let parent = tempfile::tempdir().unwrap();
        for depth in [0, 20] {
            let directory = parent.path().join(vec!["directory"; depth].join("/"));
            fs::create_dir_all(&directory).unwrap();
            drop(listen(&directory).unwrap());
            assert!(connect(&directory).is_err(), "nobody listens");
            let listener = listen(&directory).unwrap();
            let _stream = connect(&directory).unwrap();
            listener.accept().unwrap();
            assert_eq!(fs::metadata(directory.join(SOCKET)).unwrap().mode() & 0o777, 0o600);
        }
    }
}
