//! What object stores do beside what every storage does: small objects with conditions, uploads in parts, typed errors
//! without credentials. In memory, and on a real server where that is installed.
#![allow(clippy::panic, clippy::unwrap_used)]

mod support;

use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use support::{ACCESS_KEY, Gateway, SECRET_KEY, names_beneath};
use waystation_format::checksum::{BLOCK_BYTES, crc64};
use waystation_io::read::plan::{Plan, ReadFile};
use waystation_io::storage::Storage;
use waystation_io::write::{self, FileInput, Options};
use waystation_io::{Error, Kind, Result, read};
use waystation_store::{Condition, Found, ObjectStorage, Settings};

/// Stores to try, and a directory in each.
fn stores() -> Vec<(ObjectStorage, PathBuf)> {
    let mut stores = vec![(ObjectStorage::in_memory("bucket"), PathBuf::from("memory://bucket/run"))];
    stores.extend(Gateway::shared().map(|gateway| {
        let bucket = gateway.bucket();
        let path = bucket.path("run");
        (bucket.storage, path)
    }));
    stores
}

fn write(
    storage: &ObjectStorage,
    contents: &[(PathBuf, Vec<u8>)],
    options: Options,
) -> Result<write::Statistics> {
    let file = |(path, content): &(PathBuf, Vec<u8>)| FileInput {
        path: path.clone(),
        header: Vec::new(),
        file_bytes: content.len() as u64,
        words: vec![0, content.len() as i64, 0, 1, -1, content.as_ptr() as i64],
    };
    let files = contents.iter().filter(|(_, content)| !content.is_empty()).map(file).collect();
    // SAFETY: the contents outlive the job, which is joined here.
    let job = unsafe { write::start(Arc::new(storage.clone()), files, options) }?;
    job.join();
    job.shared().take_outcome().unwrap()
}

fn read(storage: &ObjectStorage, path: &Path, content: &[u8]) -> Result<Vec<u8>> {
    read_version(storage, path, content, None)
}

fn read_version(
    storage: &ObjectStorage,
    path: &Path,
    content: &[u8],
    version: Option<String>,
) -> Result<Vec<u8>> {
    let mut memory = vec![0; content.len()];
    let checksums = Some(content.chunks(BLOCK_BYTES).map(crc64).collect());
    let file_bytes = content.len() as u64;
    let file = ReadFile { path: path.to_owned(), file_bytes, checksums, version };
    let plan = Plan::new(vec![file], &[0, 0, content.len() as i64, 0, memory.as_mut_ptr() as i64])?;
    // SAFETY: the memory outlives the job, which is joined here.
    let job = unsafe { read::start(Arc::new(storage.clone()), plan, read::Options::default()) }?;
    job.join();
    job.shared().take_outcome().unwrap().map(|_| memory)
}

