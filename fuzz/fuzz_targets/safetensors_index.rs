//! Whatever index our reader accepts, `serde_json` reads alike, and every file in it is beside it.

#![no_main]

use std::collections::HashMap;

use libfuzzer_sys::fuzz_target;
use serde_json::Value;
use waystation_format::safetensors::parse_index;

fuzz_target!(|text: &[u8]| {
    let Ok(entries) = parse_index(text) else { return };
    let theirs: Value = match serde_json::from_slice(text) {
        Ok(theirs) => theirs,
        // We step over numbers without asking for their value.
        Err(error) if error.to_string().starts_with("number out of range") => return,
        Err(error) => panic!("serde_json refuses what we accept: {error}"),
    };
    let theirs = theirs["weight_map"].as_object().expect("the weight map is no object to serde_json");
    let ours: HashMap<_, _> = entries.iter().map(|(tensor, file)| (&**tensor, &**file)).collect();
    assert_eq!(ours.len(), entries.len(), "a tensor is named twice");
    assert_eq!(ours.len(), theirs.len());
    for (tensor, file) in ours {
        assert_eq!(theirs[tensor], Value::from(file));
        assert!(!file.contains(['/', '\\', '\0']) && file.ends_with(".safetensors"));
    }
});
