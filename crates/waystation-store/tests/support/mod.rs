//! A real server of S3's protocol on this machine, for as long as the test program runs.
#![allow(dead_code)] // each test program uses its part

use std::env;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use waystation_store::{ObjectStorage, Settings};

pub const ACCESS_KEY: &str = "waystationtests";
pub const SECRET_KEY: &str = "e5b1-not-to-be-seen";
const LONGEST_START: Duration = Duration::from_secs(60);
/// What is left of uploads, in the folder of a bucket.
const UPLOADS: &str = ".sgwtmp/multipart";
/// Runs the server until this program ends, however that is: then the pipe is closed.
const KEEPER: &str =
    r#"directory=$1; shift; "$@" >/dev/null 2>&1 & read -r _; kill $!; wait; rm -rf "$directory""#;

/// VersityGW. A bucket is a folder.
pub struct Gateway {
    directory: PathBuf,
    port: u16,
    keeper: Child,
    next_bucket: AtomicUsize,
}

impl Gateway {
    /// The server of this test program; `None` where its program is not installed.
    pub fn shared() -> Option<&'static Self> {
        static GATEWAY: OnceLock<Option<Gateway>> = OnceLock::new();
        GATEWAY.get_or_init(Self::start).as_ref()
    }

    fn start() -> Option<Self> {
        let folders = env::var_os("PATH").unwrap_or_default();
        let mut programs = env::split_paths(&folders).map(|folder| folder.join("versitygw"));
        let Some(program) = programs.find(|program| program.is_file()) else {
            eprintln!("not tried on a real server: there is no versitygw on the PATH");
            return None;
        };
        let directory = tempfile::tempdir().unwrap().keep();
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let keeper = Command::new("sh")
            .args(["-c", KEEPER, "keeper"])
            .arg(&directory)
            .arg(program)
            .args(["--quiet", "--port", &format!("127.0.0.1:{port}"), "posix"])
            .arg(&directory)
            .env("ROOT_ACCESS_KEY", ACCESS_KEY)
            .env("ROOT_SECRET_KEY", SECRET_KEY)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        let started = Instant::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            assert!(started.elapsed() < LONGEST_START, "versitygw does not answer");
            std::thread::sleep(Duration::from_millis(20));
        }
        Some(Self { directory, port, keeper, next_bucket: AtomicUsize::new(0) })
    }

    /// A new bucket.
    pub fn bucket(&self) -> Bucket {
        let name = format!("bucket-{}", self.next_bucket.fetch_add(1, Ordering::Relaxed));
        let folder = self.directory.join(&name);
        fs::create_dir(&folder).unwrap();
        let storage = ObjectStorage::new(&format!("s3://{name}"), self.settings()).unwrap();
        Bucket { name, folder, storage }
    }

    /// What reaches the server.
    pub fn settings(&self) -> Settings {
        let endpoint = format!("http://127.0.0.1:{}", self.port);
        let options = [
            ("aws_endpoint", endpoint.as_str()),
            ("aws_allow_http", "true"),
            ("aws_region", "us-east-1"),
            ("aws_access_key_id", ACCESS_KEY),
            ("aws_secret_access_key", SECRET_KEY),
        ];
        let options = options.map(|(name, value)| (name.to_owned(), value.to_owned())).to_vec();
        Settings { options, ..Settings::default() }
    }
}

/// A bucket of the server, and the storage of what is in it.
pub struct Bucket {
    pub name: String,
    folder: PathBuf,
    pub storage: ObjectStorage,
}

impl Bucket {
    pub fn path(&self, name: &str) -> PathBuf {
        Path::new(&format!("s3://{}", self.name)).join(name)
    }

    /// Uploads that were neither completed nor aborted.
    pub fn uploads(&self) -> Vec<PathBuf> {
        files_beneath(&self.folder.join(UPLOADS))
    }
}

fn files_beneath(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let entries = entries.map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { files_beneath(&path) } else { vec![path] }).collect()
}

/// Every object beneath a path, by name.
pub fn names_beneath(storage: &ObjectStorage, path: &Path) -> Vec<PathBuf> {
    let listing = storage.list(path).unwrap();
    let mut names: Vec<PathBuf> = listing.objects.iter().map(|(name, _)| path.join(name)).collect();
    names.extend(listing.directories.iter().flat_map(|name| names_beneath(storage, &path.join(name))));
    names.sort();
    names
}