fn noise(nbytes: usize, seed: usize) -> Vec<u8> {
    let word = |index: usize| (index ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    (0..nbytes.div_ceil(8)).flat_map(|index| word(index).to_le_bytes()).take(nbytes).collect()
}

#[test]
fn objects_of_many_parts_come_back() {
    for (storage, directory) in stores() {
        let contents =
            [(directory.join("large"), noise((41 << 20) + 7, 1)), (directory.join("small"), noise(99, 2))];
        for options in [
            Options { block_bytes: Some(5 << 20), depth: Some(3), threads: Some(2), ..Options::AUTOMATIC },
            Options { staging_bytes: Some(1 << 20), ..Options::AUTOMATIC },
        ] {
            write(&storage, &contents, options).unwrap();
            for (path, content) in &contents {
                assert!(read(&storage, path, content).unwrap() == *content);
            }
            assert_eq!(
                names_beneath(&storage, &directory),
                contents.each_ref().map(|(path, _)| path.clone())
            );
            storage.remove_all(&directory).unwrap();
        }
        assert!(names_beneath(&storage, &directory).is_empty());
    }
}

#[test]
fn no_upload_is_left_when_another_name_is_taken() {
    let Some(gateway) = Gateway::shared() else { return };
    let bucket = gateway.bucket();
    let contents = [(bucket.path("large"), noise(20 << 20, 1)), (bucket.path("taken"), noise(99, 2))];
    bucket.storage.put(&contents[1].0, b"somebody else's", &Condition::New).unwrap();
    let error = write(&bucket.storage, &contents, Options::AUTOMATIC).unwrap_err();
    assert_eq!((error.kind(), error.context("path")), (Kind::Conflict, contents[1].0.to_str()));
    assert_eq!(names_beneath(&bucket.storage, &bucket.path("")), [contents[1].0.clone()]);
    assert!(bucket.uploads().is_empty());
    write(&bucket.storage, &contents[..1], Options::AUTOMATIC).unwrap();
    assert!(bucket.uploads().is_empty());
}

#[test]
fn the_beginning_of_an_object_comes_with_its_version() {
    for (storage, directory) in stores() {
        let path = directory.join("object");
        let version = storage.put(&path, b"content", &Condition::New).unwrap();
        for (nbytes, expected) in [(3, &b"con"[..]), (7, b"content"), (1000, b"content")] {
            let (content, found) = storage.beginning(&path, nbytes).unwrap();
            assert_eq!((&content[..], found.tag, found.nbytes), (expected, version.tag.clone(), 7));
        }
        let error = storage.beginning(&directory.join("another"), 3).unwrap_err();
        assert_eq!(error.kind(), Kind::NotFound);
    }
    let Some(gateway) = Gateway::shared() else { return };
    let bucket = gateway.bucket();
    bucket.storage.put(&bucket.path("empty"), b"", &Condition::New).unwrap();
    let (content, found) = bucket.storage.beginning(&bucket.path("empty"), 3).unwrap();
    assert_eq!((content.len(), found.nbytes), (0, 0));
}

#[test]
fn only_the_version_that_was_seen_is_read() {
    for (storage, directory) in stores() {
        let path = directory.join("object");
        let (old, new) = (noise(1000, 1), noise(1000, 2));
        let version = storage.put(&path, &old, &Condition::New).unwrap();
        assert!(read_version(&storage, &path, &old, version.tag.clone()).unwrap() == old);
        storage.put(&path, &new, &Condition::Any).unwrap();
        let error = read_version(&storage, &path, &old, version.tag).unwrap_err();
        assert_eq!((error.kind(), error.context("path")), (Kind::Conflict, path.to_str()));
    }
}

/// Behind HTTP there is nothing to list or to change; what is not asked needs no server.
#[test]
fn behind_http_everything_but_reading_is_refused() {
    for root in ["http://127.0.0.1:1", "https+query-1a2b://127.0.0.1:1"] {
        let storage = ObjectStorage::new(root, Settings::default()).unwrap();
        let path = PathBuf::from(format!("{root}/object"));
        let refused = [
            storage.list(&path).map(drop),
            storage.put(&path, b"", &Condition::New).map(drop),
            storage.put_all(&[(path.clone(), b"")]),
            storage.copy(&path, &path),
            storage.remove(&path),
            storage.remove_all(&path).map(drop),
        ];
        for outcome in refused {
            assert_eq!(outcome.unwrap_err().kind(), Kind::Unsupported);
        }
    }
}

#[test]
fn a_commit_is_made_once_and_replaced_by_version() {
    for (storage, directory) in stores() {
        let path = directory.join("checkpoint.json");
        assert_eq!(storage.head(&path).unwrap(), None);
        let first = storage.put(&path, b"first", &Condition::New).unwrap();
        let error = storage.put(&path, b"other", &Condition::New).unwrap_err();
        assert_eq!((error.kind(), error.context("path")), (Kind::Conflict, path.to_str()));
        let second = storage.put(&path, b"second", &Condition::Unchanged(first.clone())).unwrap();
        let error = storage.put(&path, b"third", &Condition::Unchanged(first)).unwrap_err();
        assert_eq!(error.kind(), Kind::Conflict);
        let (content, version) = storage.get(&path, 100).unwrap();
        assert_eq!((content.as_slice(), &version.tag, version.nbytes), (&b"second"[..], &second.tag, 6));
        assert_eq!(storage.status(&path).unwrap(), Some(Found::Object(version.clone())));
        assert_eq!(storage.status(&directory).unwrap(), Some(Found::Directory));
        assert_eq!(storage.status(&directory.join("check")).unwrap(), None);
        assert_eq!(storage.head(&path).unwrap(), Some(version));
        assert_eq!(storage.get(&path, 5).unwrap_err().kind(), Kind::Corrupt);
        storage.remove(&path).unwrap();
        storage.remove(&path).unwrap();
        assert_eq!(storage.get(&path, 5).unwrap_err().kind(), Kind::NotFound);
        let error = storage.put(&path, b"fourth", &Condition::Unchanged(second)).unwrap_err();
        assert_eq!(error.kind(), Kind::Conflict);
    }
}

/// The answer to a request may be lost, and the request be sent again.
#[test]
fn a_commit_that_is_repeated_finds_itself() {
    for (storage, directory) in stores() {
        let path = directory.join("checkpoint.json");
        let first = storage.put(&path, b"with a nonce", &Condition::New).unwrap();
        let again = storage.put(&path, b"with a nonce", &Condition::New).unwrap();
        assert_eq!(again.tag, first.tag);
        storage.put(&path, b"with another", &Condition::Unchanged(first.clone())).unwrap();
        storage.put(&path, b"with another", &Condition::Unchanged(first)).unwrap();
    }
}

#[test]
fn of_many_commits_at_once_one_is_made() {
    for (storage, directory) in stores() {
        for turn in 0..10 {
            let path = directory.join(format!("{turn}.json"));
            let commit =
                |writer: usize| storage.put(&path, format!("by {writer}").as_bytes(), &Condition::New);
            let outcomes: Vec<_> = std::thread::scope(|scope| {
                let writers: Vec<_> = (0..4).map(|writer| scope.spawn(move || commit(writer))).collect();
                writers.into_iter().map(|writer| writer.join().unwrap()).collect()
            });
            let winner = outcomes.iter().position(Result::is_ok).unwrap();
            assert_eq!(outcomes.iter().filter(|outcome| outcome.is_ok()).count(), 1);
            assert_eq!(storage.get(&path, 100).unwrap().0, format!("by {winner}").into_bytes());
        }
    }
}

#[test]
fn a_listing_has_objects_and_directories_by_name() {
    for (storage, directory) in stores() {
        for name in ["b", "a", "1/deep/x", "1/y", "2/z"] {
            storage.put(&directory.join(name), name.as_bytes(), &Condition::Any).unwrap();
        }
        let listing = storage.list(&directory).unwrap();
        let objects: Vec<_> =
            listing.objects.iter().map(|(name, version)| (name.as_str(), version.nbytes)).collect();
        assert_eq!(
            (objects, listing.directories),
            (vec![("a", 1), ("b", 1)], vec!["1".to_owned(), "2".to_owned()])
        );
        assert_eq!(storage.remove_all(&directory.join("1")).unwrap(), 2);
        assert_eq!(storage.remove_all(&directory.join("1")).unwrap(), 0);
        assert_eq!(storage.list(&directory).unwrap().directories, ["2"]);
        assert!(storage.list(&directory.join("1")).unwrap().objects.is_empty());
    }
}

#[test]
fn several_objects_are_put_and_read_at_once() {
    for (storage, directory) in stores() {
        let paths: Vec<_> = (0..70).map(|number| directory.join(number.to_string())).collect();
        let contents: Vec<_> =
            paths.iter().map(|path| (path.clone(), path.as_os_str().as_encoded_bytes())).collect();
        storage.put_all(&contents).unwrap();
        let wanted: Vec<_> = paths.iter().map(|path| (path.clone(), 100)).collect();
        let found = storage.get_all(&wanted).unwrap();
        assert!(found.iter().zip(&contents).all(|((found, _), (_, content))| found == content));
        storage.copy(&paths[0], &paths[1]).unwrap();
        assert_eq!(storage.get(&paths[1], 100).unwrap().0, contents[0].1);
        storage.remove(&paths[7]).unwrap();
        let error = storage.get_all(&wanted).unwrap_err();
        assert_eq!((error.kind(), error.context("path")), (Kind::NotFound, paths[7].to_str()));
    }
}

#[test]
fn a_file_that_is_replaced_meanwhile_is_not_read_on() {
    for (storage, directory) in stores() {
        let path = directory.join("table");
        storage.put(&path, &noise(1000, 1), &Condition::Any).unwrap();
        let file = storage.open(&path).unwrap();
        storage.put(&path, &noise(1000, 2), &Condition::Any).unwrap();
        let error = file.read_exact_at(&mut [0; 10], 5).unwrap_err();
        assert_eq!((error.kind(), error.context("offset")), (Kind::Conflict, Some("5")));
    }
}

// ---- errors ------------------------------------------------------------------------------------

fn assert_tells_no_secret(error: &Error) {
    let told = format!("{error} {error:?}");
    for secret in [ACCESS_KEY, SECRET_KEY, "Signature=", "wrong-secret"] {
        assert!(!told.contains(secret), "{told}");
    }
}

#[test]
fn a_store_that_refuses_the_key_is_permission_denied() {
    let Some(gateway) = Gateway::shared() else { return };
    let bucket = gateway.bucket();
    let mut settings = gateway.settings();
    settings.options.push(("aws_secret_access_key".to_owned(), "wrong-secret".to_owned()));
    let storage = ObjectStorage::new(&format!("s3://{}", bucket.name), settings).unwrap();
    let path = bucket.path("object");
    let errors = [
        storage.get(&path, 10).unwrap_err(),
        storage.put(&path, b"content", &Condition::New).unwrap_err(),
        write(&storage, &[(path.clone(), noise(9, 1))], Options::AUTOMATIC).unwrap_err(),
        read(&storage, &path, b"content").unwrap_err(),
    ];
    for error in errors {
        assert_eq!((error.kind(), error.context("errno")), (Kind::InvalidInput, Some("13")), "{error}");
        assert_eq!(error.context("path"), path.to_str());
        assert_tells_no_secret(&error);
    }
    assert!(!format!("{storage:?}").contains("wrong-secret"));
}

#[test]
fn a_store_that_does_not_answer_is_unavailable_after_the_deadline() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap(); // accepts, and says nothing
    let options = [
        ("aws_endpoint", format!("http://{}", silent.local_addr().unwrap())),
        ("aws_allow_http", "true".to_owned()),
        ("aws_access_key_id", ACCESS_KEY.to_owned()),
        ("aws_secret_access_key", SECRET_KEY.to_owned()),
    ];
    let options = options.map(|(name, value)| (name.to_owned(), value)).to_vec();
    let settings = Settings { options, deadline: Duration::from_millis(300), ..Settings::default() };
    let storage = ObjectStorage::new("s3://bucket", settings).unwrap();
    let path = Path::new("s3://bucket/object");
    let errors = [
        storage.get(path, 10).unwrap_err(),
        storage.put(path, b"content", &Condition::New).unwrap_err(),
        storage.remove_all(path).unwrap_err(),
        write(&storage, &[(path.to_owned(), noise(9, 1))], Options::AUTOMATIC).unwrap_err(),
        read(&storage, path, b"content").unwrap_err(),
    ];
    for error in errors {
        assert_eq!((error.kind(), error.context("path")), (Kind::Unavailable, path.to_str()), "{error}");
        assert_tells_no_secret(&error);
    }
}

