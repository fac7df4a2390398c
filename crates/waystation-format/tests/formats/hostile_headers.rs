//! Headers that must be refused, each with the reason that the error has to give, and odd ones that
//! must be read. Where the reference implementation reads what we refuse, that is said here too.

use waystation_format::Kind;
use waystation_format::safetensors::{
    DIMENSION_LIMIT, ENTRY_LIMIT, HEADER_LIMIT_BYTES, NAME_LIMIT_BYTES, Planned, build, header_end, parse,
};

/// A file with this JSON and so many bytes of data.
fn file(json: impl AsRef<[u8]>, data_bytes: usize) -> Vec<u8> {
    let json = json.as_ref();
    [&(json.len() as u64).to_le_bytes(), json, &vec![0; data_bytes]].concat()
}

fn reference_accepts(file: &[u8]) -> bool {
    safetensors::SafeTensors::deserialize(file).is_ok()
}

#[track_caller]
fn refused(json: impl AsRef<[u8]>, data_bytes: usize, reason: &str) -> String {
    refused_as(Kind::Corrupt, json, data_bytes, reason)
}

#[track_caller]
fn refused_as(kind: Kind, json: impl AsRef<[u8]>, data_bytes: usize, reason: &str) -> String {
    let file = file(json, data_bytes);
    let error = parse(&file, file.len() as u64).unwrap_err();
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(reason), "{error}");
    error.to_string()
}

/// Refused by both implementations.
#[track_caller]
fn refused_by_both(json: impl AsRef<[u8]>, data_bytes: usize, reason: &str) {
    assert!(!reference_accepts(&file(&json, data_bytes)), "the reference accepts this");
    refused(json, data_bytes, reason);
}

/// Refused by us alone, on purpose.
#[track_caller]
fn refused_by_us(json: impl AsRef<[u8]>, data_bytes: usize, reason: &str) {
    assert!(reference_accepts(&file(&json, data_bytes)), "the reference refuses this too");
    refused(json, data_bytes, reason);
}

#[track_caller]
fn accepted(json: impl AsRef<[u8]>, data_bytes: usize) -> Vec<(String, u64, u64)> {
    let file = file(json, data_bytes);
    assert!(reference_accepts(&file));
    let header = parse(&file, file.len() as u64).unwrap();
    header.tensors.into_iter().map(|tensor| (tensor.name, tensor.begin, tensor.end)).collect()
}

/// The entry of a tensor `name` of `bytes` U8 from `begin`.
fn entry(name: &str, begin: u64, bytes: u64) -> String {
    let end = begin + bytes;
    format!(r#""{name}":{{"dtype":"U8","shape":[{bytes}],"data_offsets":[{begin},{end}]}}"#)
}

#[test]
fn lengths_that_lie() {
    for bytes in [&b""[..], b"\x02", b"\x02\0\0\0\0\0\0"] {
        let error = parse(bytes, bytes.len() as u64).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(error.message().contains("too short"), "{error}");
    }
    for length in [3, 100, HEADER_LIMIT_BYTES, HEADER_LIMIT_BYTES + 1, u64::MAX - 7, u64::MAX] {
        let bytes = [&length.to_le_bytes()[..], b"{}"].concat();
        assert!(!reference_accepts(&bytes));
        let error = parse(&bytes, bytes.len() as u64).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt, "{error}");
        let reason = if length > HEADER_LIMIT_BYTES { "more than the 100000000" } else { "cut off" };
        assert!(error.message().contains(reason), "{error}");
    }
    refused_by_both("", 0, "expected a JSON object, found the end");
}

#[test]
fn a_prefix_that_is_too_short_is_the_callers_fault() {
    let file = file("{}", 0);
    assert_eq!(header_end(&file[..8], 10).unwrap(), 10);
    assert_eq!(header_end(&file[..7], 10).unwrap_err().kind(), Kind::InvalidInput);
    assert_eq!(parse(&file[..9], 10).unwrap_err().kind(), Kind::InvalidInput);
}

#[test]
fn bytes_that_belong_to_nothing() {
    refused_by_both(format!("{{{}}}", entry("a", 0, 4)), 5, "something was appended");
    refused_by_both(format!("{{{}}}", entry("a", 0, 4)), 3, "cut off");
    refused_by_both("{}", 1, "something was appended");
    refused_by_both("{}{}", 0, "goes on after its JSON object");
    refused_by_both("{}\0\0", 0, "goes on after its JSON object");
    refused_by_both("\u{feff}{}", 0, "expected a JSON object");
}

