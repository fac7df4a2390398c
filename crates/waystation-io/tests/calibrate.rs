//! Calibration on real file systems. One test, because where calibrations are kept is process-wide.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::fs;
use std::path::Path;

use waystation_io::Kind;
use waystation_io::calibrate::{calibrate, calibration, remembered};
use waystation_io::mode::Mode;

const PROBE_BYTES: u64 = 4 << 20;

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().next().is_none()
}

#[test]
fn what_is_measured_is_remembered_until_it_is_damaged_or_stale() {
    let cache = tempfile::tempdir().unwrap();
    // SAFETY: the only test of this program, before it starts any thread.
    unsafe { std::env::set_var("WAYSTATION_CACHE_DIR", cache.path().join("new/place")) };
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path();
    assert_eq!(calibration(path).unwrap(), None);
    assert_eq!(remembered(path), None);

    let measured = calibrate(path, PROBE_BYTES, false).unwrap();
    let choice = measured.choice().unwrap();
    assert!(is_empty(path));
    assert!(measured.write.iter().any(|trial| trial.way == choice.write && !trial.bytes_per_s.is_empty()));
    assert!(measured.read.iter().any(|trial| trial.way == choice.read && !trial.bytes_per_s.is_empty()));
    assert_eq!(remembered(&path.join("not/there/yet")), Some(choice));
    assert_eq!(calibration(path).unwrap().unwrap(), measured);
    assert_eq!(calibrate(path, PROBE_BYTES, false).unwrap().measured_unix_s, measured.measured_unix_s);
    let json = measured.to_json();
    assert_eq!(json["write"]["best"]["mode"], choice.write.mode.name());

    let stored = measured.stored.clone().unwrap();
    let text = fs::read_to_string(&stored).unwrap();
    let damaged = [
        String::new(),
        text[..text.len() / 2].to_owned(),
        "[]".to_owned(),
        text.replace(&measured.kernel, "2.6.0"),
        text.replace(&measured.key, "nfs 0:1 server:/export"),
        text.replace("\"threads\": 1", "\"threads\": 1000000"),
        text.replace("\"block_bytes\": 1048576", "\"block_bytes\": 7"),
        text.replace("direct-ring", "by-pigeon").replace("buffered", "by-pigeon"),
    ];
    for text in damaged {
        fs::write(&stored, &text).unwrap();
        assert_eq!(calibration(path).unwrap(), None, "{text}");
    }
    let again = calibrate(path, PROBE_BYTES, false).unwrap();
    assert_eq!(calibration(path).unwrap().unwrap(), again);
    assert!(calibrate(path, PROBE_BYTES, true).is_ok());
    let leftovers = fs::read_dir(stored.parent().unwrap()).unwrap().count();
    assert_eq!(leftovers, 1);

    check_memory();
    check_errors(path);
    check_unwritable_cache(cache.path(), path);
}

fn check_memory() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else { return };
    let measured = calibrate(directory.path(), PROBE_BYTES, true).unwrap();
    assert!(measured.write.iter().chain(&measured.read).all(|trial| trial.way.mode == Mode::Buffered));
}

fn check_errors(path: &Path) {
    let error = calibrate(&path.join("absent"), PROBE_BYTES, false).unwrap_err();
    assert_eq!(error.kind(), Kind::NotFound);
    for probe_bytes in [0, u64::MAX] {
        let error = calibrate(path, probe_bytes, true).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidInput);
    }
    let error = calibrate(Path::new("/proc"), PROBE_BYTES, true).unwrap_err();
    assert_eq!(error.context("path"), Some("/proc"));
}

/// What cannot be stored serves this process all the same.
fn check_unwritable_cache(cache: &Path, path: &Path) {
    fs::write(cache.join("file"), "").unwrap();
    // SAFETY: no other thread of this program runs now.
    unsafe { std::env::set_var("WAYSTATION_CACHE_DIR", cache.join("file/below")) };
    let measured = calibrate(path, PROBE_BYTES, true).unwrap();
    assert_eq!(measured.stored, None);
    assert_eq!(remembered(path), measured.choice());
}