#[test]
fn a_bucket_that_is_not_there_is_not_found() {
    let Some(gateway) = Gateway::shared() else { return };
    let storage = ObjectStorage::new("s3://no-such-bucket", gateway.settings()).unwrap();
    let path = Path::new("s3://no-such-bucket/object");
    for error in [
        storage.put(path, b"content", &Condition::New).unwrap_err(),
        storage.list(path).unwrap_err(),
        storage.status(path).unwrap_err(),
        write(&storage, &[(path.to_owned(), noise(9, 1))], Options::AUTOMATIC).unwrap_err(),
    ] {
        assert_eq!((error.kind(), error.context("bucket")), (Kind::NotFound, Some("s3://no-such-bucket")));
    }
    assert_eq!(storage.get(path, 10).unwrap_err().kind(), Kind::NotFound);
}

#[test]
fn locations_and_options_that_make_no_sense_are_refused() {
    for location in ["bucket", "ftp://bucket", "s3://", "s3:///name"] {
        let error = ObjectStorage::new(location, Settings::default()).unwrap_err();
        assert_eq!((error.kind(), error.context("path")), (Kind::InvalidInput, Some(location)));
    }
    let error = ObjectStorage::new("https://me:wrong-secret@host/model", Settings::default()).unwrap_err();
    assert_tells_no_secret(&error);
    let options = vec![("aws_no_such_option".to_owned(), "wrong-secret".to_owned())];
    let storage = ObjectStorage::new("s3://bucket/x", Settings { options, ..Settings::default() }).unwrap();
    let error = storage.head(Path::new("s3://bucket/x")).unwrap_err();
    assert!(error.message().contains("aws_no_such_option"), "{error}");
    assert_tells_no_secret(&error);
    let error = ObjectStorage::in_memory("bucket").head(Path::new("memory://another/x")).unwrap_err();
    assert_eq!(error.kind(), Kind::InvalidInput);
}

