//! Whatever a host says about blocks has one form, or is refused.

#![no_main]

use libfuzzer_sys::fuzz_target;
use waystation_transport::message::{
    Home, Place, decode_asks, decode_words, encode_asks, encode_words,
};

fuzz_target!(|input: &[u8]| {
    if let Ok(asks) = decode_asks(input) {
        assert_eq!(encode_asks(&asks), input);
    }
    if let Ok(home) = Home::decode(input) {
        assert_eq!(home.encode(), input);
    }
    if let Ok(place) = Place::decode(input) {
        assert_eq!(place.encode(), input);
    }
    if let Ok(words) = decode_words(input) {
        assert_eq!(encode_words(words), input);
    }
});
