//! A body has one sealed form: what opens seals to the same bytes, and what was sealed opens to the
//! same body, but not once a byte of it has changed.

#![no_main]

use libfuzzer_sys::fuzz_target;
use waystation_format::sealed::{open, seal};

fuzz_target!(|input: &[u8]| {
    if let Ok(body) = open(input) {
        assert!(seal(body).expect("what was opened cannot be sealed") == input);
    }
    let Ok(mut sealed) = seal(input) else { return };
    assert!(open(&sealed).expect("what was sealed cannot be opened") == input);
    let at = input.len() % sealed.len();
    sealed[at] ^= 1 << (input[0] % 8);
    assert!(open(&sealed).is_err());
});