#[test]
fn what_is_behind_http_is_read_only() {
    let storage = ObjectStorage::new("http://127.0.0.1:9", Settings::default()).unwrap();
    let contents = [(PathBuf::from("http://127.0.0.1:9/object"), noise(9, 1))];
    assert_eq!(write(&storage, &contents, Options::AUTOMATIC).unwrap_err().kind(), Kind::Unsupported);
}

#[test]
fn only_the_version_that_was_read_is_removed() {
    for (storage, directory) in stores() {
        let path = directory.join("record");
        let first = storage.put(&path, b"first", &Condition::New).unwrap();
        if !storage.removes_versions(&directory).unwrap() {
            let error = storage.remove_version(&path, &first).unwrap_err();
            assert_eq!(error.kind(), Kind::Unsupported);
            assert!(storage.head(&path).unwrap().is_some());
            continue;
        }
        let second = storage.put(&path, b"second", &Condition::Unchanged(first.clone())).unwrap();
        let error = storage.remove_version(&path, &first).unwrap_err();
        assert_eq!(error.kind(), Kind::Conflict);
        assert_eq!(storage.get(&path, 100).unwrap().0, b"second");
        storage.remove_version(&path, &second).unwrap();
        assert_eq!(storage.head(&path).unwrap(), None);
        storage.remove_version(&path, &second).unwrap(); // it has gone already
        assert_eq!(storage.list(&directory).unwrap().objects, []); // nor is anything left of the trial
    }
}