#[test]
fn holes_and_overlaps() {
    refused_by_both(format!("{{{}}}", entry("a", 1, 4)), 5, "leaves a hole");
    refused_by_both(format!("{{{},{}}}", entry("a", 0, 4), entry("b", 5, 4)), 9, "leaves a hole");
    refused_by_both(format!("{{{},{}}}", entry("a", 0, 4), entry("b", 3, 4)), 7, "overlaps");
    refused_by_both(format!("{{{},{}}}", entry("a", 0, 4), entry("b", 0, 4)), 4, "overlaps");
    refused_by_both(format!("{{{},{}}}", entry("a", 0, 4), entry("b", 2, 0)), 4, "overlaps");
    let backwards = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}"#;
    refused_by_both(backwards, 4, "leaves a hole");
    let backwards = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[],"data_offsets":[4,3]}}"#;
    refused_by_both(backwards, 4, "before it begins");
}

#[test]
fn sizes_that_do_not_fit() {
    let one = |dtype: &str, shape: &str, bytes: u64| {
        format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{bytes}]}}}}"#)
    };
    refused_by_both(one("F32", "[2]", 4), 4, "takes 8 bytes, but the entry spans 4");
    refused_by_both(one("F32", "[]", 0), 0, "takes 4 bytes");
    refused_by_both(one("F32", "[0]", 4), 4, "takes 0 bytes");
    refused_by_both(one("U8", "[4294967296,4294967296]", 0), 0, "overflows");
    refused_by_both(one("U8", "[4294967296,4294967296,0]", 0), 0, "overflows");
    refused_by_both(one("F64", "[2305843009213693952]", 0), 0, "overflows");
    refused_by_both(one("U8", "[18446744073709551616]", 0), 0, "exceeds 64 bits");
    refused_by_both(one("U8", "[4]", u64::MAX), 4, "spans");
    refused_by_both(one("F4", "[3]", 1), 1, "not a whole number of bytes");
    refused_by_both(one("F6_E2M3", "[2]", 1), 1, "not a whole number of bytes");
    refused_by_both(one("F128", "[1]", 16), 16, "unknown dtype \"F128\"");
    refused_by_both(one("f32", "[1]", 4), 4, "unknown dtype");
}

#[test]
fn numbers_that_are_no_unsigned_integers() {
    for number in
        ["-1", "-0", "0.0", "4.0", "4e0", "4E0", "04", "00", "+4", "0x4", "\"4\"", "null", "[4]", "", "NaN"]
    {
        let shape = format!(r#"{{"a":{{"dtype":"U8","shape":[{number},4],"data_offsets":[0,4]}}}}"#);
        refused_by_both(shape, 4, "");
        let offsets = format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[{number},4]}}}}"#);
        refused_by_both(offsets, 4, "");
    }
    for list in ["[0]", "[0,4,4]", "[]", "[0,4,]", "[,0,4]", "{}", "4", "\"\"", "[[0,4]]"] {
        let offsets = format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{list}}}}}"#);
        refused_by_both(offsets, 4, "");
    }
}

#[test]
fn keys_and_fields_that_come_twice() {
    let twice = format!("{{{0},{0}}}", entry("a", 0, 4));
    refused_by_us(twice, 4, "the key \"a\" twice");
    let spelled = format!("{{{},{}}}", entry("a", 0, 4), entry("\\u0061", 0, 4));
    refused_by_us(spelled, 4, "the key \"a\" twice");
    let metadata = r#"{"__metadata__":{},"__metadata__":{}}"#;
    refused_by_both(metadata, 0, "the key \"__metadata__\" twice");
    let spelled = r#"{"__metadata__":{},"__metadata\u005f_":{}}"#;
    refused_by_both(spelled, 0, "twice");
    let text = r#"{"__metadata__":{"k":"v","k":"w"}}"#;
    refused_by_us(text, 0, "the key \"k\" twice");
    for field in [r#""dtype":"U8""#, r#""shape":[4]"#, r#""data_offsets":[0,4]"#] {
        let json = format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":[0,4],{field}}}}}"#);
        refused_by_both(json, 4, "twice");
    }
}

