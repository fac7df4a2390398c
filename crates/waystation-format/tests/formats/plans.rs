//! Plans, by the cases by which Python makes them; and words that are none.

use proptest::prelude::*;
use serde_json::{Value, json};
use waystation_format::plan::{
    ArrayCopy, Decode, Fetch, HostCopy, Key, Offer, Part, Read, Record, Segment, each,
};
use waystation_format::{Error, Kind, Result};

const VECTORS: &str = include_str!("../vectors/plans.json");

/// What the records of a plan say, by field.
fn said(kind: &str, words: &[i64]) -> Result<Vec<Value>> {
    match kind {
        "read" => said_of(words, |Read { file, chunk_offset, part }| {
            with_part(json!({"file": file, "chunk_offset": chunk_offset}), &part)
        }),
        "decode" => said_of(words, |Decode { source, nbytes, is_compressed, has_checksum, part }| {
            let own = json!({
                "source": source, "nbytes": nbytes, "is_compressed": is_compressed, "has_checksum": has_checksum
            });
            with_part(own, &part)
        }),
        "segment" => said_of(words, |Segment { file_offset, item_bytes, shape, blocks }| {
            let blocks: Vec<Value> = blocks
                .iter()
                .map(|block| {
                    json!({
                        "device": block.device, "source": block.source as i64, "offset": block.offset,
                        "shape": block.shape, "strides": block.strides
                    })
                })
                .collect();
            json!({"file_offset": file_offset, "item_bytes": item_bytes, "shape": shape, "blocks": blocks})
        }),
        "host_copy" => said_of(
            words,
            |HostCopy { destination, source, nbytes }| json!({"destination": destination, "source": source, "nbytes": nbytes}),
        ),
        "array_copy" => said_of(words, |copy: ArrayCopy| {
            json!({
                "device": copy.device, "destination": copy.destination, "source": copy.source,
                "row_bytes": copy.row_bytes, "rows": copy.rows, "source_step": copy.source_step
            })
        }),
        "offer" => said_of(words, |Offer { key, address, nbytes, number }| {
            with_key(json!({"address": address, "nbytes": nbytes, "number": number}), &key)
        }),
        "fetch" => said_of(words, |Fetch { key, address, nbytes }| {
            with_key(json!({"address": address, "nbytes": nbytes}), &key)
        }),
        _ => Err(Error::new(Kind::Internal, format!("no records are of the kind {kind}"))),
    }
}

fn said_of<'a, R: Record<'a>>(words: &'a [i64], say: impl Fn(R) -> Value) -> Result<Vec<Value>> {
    each(words, |_, record| Ok(say(record)))
}

fn with_part(mut said: Value, part: &Part<'_>) -> Value {
    said["item_bytes"] = json!(part.item_bytes);
    said["chunk_shape"] = json!(part.chunk_shape);
    said["offset"] = json!(part.offset);
    said["shape"] = json!(part.shape);
    said["destination"] = json!(part.destination as i64);
    said["strides"] = json!(part.strides);
    said
}

fn with_key(mut said: Value, key: &Key) -> Value {
    said["run"] = json!(key.run);
    said["epoch"] = json!(key.epoch);
    said["transfer"] = json!(key.transfer);
    said
}

fn cases() -> Vec<(String, Vec<i64>, Vec<Value>)> {
    let vectors: Value = serde_json::from_str(VECTORS).unwrap();
    let words =
        |case: &Value| case["words"].as_array().unwrap().iter().map(|word| word.as_i64().unwrap()).collect();
    let case = |case: &Value| {
        let records = case["records"].as_array().unwrap().clone();
        (case["kind"].as_str().unwrap().to_owned(), words(case), records)
    };
    vectors["cases"].as_array().unwrap().iter().map(case).collect()
}

#[test]
fn records_are_taken_apart_as_python_makes_them() {
    let cases = cases();
    for kind in ["read", "decode", "segment", "host_copy", "array_copy", "offer", "fetch"] {
        assert!(cases.iter().any(|(known, ..)| known == kind), "there is no case of {kind}");
    }
    for (kind, words, records) in cases {
        assert_eq!(said(&kind, &words).unwrap(), records, "{kind}");
    }
}

#[test]
fn a_plan_that_ends_inside_a_record_is_refused_with_the_number_of_the_record() {
    for (kind, words, records) in cases() {
        let error = said(&kind, &words[..words.len() - 1]).unwrap_err();
        assert_eq!(error.kind(), Kind::InvalidInput);
        assert!(error.message().contains("ends inside a record"), "{kind}: {error}");
        assert_eq!(error.context("record"), Some((records.len() - 1).to_string().as_str()), "{kind}");
    }
}

proptest! {
    /// Whatever the words are, the plan is refused or taken apart; there is no panic, and no memory is taken
    /// for what a plan only claims to have.
    #[test]
    fn any_words(words in prop::collection::vec(prop_oneof![-1i64..5, any::<i64>(), Just(1 << 40)], 0..40)) {
        for kind in ["read", "decode", "segment", "host_copy", "array_copy", "offer", "fetch"] {
            if let Err(error) = said(kind, &words) {
                prop_assert_eq!(error.kind(), Kind::InvalidInput);
            }
        }
    }
}
