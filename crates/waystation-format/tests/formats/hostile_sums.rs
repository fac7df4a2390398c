//! Files of checksums that must be refused, each with the reason that the error has to give, and odd ones that
//! must be read.

use proptest::prelude::*;
use waystation_format::Kind;
use waystation_format::safetensors::parse_sums;

const BLOCK_BYTES: u64 = 262_144;

fn refused(text: impl AsRef<[u8]>, reason: &str) {
    let error = parse_sums(text.as_ref()).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
    assert!(error.to_string().contains(reason), "{error}");
    assert!(error.to_string().len() < 1000, "{error}");
}

fn with_files(files: &str) -> String {
    format!(r#"{{"version":1,"block_bytes":{BLOCK_BYTES},"files":{files}}}"#)
}

fn with_sums(nbytes: u64, base64: &str) -> String {
    with_files(&format!(r#"{{"a.safetensors":{{"nbytes":{nbytes},"crc64":"{base64}"}}}}"#))
}

#[test]
fn what_is_no_file_of_checksums() {
    for (text, reason) in [
        ("", "expected a JSON object, found the end"),
        ("[]", "expected a JSON object"),
        (r#"{"version":1,"version":1}"#, r#"the key "version" twice"#),
        (r#"{"version":"1"}"#, "expected an unsigned integer"),
        (r#"{"version":1} x"#, "goes on after"),
    ] {
        refused(text, reason);
    }
    refused(b"{\"\xff\"", "not valid UTF-8");
    refused(format!(r#"{{"version":1,"block_bytes":{BLOCK_BYTES}}}"#), "no object 'files'");
    for (files, reason) in [
        ("[]", "expected a JSON object"),
        (r#"{"a":1}"#, "expected a JSON object"),
        (r#"{"a":{}}"#, r#"the file "a" lacks its length or its checksums"#),
        (r#"{"a":{"nbytes":0}}"#, "lacks"),
        (r#"{"a":{"nbytes":0,"crc64":""},"\u0061":{"nbytes":0,"crc64":""}}"#, r#"the key "a" twice"#),
        (r#"{"a":{"nbytes":0,"nbytes":0}}"#, r#"the key "nbytes" twice"#),
        (r#"{"a":{"nbytes":-1,"crc64":""}}"#, "expected an unsigned integer"),
        (r#"{"a":{"nbytes":18446744073709551616,"crc64":""}}"#, "exceeds 64 bits"),
        (r#"{"a":{"nbytes":1,"crc64":[]}}"#, "expected a string"),
    ] {
        refused(with_files(files), reason);
    }
}

#[test]
fn checksums_that_are_no_base64_or_of_another_number() {
    for base64 in
        ["A", "AAA", "AA=A", "=AAA", "A===", "AA==AAAA", "AAA\\n", "AAAA AAA", "AAA-", "\u{e9}\u{e9}"]
    {
        refused(with_sums(1, base64), "not in base64");
    }
    for (nbytes, base64) in [
        (0, "AAAAAAAAAAA="),
        (1, ""),
        (BLOCK_BYTES + 1, "AAAAAAAAAAA="),
        (1, "AAAA"),
        (u64::MAX, "AAAAAAAAAAA="),
    ] {
        refused(with_sums(nbytes, base64), "does not fit its length");
    }
    assert_eq!(
        parse_sums(with_sums(1, "/+8BAgMEBQY=").as_bytes()).unwrap()[0].blocks,
        [255, 239, 1, 2, 3, 4, 5, 6]
    );
}

#[test]
fn other_versions_are_unsupported_whatever_they_hold() {
    for text in [
        r#"{"files":[[1]],"version":2}"#.to_owned(),
        "{}".to_owned(),
        r#"{"version":1,"block_bytes":4096,"files":3}"#.to_owned(),
        with_files("{}").replace("262144", "262145"),
    ] {
        assert_eq!(parse_sums(text.as_bytes()).unwrap_err().kind(), Kind::Unsupported, "{text}");
    }
}

#[test]
fn what_is_not_known_is_stepped_over_and_not_held() {
    let text = format!(
        r#"{{"by":[{}],"files":{{"a":{{"x":[[[]]],"crc64":"","nbytes":0}}}},"block_bytes":{BLOCK_BYTES},"version":1}}"#,
        vec!["{}"; 1 << 20].join(",")
    );
    let found = parse_sums(text.as_bytes()).unwrap();
    assert_eq!((&*found[0].name, found[0].nbytes, found[0].blocks.len()), ("a", 0, 0));
    refused(with_files(&"[".repeat(1 << 20)), "deep");
    refused(format!(r#"{{"version":1,"x":{}"#, "[".repeat(1 << 20)), "deep");
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(data in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_sums(&data);
    }

    #[test]
    fn no_damage_makes_it_panic(at in 0usize..100, byte in any::<u8>()) {
        let mut text = with_sums(1, "AAAAAAAAAAA=").into_bytes();
        let place = at % text.len();
        text[place] = byte;
        if let Ok(found) = parse_sums(&text) {
            prop_assert!(found.iter().all(|file| file.blocks.len() as u64 == 8 * file.nbytes.div_ceil(BLOCK_BYTES)));
        }
    }

    #[test]
    fn checksums_come_back_as_they_were(sums in proptest::collection::vec(any::<u64>(), 0..50), less in 0..BLOCK_BYTES) {
        let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
        let nbytes = (sums.len() as u64 * BLOCK_BYTES).saturating_sub(less);
        let text = with_sums(nbytes, &base64(&bytes));
        prop_assert_eq!(&parse_sums(text.as_bytes()).unwrap()[0].blocks, &bytes);
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let encode = |group: &[u8]| {
        let value =
            group.iter().chain([0, 0].iter()).take(3).fold(0u32, |value, &byte| value << 8 | u32::from(byte));
        let letter = |place: usize| match place > group.len() {
            true => '=',
            false => char::from(LETTERS[(value >> (18 - 6 * place) & 63) as usize]),
        };
        (0..4).map(letter).collect::<String>()
    };
    bytes.chunks(3).map(encode).collect()
}
