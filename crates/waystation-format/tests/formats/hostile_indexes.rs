//! Indexes that must be refused, each with the reason that the error has to give, and odd ones that must be
//! read; what is accepted, `serde_json` reads alike.

use std::collections::BTreeMap;

use proptest::prelude::*;
use waystation_format::Kind;
use waystation_format::safetensors::parse_index;

fn refused(text: impl AsRef<[u8]>, reason: &str) -> String {
    let error = parse_index(text.as_ref()).unwrap_err();
    assert_eq!(error.kind(), Kind::Corrupt, "{error}");
    assert!(error.to_string().contains(reason), "{error}");
    error.to_string()
}

/// What both read.
fn accepted(text: &str) -> BTreeMap<String, String> {
    let found: BTreeMap<String, String> = parse_index(text.as_bytes())
        .unwrap()
        .into_iter()
        .map(|(tensor, file)| (tensor.into_owned(), file.into_owned()))
        .collect();
    let theirs: serde_json::Value = serde_json::from_str(text).unwrap();
    let theirs: BTreeMap<String, String> = serde_json::from_value(theirs["weight_map"].clone()).unwrap();
    assert_eq!(found, theirs);
    found
}

fn with_file(name: &str) -> String {
    format!(r#"{{"weight_map":{{"w":"{name}"}}}}"#)
}

#[test]
fn what_is_no_index() {
    for (text, reason) in [
        ("", "expected a JSON object, found the end"),
        ("[]", "expected a JSON object"),
        ("{}", "no object 'weight_map'"),
        (r#"{"weight_map":{}}"#, "names no tensor"),
        (r#"{"weight_map":[]}"#, "expected an object as 'weight_map'"),
        (r#"{"weight_map":{"a":1}}"#, "expected a string"),
        (r#"{"weight_map":{"a":"x.safetensors"}"#, "found the end"),
        (r#"{"weight_map":{"a":"x.safetensors"}}x"#, "goes on after"),
        (r#"{"weight_map":{"a":"x.safetensors"},"weight_map":{}}"#, r#"the key "weight_map" twice"#),
        (r#"{"weight_map":{"a":"x.safetensors","\u0061":"y.safetensors"}}"#, r#"the key "a" twice"#),
        (r#"{"weight_map":{"\ud800":"x.safetensors"}}"#, "lone surrogate"),
        ("{\"a\":\"\n\",", "raw control character"),
    ] {
        refused(text, reason);
    }
    refused(b"{\"\xff\"", "not valid UTF-8");
    refused("\u{feff}{}", "expected a JSON object");
}

#[test]
fn files_that_are_elsewhere() {
    for name in ["", ".", "..", "a/b.safetensors", "..\\\\b.safetensors", "a\\u0000.safetensors", "b.bin"] {
        let error = refused(with_file(name), "as a file, which");
        assert!(error.contains("tensor: w"), "{error}");
    }
}

#[test]
fn what_is_stepped_over_is_json_all_the_same() {
    for value in
        ["tru", "01", "1.", ".5", "1e", "--1", "NaN", "[1,]", "[1 2]", r#"{"a"}"#, r#"{"a":}"#, "[", ""]
    {
        refused(format!(r#"{{"metadata":{value},"weight_map":{{"a":"x.safetensors"}}}}"#), "");
    }
    for value in [
        "1",
        "-0",
        "1.5e-3",
        "0.0E+1",
        "null",
        "[[],[1,[2,{}]],{}]",
        r#"{"a":[{"b":"c"}],"a":0}"#,
        " [ ] ",
        "true",
    ] {
        accepted(&format!(r#" {{"metadata":{value},"weight_map":{{"a":"x.safetensors"}},"x":{value}}} "#));
    }
}

#[test]
fn depth_is_bounded() {
    let nested = |depth| {
        format!(r#"{{"a":{}{},"weight_map":{{"a":"x.safetensors"}}}}"#, "[".repeat(depth), "]".repeat(depth))
    };
    accepted(&nested(64));
    refused(nested(65), "more than 64 deep");
    refused(r#"{"a":"#.to_owned() + &"[".repeat(1 << 20), "more than 64 deep");
    refused(r#"{"a":"#.repeat(1 << 20), "more than 64 deep");
}

#[test]
fn members_are_bounded() {
    let members: Vec<String> = (0..1025).map(|number| format!(r#""{number}":0"#)).collect();
    refused(format!("{{{}}}", members.join(",")), "more than 1024 entries");
}

proptest! {
    #[test]
    fn whatever_is_written_is_read(
        map in prop::collection::btree_map(any::<String>(), "[a-z]{1,8}", 1..20),
        metadata in prop::collection::btree_map(any::<String>(), any::<f32>(), 0..5),
    ) {
        let map: BTreeMap<_, _> = map.into_iter().map(|(name, file)| (name, file + ".safetensors")).collect();
        let text = serde_json::json!({ "metadata": metadata, "weight_map": map }).to_string();
        prop_assert_eq!(accepted(&text), map);
    }
}