#[test]
fn entries_of_the_wrong_form() {
    let json = r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"codec":"zstd"}}"#;
    refused_by_us(json, 4, "unknown field \"codec\"");
    refused_by_us(r#"{"a":["U8",[4],[0,4]]}"#, 4, "an object that describes a tensor");
    refused_by_both(r#"{"a":{"dtype":"U8","shape":[4]}}"#, 4, "lacks dtype, shape or data_offsets");
    refused_by_both(r#"{"a":{}}"#, 0, "lacks");
    refused_by_both(r#"{"a":null}"#, 0, "an object that describes a tensor");
    refused_by_both(r#"{"a":{"dtype":8,"shape":[4],"data_offsets":[0,4]}}"#, 4, "expected a string");
    for root in ["[]", "null", "1", "\"\"", "true"] {
        refused_by_both(root, 0, "expected a JSON object");
    }
}

#[test]
fn metadata_that_are_not_text() {
    for value in ["1", "null", "true", "[]", "{}", "\"v"] {
        let json = format!(r#"{{"__metadata__":{{"k":{value}}}}}"#);
        refused_by_both(json, 0, "");
    }
    for value in ["[]", "\"text\"", "1"] {
        refused_by_both(format!(r#"{{"__metadata__":{value}}}"#), 0, "an object of strings");
    }
    refused_by_us(r#"{"__metadata__":null}"#, 0, "an object of strings");
    // A tensor cannot be called so: the entry is read as text and fails.
    refused_by_both(format!("{{{}}}", entry("__metadata__", 0, 0)), 0, "expected a string");
}

#[test]
fn text_that_is_none() {
    for name in [r"\ud800", r"\udc00", r"\ud800\ud800", r"\ud800x", r"\udc00\ud800", r"\ud800\n"] {
        refused_by_both(format!("{{{}}}", entry(name, 0, 4)), 4, "lone surrogate");
    }
    for name in [r"\x", r"\u12", r"\u12g4", r"\U0041", "\\u00\u{e9}0", r"\u+123"] {
        refused_by_both(format!("{{{}}}", entry(name, 0, 4)), 4, "unknown escape");
    }
    refused_by_both("{\"a\nb\":{}}", 0, "raw control character");
    refused_by_both("{\"a\0b\":{}}", 0, "raw control character");
    refused_by_both(b"{\"\xff\":{}}", 0, "not valid UTF-8");
    refused_by_both(b"{\"\xed\xa0\x80\":{}}", 0, "not valid UTF-8");
    refused_by_both(b"{\"\xc0\x80\":{}}", 0, "not valid UTF-8");
    refused_by_us(format!("{{{}}}", entry(r"a\u0000b", 0, 4)), 4, "NUL");
}

#[test]
fn json_that_is_cut_off_or_malformed() {
    let json = format!(r#"{{"__metadata__":{{"k":"v\n"}},{}}}"#, entry(r"\u0061", 0, 4));
    accepted(&json, 4);
    for cut in 0..json.len() {
        refused_by_both(&json[..cut], 4, "");
    }
    let broken =
        ["{,}", "{\"a\"}", "{a:{}}", "{'a':{}}", "{\"a\":{},}", "{\"a\" {}}", "{/**/}", "{}#", "{\u{a0}}"];
    for json in broken {
        refused_by_both(json, 0, "");
    }
}

#[test]
fn depth_costs_nothing() {
    for open in ["[", "{\"a\":"] {
        refused(open.repeat(200_000), 0, "");
        refused(format!("{{\"a\":{}", open.repeat(200_000)), 0, "");
        refused(format!(r#"{{"a":{{"shape":{}"#, open.repeat(200_000)), 0, "");
        refused(format!(r#"{{"a":{{"data_offsets":[{}"#, open.repeat(200_000)), 0, "");
    }
}

#[test]
fn bombs_are_bounded() {
    let many: Vec<String> = (0..=ENTRY_LIMIT).map(|index| entry(&format!("{index:x}"), 0, 0)).collect();
    let json = format!("{{{}}}", many.join(","));
    refused_as(Kind::Unsupported, &json, 0, "more than 1048576 entries");
    let text: Vec<String> = (0..=ENTRY_LIMIT).map(|index| format!(r#""{index:x}":"""#)).collect();
    let metadata = format!(r#"{{"__metadata__":{{{}}}}}"#, text.join(","));
    refused(metadata, 0, "more than 1048576 entries");
    let shape = vec!["1"; DIMENSION_LIMIT + 1].join(",");
    refused(format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,1]}}}}"#), 1, "more than 65");
    refused(
        format!(r#"{{"a":{{"data_offsets":[{}"#, "0,".repeat(1 << 20)),
        0,
        "the end of data_offsets after two integers",
    );
}

#[test]
fn errors_are_short_whatever_they_are_about() {
    let long = "x".repeat(1 << 20);
    refused_by_us(format!("{{{}}}", entry(&long, 0, 4)), 4, "more than 65536 bytes");
    accepted(format!("{{{}}}", entry(&long[..NAME_LIMIT_BYTES], 0, 4)), 4);
    for json in [
        format!(r#"{{"w":{{"dtype":"{long}","shape":[4],"data_offsets":[0,4]}}}}"#),
        format!(r#"{{"w":{{"{long}":"U8","shape":[4],"data_offsets":[0,4]}}}}"#),
        format!(r#"{{"__metadata__":{{"{long}":"","{long}":""}}}}"#),
        format!("{{{long}}}"),
    ] {
        assert!(refused(json, 4, "").len() < 300);
    }
}

#[test]
fn errors_name_tensor_and_offset() {
    let json = format!("{{{},{}}}", entry("first", 0, 4), entry("layers.0.weight", 5, 4));
    let shown = refused(json, 9, "(tensor: layers.0.weight, offset: 5)");
    assert!(shown.contains("it begins at 5, not 4"), "{shown}");
    let json = format!(r#"{{{},"bad":{{"dtype":"U8","shape":[1.5]"#, entry("first", 0, 4));
    let at = 8 + json.find("1.5").unwrap();
    refused(json, 4, &format!("(offset: {at}, tensor: bad)"));
}

#[test]
fn odd_but_valid() {
    assert_eq!(accepted("{}", 0), []);
    assert_eq!(accepted(" \t\r\n{ }  \n", 0), []);
    assert_eq!(accepted(r#"{"__metadata__":{}}"#, 0), []);
    let names = ["", "../../x", "a/b", " ", "name@0,1:2", "\u{1f600}", "dtype", "__metadata__ "];
    for name in names {
        let start = 8 + entry(name, 0, 4).len() as u64 + 2;
        assert_eq!(accepted(format!("{{{}}}", entry(name, 0, 4)), 4), [(name.to_owned(), start, start + 4)]);
    }
    let spelled = format!("{{{}}}", entry(r#"\"\\\/\b\f\n\r\t\u00e9\ud83d\uDE00"#, 0, 4));
    assert_eq!(accepted(spelled, 4)[0].0, "\"\\/\u{8}\u{c}\n\r\t\u{e9}\u{1f600}");
    // Any order in the JSON and in an entry, white space everywhere, empty tensors between others.
    let json = r#"{ "c" : { "data_offsets" : [ 4 , 6 ] , "shape" : [ 1 ] , "dtype" : "BF16" },
        "b":{"shape":[3,0],"dtype":"F32","data_offsets":[4,4]},
        "a":{"dtype":"F4","data_offsets":[0,4],"shape":[2,4]}, "__metadata__" : { "k" : "v" } }"#;
    let start = 8 + json.len() as u64;
    let expected = [("a", 0, 4), ("b", 4, 4), ("c", 4, 6)];
    assert_eq!(
        accepted(json, 6),
        expected.map(|(name, begin, end)| (name.to_owned(), start + begin, start + end))
    );
}

#[test]
fn the_writer_refuses_what_the_reader_would() {
    let plan = |name: &'static str, shape: &[u64]| Planned {
        name: name.into(),
        dtype: waystation_format::safetensors::Dtype::F4,
        shape: shape.to_vec().into(),
    };
    let refused = |tensors: &[Planned<'_>], align_bytes: u64, reason: &str| {
        let error = build(tensors, None, align_bytes).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidInput);
        assert!(error.to_string().contains(reason), "{error}");
    };
    refused(&[plan("a", &[2]), plan("a", &[2])], 8, "two tensors have one name (tensor: a)");
    refused(&[plan("__metadata__", &[2])], 8, "safetensors reserves it");
    refused(&[plan("a\0", &[2])], 8, "NUL");
    refused(&[plan("a", &[3])], 8, "whole number of bytes");
    refused(&[plan("a", &[u64::MAX, 2])], 8, "overflows");
    let huge = ["a", "b", "c", "d", "e", "f", "g", "h", "i"].map(|name| plan(name, &[(1 << 62) - 2]));
    refused(&huge, 8, "its end overflows 64 bits (tensor: i)");
    refused(&[plan("a", &[2; DIMENSION_LIMIT + 1])], 8, "dimensions");
    for align_bytes in [0, 1, 4, 24, 1 << 25, u64::MAX] {
        refused(&[], align_bytes, "power of two");
    }
    let pair = ("k".to_owned(), "v".to_owned());
    assert!(build(&[], Some(&[pair.clone(), pair]), 8).is_err());
    let named = |name: String| Planned { name: name.into(), ..plan("", &[2]) };
    refused(&[named("x".repeat(NAME_LIMIT_BYTES + 1))], 8, "more than 65536 bytes");
    let count = HEADER_LIMIT_BYTES as usize / NAME_LIMIT_BYTES + 1;
    let rest = "x".repeat(NAME_LIMIT_BYTES - 5);
    let tensors: Vec<_> = (0..count).map(|number| named(format!("{number:05}{rest}"))).collect();
    refused(&tensors, 8, "divide the tensors between files");
}
